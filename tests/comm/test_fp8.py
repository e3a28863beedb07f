import math
import shutil
import sysconfig

import hypothesis.strategies as st
import pytest
import torch
from fp8_cases import BAD, FORMATS, LAYOUTS, dressed, every_kind_of_number, grouped_rows
from hypothesis import given

from logitmix.comm import fp8, fp8_c, fp8_plain
from logitmix.comm.fp8 import dequantize_rowwise, quantize_rowwise
from logitmix.common.compiled import plain_torch

E4M3, E5M2 = FORMATS
# Relative step, and absolute step in units of the scale.
BOUNDS = {E4M3: (2**-4, 2**-10 / 448), E5M2: (2**-3, 2**-17 / 57344)}
LARGEST_BF16 = torch.finfo(torch.bfloat16).max
SEEDS = st.none() | st.integers(0, 2**63 - 1)


def delivered(
    rows: torch.Tensor, dtype: torch.dtype, widths: list[int] | None = None, seed: int | None = None
) -> torch.Tensor:
    wire = quantize_rowwise(rows, dtype, widths, seed)
    return dequantize_rowwise(wire, dtype, [rows.shape[1]] if widths is None else widths)


def bf16(bytes_R2: torch.Tensor) -> torch.Tensor:
    return bytes_R2.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)


def scales(wire: torch.Tensor, widths: list[int]) -> torch.Tensor:
    """What the wire holds, double [R, W]: each group's scale under all of its columns."""
    columns = [bf16(wire[:, scale]) for _, _, scale in fp8_plain._groups(widths)]
    return torch.cat([s.double().expand(-1, D) for s, D in zip(columns, widths, strict=True)], dim=1)


def error_bound(exact: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, steps: int) -> torch.Tensor:
    """In double; `steps` is 1 for the nearest number and 2 for one of both neighbors."""
    relative, absolute = BOUNDS[dtype]
    bound = steps * torch.maximum(relative * exact.abs(), absolute * scale)
    saturated = torch.where(exact.abs() > LARGEST_BF16, exact.abs() * 2**-8, 0.0)
    saturated += torch.where(scale == LARGEST_BF16, exact.abs() * 2**-8, 0.0)
    return bound + exact.abs() * 2**-22 + 2**-149 + saturated


@given(case=grouped_rows(finite=True), dtype=st.sampled_from(FORMATS), seed=SEEDS)
def test_error_stays_within_the_bound(
    case: tuple[torch.Tensor, list[int]], dtype: torch.dtype, seed: int | None
) -> None:
    rows, widths = case
    wire = quantize_rowwise(rows, dtype, widths, seed)
    received = dequantize_rowwise(wire, dtype, widths)
    assert received.dtype == torch.float32
    bound = error_bound(rows.double(), scales(wire, widths), dtype, steps=1 if seed is None else 2)
    assert ((received.double() - rows.double()).abs() <= bound).all()


@given(case=grouped_rows(finite=True))
def test_scale_is_the_largest_rounded_up(case: tuple[torch.Tensor, list[int]]) -> None:
    rows, widths = case
    scale = scales(quantize_rowwise(rows, E4M3, widths), widths)
    for group, s in zip(rows.double().abs().split(widths, dim=1), scale.split(widths, dim=1), strict=True):
        amax = group.amax(dim=1)
        assert (s[:, 0] >= amax.clamp(max=LARGEST_BF16)).all()
        assert (s[:, 0] <= amax + (amax * 2**-7).clamp(min=2**-133)).all()
        assert (s[:, 0] == 0).eq(amax == 0).all()


