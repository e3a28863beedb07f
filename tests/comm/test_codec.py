"""Every registered codec; the FP8 format itself is tested in test_fp8.py."""

import pytest
import torch

from logitmix.comm.codec import DIRECTIONS, Codec, Segment, width_of
from logitmix.comm.config import CODECS, Direction

LAYOUTS = [(Segment("a", 8),), (Segment("a", 8), Segment("b", 3), Segment("a", 8))]
REGISTERED = [(direction, name) for direction in DIRECTIONS for name in CODECS[direction]]
BOUND = {
    ("forward", "fp32"): 0.0, ("forward", "bf16"): 2**-8, ("forward", "fp16"): 2**-10, ("forward", "fp8"): 2**-4,
    ("backward", "fp32"): 0.0, ("backward", "bf16"): 2**-8, ("backward", "fp16"): 2**-10, ("backward", "fp8"): 2**-3,
    ("backward", "fp8_stochastic"): 2**-2,
}  # fmt: skip
"""How far a value may arrive from itself, relative to the largest of its segment."""


def rows_of(layout: tuple[Segment, ...], rows: int = 50) -> torch.Tensor:
    return torch.randn(rows, width_of(layout), generator=torch.Generator().manual_seed(0))


def sent(codec: Codec, values: torch.Tensor, layout: tuple[Segment, ...], seed: int = 1) -> torch.Tensor:
    encoded = torch.zeros(len(values), codec.row_bytes(layout), dtype=torch.uint8)
    codec.encode(values, layout, encoded, seed if codec.stochastic else None)
    return encoded


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("direction", "name"), REGISTERED)
def test_rows_arrive_within_the_bound(direction: Direction, name: str, layout: tuple[Segment, ...]) -> None:
    codec, values = CODECS[direction].find(name), rows_of(layout)
    # Into columns of a wider matrix, as where ranks own columns.
    wide = torch.full((len(values), width_of(layout) + 5), torch.nan)
    arrived = wide[:, 2:-3]
    codec.decode(sent(codec, values, layout), layout, arrived)
    parts = values.split([segment.width for segment in layout], dim=1)
    largest = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in parts], dim=1)
    error = (arrived - values).abs()
    assert (error <= BOUND[direction, name] * largest).all()
    assert (error > 0).any() == (name != "fp32")
    assert wide[:, :2].isnan().all() and wide[:, -3:].isnan().all()


@pytest.mark.parametrize(("direction", "name"), [of for of in REGISTERED if of[1] != "fp8_stochastic"])
def test_a_row_is_encoded_by_itself(direction: Direction, name: str) -> None:
    """Its bytes are those of its segments one after the other, and do not depend on other rows."""
    codec, layout = CODECS[direction].find(name), LAYOUTS[1]
    values, sizes = rows_of(layout), [codec.row_bytes((segment,)) for segment in layout]
    whole = sent(codec, values, layout)
    assert codec.row_bytes(layout) == sum(sizes) and torch.equal(sent(codec, values[7:9], layout), whole[7:9])
    parts = values.split([segment.width for segment in layout], dim=1)
    for encoded, part, segment in zip(whole.split(sizes, dim=1), parts, layout, strict=True):
        assert torch.equal(encoded, sent(codec, part.contiguous(), (segment,)))


@pytest.mark.parametrize(("direction", "name"), REGISTERED)
def test_what_is_finite_arrives_finite(direction: Direction, name: str) -> None:
    """A gradient that the wire made infinite would leave a row of NaN."""
    codec, layout = CODECS[direction].find(name), LAYOUTS[1]
    values = rows_of(layout, 3)
    values[:, :6] = torch.tensor([65_519.0, -65_521.0, 1e5, -3.4e38, 3.4e38, torch.nan])
    arrived = torch.empty_like(values)
    codec.decode(sent(codec, values, layout), layout, arrived)
    assert arrived.isfinite().tolist() == values.isfinite().tolist()
    largest = 65_504 if name == "fp16" else 3.38e38
    assert (arrived[:, 3] <= -largest).all() and (arrived[:, 4] >= largest).all()
