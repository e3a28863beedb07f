import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from logitmix.comm.config import Precision
from logitmix.comm.fp8 import dequantize_rowwise, quantize_rowwise, roundtrip

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Relative step, and absolute step in units of the row's largest magnitude.
BOUNDS = {E4M3: (2**-4, 2**-10 / 448), E5M2: (2**-3, 2**-17 / 57344)}
SMALLEST_FP32 = 2**-149
LARGEST_FP32 = torch.finfo(torch.float32).max


def delivered(rows_RD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_rowwise(quantize_rowwise(rows_RD, dtype), rows_RD.shape[1], dtype)


def error_bound(rows_RD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In double: the codec's own bound, FP32 rounding on both sides, and the last place of a subnormal."""
    exact = rows_RD.double().abs()
    relative, absolute = BOUNDS[dtype]
    bound = torch.maximum(relative * exact, absolute * exact.amax(dim=1, keepdim=True))
    return bound * (1 + 2**-16) + exact * 2**-22 + SMALLEST_FP32


@st.composite
def magnitudes(draw: st.DrawFn) -> torch.Tensor:
    """Rows whose elements lie anywhere from subnormal to the largest FP32, each row on a level of its own."""
    R, D = draw(st.integers(1, 4)), draw(st.integers(1, 33))
    rows = []
    for _ in range(R):
        level, spread = draw(st.integers(-149, 127)), draw(st.sampled_from([0, 3, 12, 40, 300]))
        seed = draw(st.integers(0, 2**32))
        generator = torch.Generator().manual_seed(seed)
        exponents = level - torch.randint(0, spread + 1, (D,), generator=generator)
        mantissas = 1 + torch.rand(D, generator=generator, dtype=torch.float64)
        signs = torch.randint(-1, 2, (D,), generator=generator)
        rows.append((signs * mantissas * 2.0 ** exponents.double()).clamp(-LARGEST_FP32, LARGEST_FP32))
    return torch.stack(rows).float()


@st.composite
def any_floats(draw: st.DrawFn) -> torch.Tensor:
    R, D = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    element = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return torch.tensor(draw(st.lists(st.lists(element, min_size=D, max_size=D), min_size=R, max_size=R)))


@settings(max_examples=400, deadline=None)
@given(rows=magnitudes() | any_floats(), dtype=st.sampled_from([E4M3, E5M2]))
def test_error_stays_within_the_bound(rows: torch.Tensor, dtype: torch.dtype) -> None:
    received = delivered(rows, dtype)
    assert received.dtype == torch.float32
    error = (received.double() - rows.double()).abs()
    assert (error <= error_bound(rows, dtype)).all()
    largest = rows.abs().argmax(dim=1, keepdim=True)
    assert torch.equal(received.gather(1, largest), rows.gather(1, largest))


@settings(max_examples=200, deadline=None)
@given(
    rows=magnitudes(),
    dtype=st.sampled_from([E4M3, E5M2]),
    bad=st.sampled_from([math.nan, math.inf, -math.inf]),
    seed=st.integers(0, 2**32),
)
def test_what_is_not_finite_stays_in_its_place(rows: torch.Tensor, dtype: torch.dtype, bad: float, seed: int) -> None:
    spoilt = torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    received = delivered(rows.masked_fill(spoilt, bad), dtype)
    expected = delivered(rows.masked_fill(spoilt, 0.0), dtype)
    assert torch.equal(received.isnan(), spoilt)
    assert torch.equal(received[~spoilt], expected[~spoilt])


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layout_is_payload_then_scale(dtype: torch.dtype, source: torch.dtype) -> None:
    rows = torch.tensor([[1.0, -0.5, 0.25], [0.0, 0.0, 0.0], [-3.0, 6.0, 0.0]], dtype=source)
    wire = quantize_rowwise(rows, dtype)
    assert (wire.dtype, wire.shape) == (torch.uint8, (3, 7))
    largest = torch.finfo(dtype).max
    assert wire[0, :3].view(dtype).tolist() == [largest, -largest / 2, largest / 4]
    assert wire[:, 3:].clone().view(torch.float32).flatten().tolist() == [1.0, 0.0, 6.0]
    assert torch.equal(dequantize_rowwise(wire, 3, dtype), rows.float())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)], ids=str)
def test_empty(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    empty = torch.empty(1).expand(1, 8)[:0] if shape == (0, 8) else torch.empty(shape)
    assert quantize_rowwise(empty, dtype).shape == (shape[0], shape[1] + 4)
    assert delivered(empty, dtype).shape == shape


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_rows_of_any_layout(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(delivered(rows.t(), dtype), delivered(rows.t().contiguous(), dtype))
    wire = torch.zeros(6, 11, dtype=torch.uint8)
    wire[:, 1:11] = quantize_rowwise(rows, dtype).new_zeros(6, 10)
    wire[:5, 1:11] = quantize_rowwise(rows, dtype)
    for row in range(5):
        assert torch.equal(dequantize_rowwise(wire[row : row + 1, 1:], 6, dtype)[0], delivered(rows, dtype)[row])


WORST: dict[Precision, tuple[float, float]] = {
    "fp32": (0.0, 0.0),
    "bf16": (2**-8, 2**-8),
    "fp16": (2**-11, 2**-11),
    "fp8": (2**-4, 2**-3),
}


@pytest.mark.parametrize("backward", WORST)
@pytest.mark.parametrize("forward", WORST)
def test_roundtrip_rounds_each_direction_by_itself(forward: Precision, backward: Precision) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (1 + torch.rand(4, 3, 16, generator=generator)).requires_grad_()
    gradient = 1 + torch.rand(4, 3, 16, generator=generator)
    y = roundtrip(x, forward, backward)
    y.backward(gradient)
    assert x.grad is not None
    for exact, rounded, limit in ((x, y, WORST[forward][0]), (gradient, x.grad, WORST[backward][1])):
        worst = ((rounded - exact).abs() / exact).max().item()
        assert limit / 4 <= worst <= limit * (1 + 2**-16)


def test_roundtrip_of_narrower_rows() -> None:
    x = torch.tensor([[448.0, 1.0, 2**-20, 2**-21]])
    assert roundtrip(x, "fp8").tolist() == [[448.0, 1.0, 0.0, 0.0]]
    assert roundtrip(x, "fp8", row_dim=2).tolist() == x.tolist()
    with pytest.raises(ValueError, match=r"row_dim \(3\) must divide the last dimension \(4\)"):
        roundtrip(x, "fp8", row_dim=3)


def test_roundtrip_keeps_the_dtype_and_takes_nothing() -> None:
    for precision in WORST:
        assert roundtrip(torch.ones(2, 4, dtype=torch.bfloat16), precision).dtype == torch.bfloat16
        assert roundtrip(torch.empty(0, 4), precision).shape == (0, 4)
