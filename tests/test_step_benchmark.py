"""What benchmarks/recipe_step.py times is the training step, in parts."""

from pathlib import Path

import pytest
import torch
from small_data import a_pipeline, gather_table, small_config

from benchmarks import measure, recipe_step


def test_a_step_in_parts_moves_all_weights_as_one_in_one_part(featured: Path) -> None:
    """Features of both sides, both stages and targets that are not at all positions."""
    of_both = {"model.features": ["all"], "data.targets": ["action = type-1"], "train.precision": "fp32"}
    of_both |= {"tables.optimizer": "sgd", "tables.lr": 0.1, "dense.optimizer": "sgd", "dense.lr": 0.1}
    found = []
    for divided in (False, True):
        with a_pipeline(small_config(featured, of_both), 1) as pipeline:
            parts = recipe_step.Parts()
            if divided:
                with parts.cutting(pipeline.model.tower):
                    recipe_step._step(pipeline, parts)
            else:
                pipeline.train_step()
            model = pipeline.model
            found.append([*model.tower.parameters(), *(gather_table(model, name) for name in model.shards())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert ("features", "backward") in parts.seconds


def test_a_recipe_is_sized_as_in_training(featured: Path) -> None:
    config = recipe_step.config_of("auto", str(featured))
    assert config.model.features == ("brand", "tags", "price", "image", "weighted_item")
    assert config.model.loss.negatives == 0 and config.data.path == str(featured)


@pytest.mark.long
def test_figures_say_which_compiled_parts_were_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "missing_parts", lambda: ["MoL's loss"])
    assert measure.machine().endswith(", WITHOUT COMPILED MoL's loss")
