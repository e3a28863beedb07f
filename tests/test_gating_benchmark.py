"""What benchmarks/gating.py counts: the layers agree with the paper's formula, and at its sizes with its table."""

import pytest

from benchmarks import gating


def test_the_paper_counts_multiply_adds_in_one_row_and_two_for_each_in_the_other() -> None:
    whole, decomposed = (gating.count(form, gating.PAPER) for form in ("whole", "decomposed"))
    assert round(whole["gflops"] / 2, 1) == gating.PAPER_GFLOPS["whole"]
    assert round(decomposed["gflops"], 1) == gating.PAPER_GFLOPS["decomposed"]
    assert (whole["gib"], decomposed["gib"]) == (gating.PAPER_GB["whole"], gating.PAPER_GB["decomposed"])


@pytest.mark.parametrize("form", ["whole", "decomposed"])
def test_the_layers_agree_with_the_formula(form: str) -> None:
    counts = gating.count(form, gating.Sizes(3, 5, user=7, item=11, cross=13, K=17, L=19))
    assert counts["gflops"] == pytest.approx(counts["formula_gflops"])
    assert counts["gib"] == pytest.approx(counts["formula_gib"])
