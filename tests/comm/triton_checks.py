"""Holds the Triton codec to the plain path's bytes."""

import itertools

import hypothesis.strategies as st
import torch
from fp8_cases import FORMATS, dressed, every_kind_of_number, grouped_rows
from hypothesis import given, settings

from logitmix.comm import fp8_plain, fp8_triton


def check_rows(device: str, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None)
    @given(
        case=grouped_rows(),
        dtype=st.sampled_from(FORMATS),
        source=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        layout=st.sampled_from(["contiguous", "columns of a wider matrix"]),
        seed=st.none() | st.integers(0, 2**63 - 1),
    )
    def same_bytes(
        case: tuple[torch.Tensor, list[int]], dtype: torch.dtype, source: torch.dtype, layout: str, seed: int | None
    ) -> None:
        values, widths = case[0].to(source), case[1]
        wire = torch.empty(len(values), sum(widths) + 2 * len(widths), dtype=torch.uint8)
        fp8_plain.quantize(values, dtype, widths, seed, wire)
        got = torch.zeros_like(wire, device=device)
        fp8_triton.quantize(dressed(values, layout).to(device), dtype, widths, seed, got)
        assert torch.equal(got.cpu(), wire)
        check_values(wire, dtype, widths, device)

    same_bytes()


def check_every_byte(device: str) -> None:
    """All bytes under scales of every exponent, lifted ones among them."""
    for dtype in FORMATS:
        scales = torch.arange(0, 0x7F80, 101)
        rows = torch.cat([torch.arange(256).expand(len(scales), -1), scales[:, None] & 0xFF, scales[:, None] >> 8], 1)
        check_values(rows.to(torch.uint8), dtype, [256], device)


def check_every_kind_of_number(device: str) -> None:
    for dtype, seed in itertools.product(FORMATS, (None, 0, 1, 2**62 + 1)):
        rows = every_kind_of_number(dtype)
        wire = torch.empty(1, rows.shape[1] + 2, dtype=torch.uint8)
        fp8_plain.quantize(rows, dtype, [rows.shape[1]], seed, wire)
        got = torch.zeros_like(wire, device=device)
        fp8_triton.quantize(rows.to(device), dtype, [rows.shape[1]], seed, got)
        assert torch.equal(got.cpu(), wire)


def check_values(wire: torch.Tensor, dtype: torch.dtype, widths: list[int], device: str) -> None:
    W = sum(widths)
    values = torch.empty(len(wire), W)
    fp8_plain.dequantize(wire, dtype, widths, values)
    wide = torch.zeros(len(wire), W + 7, device=device)
    apart = torch.zeros(len(wire), wire.shape[1] + 3, dtype=torch.uint8, device=device)
    apart[:, 1:-2] = wire.to(device)
    fp8_triton.dequantize(apart[:, 1:-2], dtype, widths, wide[:, 2 : 2 + W])
    assert torch.equal(wide[:, 2 : 2 + W].cpu().contiguous().view(torch.int32), values.view(torch.int32))
    assert wide[:, :2].count_nonzero() == wide[:, 2 + W :].count_nonzero() == 0


def check_empty(device: str) -> None:
    for R, W in ((0, 8), (3, 0), (0, 0)):
        wire = torch.full((R, W + 2), 9, dtype=torch.uint8, device=device)
        fp8_triton.quantize(torch.empty(R, W, device=device), FORMATS[0], [W], None, wire)
        assert wire.count_nonzero() == 0
        fp8_triton.dequantize(wire, FORMATS[0], [W], torch.empty(R, W, device=device))


def check_all(device: str, few: bool = False) -> None:
    check_empty(device)
    check_every_byte(device)
    check_every_kind_of_number(device)
    if not few:
        check_rows(device, 100 if device == "cpu" else 10)