@given(
    case=grouped_rows(finite=True),
    dtype=st.sampled_from(FORMATS),
    bad=st.sampled_from(BAD),
    place=st.integers(0, 2**32),
    seed=SEEDS,
)
def test_what_is_not_finite_stays_in_its_place(
    case: tuple[torch.Tensor, list[int]], dtype: torch.dtype, bad: float, place: int, seed: int | None
) -> None:
    rows, widths = case
    spoilt = torch.rand(rows.shape, generator=torch.Generator().manual_seed(place)) < 0.2
    received = delivered(rows.masked_fill(spoilt, bad), dtype, widths, seed)
    expected = delivered(rows.masked_fill(spoilt, 0.0), dtype, widths, seed)
    assert torch.equal(received.isnan(), spoilt)
    assert torch.equal(received[~spoilt], expected[~spoilt])


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layout_is_payload_then_scale(dtype: torch.dtype, source: torch.dtype) -> None:
    rows = torch.tensor([[1.0, -0.5, 0.25, 3.0], [0.0, 0.0, 0.0, 0.0], [-3.0, 6.0, -0.0, -7.0]], dtype=source)
    wire = quantize_rowwise(rows, dtype, [3, 1])
    assert (wire.dtype, wire.shape) == (torch.uint8, (3, 8))
    largest = torch.finfo(dtype).max
    assert wire[0, :3].view(dtype).tolist() == [largest, -largest / 2, largest / 4]
    assert wire[0, 5:6].view(dtype).tolist() == [largest]
    assert bf16(wire[:, 3:5]).flatten().tolist() == [1.0, 0.0, 6.0]
    assert bf16(wire[:, 6:8]).flatten().tolist() == [3.0, 0.0, 7.0]
    assert wire[1].count_nonzero() == 0
    assert_same_values(dequantize_rowwise(wire, dtype, [3, 1]), rows.float())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_byte_means_what_torch_says(dtype: torch.dtype) -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    largest = torch.tensor([torch.finfo(dtype).max], dtype=torch.bfloat16).view(torch.uint8)
    received = dequantize_rowwise(torch.cat([byte, largest]).unsqueeze(0), dtype, [256])[0]
    expected = byte.view(dtype).float()
    expected[expected.isinf()] = math.nan
    torch.testing.assert_close(received, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)], ids=str)
