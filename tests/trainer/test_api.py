"""The commands as functions."""

import json
import re
from collections.abc import Callable
from html import escape
from pathlib import Path

import pytest

from logitmix.modules.config import DotConfig, MoLConfig
from logitmix.trainer import api
from logitmix.trainer.config import load_recipe, with_settings


@pytest.mark.filterwarnings("error")
def test_from_clicks_to_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a warning, also of libraries."""
    lines = [f"u{user},i{(user + step) % 20},{step}" for user in range(40) for step in range(8)]
    (tmp_path / "clicks.csv").write_text("user,item,timestamp\n" + "\n".join(lines) + "\n")
    description = api.prepare("table", source=tmp_path / "clicks.csv", out=tmp_path / "data")
    assert (description["users"], description["items"]) == (40, 20)
    assert "written   40 users, 20 items" in repr(description) and json.loads(json.dumps(description)) == description
    settings = {"data.path": str(tmp_path / "data"), "model.dim": 8, "train.epochs": 1, "train.device": "cpu"}
    results = api.train("auto", tmp_path / "run", settings)
    assert results == api.train("auto", tmp_path / "run", settings)  # the same sizes, or it would be another run
    assert f"test, checkpoint of step {results['step']}" in " ".join(repr(results).split())
    (line,) = [line for line in repr(results).splitlines() if "mrr" in line]
    assert [f"{results[name]:.4f}" for name in ("mrr", "popularity/mrr", "item_knn/mrr")] == re.findall(r"[\d.]+", line)
    assert results._repr_html_() == f"<pre>{escape(repr(results))}</pre>"  # type: ignore[attr-defined]
    metrics = api.evaluate(tmp_path / "run")
    assert metrics["hr@10"] == results["hr@10"] and metrics["users"] == 40
    assert metrics["item_knn/hr@10"] == results["item_knn/hr@10"]
    exported = api.export(tmp_path / "run", tmp_path / "served")
    size = sum(file.stat().st_size for file in (tmp_path / "served").iterdir() if file.name != "manifest.json")
    assert exported == api.Exported(str(tmp_path / "served"), "run", results["step"], 20, size)  # type: ignore[arg-type]
    assert len(repr(exported)) < 120 + len(exported.path)
    assert len(api.Retriever.load(tmp_path / "served").rows(["i3", "i4"], k=5)) == 5
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_settings_go_on_top_by_their_names() -> None:
    recipe = load_recipe("demo-mol")
    config = with_settings(recipe, {"train.epochs": 3, "model.similarity.query_components": 2})
    assert config.train.epochs == 3 and isinstance(config.model.similarity, MoLConfig)
    assert (config.model.similarity.query_components, config.model.similarity.item_components) == (2, 4)
    config = with_settings(recipe, {"model.similarity.temperature": 0.1, "model.similarity.kind": "dot"})
    assert config.model.similarity == DotConfig(temperature=0.1)
    assert with_settings(recipe, {}) == recipe
    assert with_settings(recipe, {"model.loss.kind": "bce"}).model.loss.negatives == recipe.model.loss.negatives != 128
    with pytest.raises(ValueError, match=r"train\.epochs\.more is 3; it must be the name of a setting"):
        with_settings(recipe, {"train.epochs.more": 3})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: api.prepare("table", sorce="x"), r"prepare: unknown key sorce \(did you mean source\?\)"),
        (lambda: api.prepare("table", where="a = 1"), "prepare: where is 'a = 1'; it must be a list"),
        (lambda: api.prepare("table", min_user_actions="3"), "min_user_actions is '3'; it must be of type int"),
        (lambda: api.train("demo-mol", "run", {"train": {"epochs": 1}}), "train is .*; it must be a value of one sett"),
        (lambda: api.evaluate("run", "tset"), "split is 'tset'; it must be test or validation"),
        (lambda: api.export("run", "out", precision="fp8"), "precision is 'fp8'; it must be among"),
        (lambda: api.export("run", "out", extras="faiss"), "extras is 'f'; it must be among"),
    ],
)
def test_arguments_of_another_kind_are_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
