"""What benchmarks/flops.py counts, at the paper's settings, beside its table of hyperparameters."""

import pytest

from benchmarks import flops
from logitmix.modules.config import DotConfig


def test_a_dot_product_is_its_width() -> None:
    assert flops.flops(52, DotConfig()) == flops.Flops(query=0, item=0, pair=52)


@pytest.mark.parametrize("dataset", ["ML-1M", "ML-20M", "Beauty", "Books"])
def test_the_mlp_is_the_tables_with_its_first_layer_for_query_and_item(dataset: str) -> None:
    setting = flops.PAPER[dataset]
    config, paper = setting.methods["MLP"]
    counted = flops.flops(setting.dim, config)
    assert (counted.query + counted.item + counted.pair) / 1024 == pytest.approx(paper, abs=0.0501)


@pytest.mark.parametrize(("dataset", "method"), [(d, m) for d in ("ML-1M", "ML-20M") for m in ("DeepFM", "MoL")])
def test_deepfm_and_mol_are_the_tables_within_one_percent(dataset: str, method: str) -> None:
    setting = flops.PAPER[dataset]
    config, paper = setting.methods[method]
    counted = flops.flops(setting.dim, config)
    assert (counted.item + counted.pair) / 1024 == pytest.approx(paper, rel=0.01)
