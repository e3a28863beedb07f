"""The cells of the paper's tables are settings that the recipes take, and what is computed from actions and scores."""

import json
from pathlib import Path

import numpy as np
import pytest
from small_data import in_memory

from benchmarks.paper import DATASETS, MOVIELENS, PAPER, Cell, Options, explained, main, summary
from logitmix.trainer.config import load_recipe, with_settings

CELLS = [Cell(data, method, 0) for table in PAPER.values() for data, methods in table.items() for method in methods]


@pytest.mark.parametrize("cell", dict.fromkeys(CELLS), ids=lambda cell: cell.name)
def test_every_cell_is_settings_of_its_recipe(cell: Cell) -> None:
    config = with_settings(load_recipe(DATASETS[cell.dataset].recipe), cell.settings(Options()))
    name = cell.method.rpartition("+")[2].partition(" ")[0].partition("-")[0]
    assert config.model.similarity.kind == {"bce": "dot"}.get(name, name)
    assert (config.model.loss.kind == "bce") == (name == "bce")
    assert (config.model.encoder.kind == "hstu") == ("hstu" in cell.method)
    assert config.warm_start == (f"runs/paper/{cell.start.name}" if cell.start else "")
    assert config.train.refit and config.evaluate.metric == DATASETS[cell.dataset].metric


def test_mol_starts_from_the_dot_product_with_its_encoder() -> None:
    assert Cell("ml-1m", "mol", 2).start == Cell("ml-1m", "dot", 2)
    assert Cell("ml-1m", "hstu+mol", 0).start == Cell("ml-1m", "hstu+dot", 0)
    assert Cell("demo", "mol 8x4", 0).start is None and Cell("ml-1m", "neumf", 0).start is None


def found(seed: int, rate: float) -> dict[str, object]:
    return {
        "settings": {}, "metric": "hr@10", "users": 400, "hours": {"run": 0.5 + seed},
        "validation": {"hr@10": 0.5}, "refit": dict.fromkeys(MOVIELENS, rate),
    }  # fmt: skip


def test_a_summary_has_the_deviation_over_seeds_and_the_error_over_users() -> None:
    of = summary([found(0, 0.4), found(1, 0.6)], ["hr@10"])
    assert (of["seeds"], of["minutes"], of["validation"]) == (2, 60, 0.5)
    assert of["hr@10"]["mean"] == 0.5 and of["hr@10"]["error"] == 0.025
    assert of["hr@10"]["deviation"] == pytest.approx(0.02**0.5)


def test_cells_without_results_stay_empty_and_nothing_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ml-100k-dot-0.json").write_text(json.dumps(found(0, 0.4)))
    options = Options(datasets="ml-100k", methods="dot,mol", results=str(tmp_path), show=True, json=True, seeds=2)
    main(options)
    dot, mol = json.loads(capsys.readouterr().out)["rows"]
    assert (dot["method"], mol["method"], mol["ours"]) == ("dot", "mol", None)
    assert dot["ours"]["seeds"] == 1 and dot["ours"]["mrr"] == {"mean": 0.4, "deviation": None}
    with pytest.raises(SystemExit, match="--methods has moll"):
        main(Options(datasets="ml-100k", methods="moll", show=True))


def test_as_many_dimensions_as_there_are_items_explain_everything() -> None:
    random = np.random.default_rng(0)
    dataset = in_memory(np.arange(0, 41 * 9, 9), random.integers(0, 300, 360), 300)
    shares = explained(dataset)
    assert 0 < shares[0] <= shares[1] <= shares[2] and shares[2] == pytest.approx(1, abs=1e-4)