def test_empty(dtype: torch.dtype, shape: tuple[int, int], seed: int | None) -> None:
    empty = torch.empty(1).expand(1, 8)[:0] if shape == (0, 8) else torch.empty(shape)
    wire = quantize_rowwise(empty, dtype, seed=seed)
    assert wire.shape == (shape[0], shape[1] + 2)
    assert wire.count_nonzero() == 0
    assert delivered(empty, dtype, seed=seed).shape == shape
    assert quantize_rowwise(torch.empty(2, 0), dtype, []).shape == (2, 0)
    assert delivered(torch.ones(2, 3), dtype, [0, 3, 0]).tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_encodes_into_a_given_buffer_and_decodes_from_any_address(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    buffer = torch.zeros(1 + 5 * 8 + 1, dtype=torch.uint8)
    wire = buffer[1:-1].view(5, 8)
    assert quantize_rowwise(rows, dtype, out=wire) is wire
    assert torch.equal(wire, quantize_rowwise(rows, dtype))
    assert buffer[0] == buffer[-1] == 0
    apart = torch.zeros(5, 11, dtype=torch.uint8)
    apart[:, 1:9] = wire
    assert torch.equal(dequantize_rowwise(apart[:, 1:9], dtype, [6]), dequantize_rowwise(wire, dtype, [6]))
    assert torch.equal(dequantize_rowwise(apart[2:3, 1:9], dtype, [6]), dequantize_rowwise(wire[2:3], dtype, [6]))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_random_rounding_is_exact_in_the_mean(dtype: torch.dtype) -> None:
    # A scale of `largest` leaves the values in the format's own units, normal and subnormal ones.
    largest = torch.finfo(dtype).max
    unit = torch.finfo(dtype).smallest_normal
    values = torch.tensor([1.1, 1.03, -3.7, 300.1, unit * 0.3, -unit * 0.01, unit * 0.97, unit * 1.9, largest])
    received = delivered(values.expand(20_000, -1).contiguous(), dtype, seed=5)
    for column, x in zip(received.double().unbind(1), values.tolist(), strict=True):
        levels = column.unique()
        assert len(levels) == (1 if x == largest else 2)
        assert levels.min() <= x <= levels.max()
        assert abs(column.mean().item() - x) <= 4.5 * (levels.max() - levels.min()).item() / 2 / math.sqrt(20_000)


def test_random_rounding_is_a_function_of_seed_and_place() -> None:
    rows = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    wires = [quantize_rowwise(rows, E5M2, seed=seed) for seed in (3, 3, 4, 3 + 2**32, 2**63 - 1)]
    assert torch.equal(wires[0], wires[1])
    for other in wires[2:]:
        assert not torch.equal(wires[0], other)
    grouped = quantize_rowwise(torch.cat([torch.ones(64, 24), rows[:, 24:]], dim=1), E5M2, [24, 24], seed=3)
    again = quantize_rowwise(rows, E5M2, [24, 24], seed=3)
    assert torch.equal(grouped[:, 26:], again[:, 26:])


def assert_same_values(one: torch.Tensor, other: torch.Tensor) -> None:
    """To the bit, signs of zero and patterns of NaN among them."""
    assert torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def plainly(
    rows: torch.Tensor, dtype: torch.dtype, widths: list[int], seed: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wire = torch.empty(len(rows), sum(widths) + 2 * len(widths), dtype=torch.uint8)
    fp8_plain.quantize(rows, dtype, widths, seed, wire)
    values = torch.empty(rows.shape)
    fp8_plain.dequantize(wire, dtype, widths, values)
    return wire, values


def test_where_there_is_a_compiler_its_library_serves() -> None:
    compiler = sysconfig.get_config_var("CC") or "cc"
    if not shutil.which(compiler.split()[0]) and not shutil.which("cc"):
        pytest.skip("no C compiler here")
    assert fp8.backend("cpu") is fp8_c, "the C part was not built: install again, and read what the compiler said"


@given(
    case=grouped_rows(),
    dtype=st.sampled_from(FORMATS),
    source=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layout=st.sampled_from(LAYOUTS),
    seed=SEEDS,
)
def test_c_gives_the_bytes_of_the_plain_path(
    case: tuple[torch.Tensor, list[int]], dtype: torch.dtype, source: torch.dtype, layout: str, seed: int | None
) -> None:
    rows, widths = dressed(case[0].to(source), layout), case[1]
    wire, values = plainly(rows.contiguous(), dtype, widths, seed)
    assert torch.equal(quantize_rowwise(rows, dtype, widths, seed), wire)
    wide = torch.zeros(len(rows), rows.shape[1] + 7)
    assert_same_values(dequantize_rowwise(wire, dtype, widths, wide[:, 2 : 2 + rows.shape[1]]), values)
    assert wide[:, :2].count_nonzero() == wide[:, 2 + rows.shape[1] :].count_nonzero() == 0


@given(scale=st.integers(0, 0x7F7F), dtype=st.sampled_from(FORMATS), D=st.integers(1, 256))
def test_c_reads_any_byte_as_the_plain_path_does(scale: int, dtype: torch.dtype, D: int) -> None:
    wire = torch.cat([torch.arange(256)[-D:], torch.tensor([scale & 0xFF, scale >> 8])]).to(torch.uint8).unsqueeze(0)
    values = torch.empty(1, D)
    fp8_plain.dequantize(wire, dtype, [D], values)
    assert_same_values(dequantize_rowwise(wire, dtype, [D]), values)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_c_rounds_every_kind_of_number_alike(dtype: torch.dtype) -> None:
    rows = every_kind_of_number(dtype)
    for seed in (None, *range(20)):
        wire, _ = plainly(rows, dtype, [rows.shape[1]], seed)
        assert torch.equal(quantize_rowwise(rows, dtype, seed=seed), wire)


def test_without_the_library_the_plain_path_serves() -> None:
    rows = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    wire = quantize_rowwise(rows, E4M3)
    with plain_torch():
        assert fp8.backend("cpu") is fp8_plain
        assert torch.equal(quantize_rowwise(rows, E4M3), wire)
