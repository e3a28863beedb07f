"""The words of `logitmix train`: the settings that there are depend on the kind of similarity."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from logitmix.common.mappings import classes_by_kind
from logitmix.modules.config import DotConfig, MLPConfig, MoLConfig, SimilarityConfig
from logitmix.trainer import cli, loop
from logitmix.trainer.config import Config, flatten, load_recipe


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that training was started with."""
    configs: list[Config] = []

    def train(config: Config, run: Path) -> dict[str, Any]:
        configs.append(config)
        return {"step": 0}

    monkeypatch.setattr(loop, "train", train)
    return configs


DEMO = load_recipe("demo-mol").model.similarity


@pytest.mark.parametrize(
    ("words", "similarity"),
    [
        ("", DEMO),
        ("--model.similarity.kind mol --model.similarity.query-components 5", replace(DEMO, query_components=5)),
        ("--model.similarity.query_components=5", replace(DEMO, query_components=5)),
        ("--model.similarity.kind dot", DotConfig()),
        ("--model.similarity.kind=dot --model.similarity.no-normalize", DotConfig(normalize=False)),
        ("--model.similarity.kind mlp --model.similarity.hidden 9", MLPConfig(hidden=9)),
        ("--model.similarity.temperature 0.1 --model.similarity.kind dot", DotConfig(temperature=0.1)),
    ],
)
def test_a_recipe_takes_another_kind_and_its_settings(words: str, similarity: object, parsed: list[Config]) -> None:
    cli.main(["train", "demo-mol", *words.split()])
    recipe = load_recipe("demo-mol")
    assert parsed == [replace(recipe, model=replace(recipe.model, similarity=similarity))]


def test_a_dot_recipe_becomes_a_mixture(parsed: list[Config]) -> None:
    words = "--model.similarity.kind mol --model.similarity.gate-hidden 7"
    cli.main(["train", "ml-1m-dot", *words.split()])
    assert parsed[0].model.similarity == MoLConfig(gate_hidden=7)


@pytest.mark.parametrize("kind", classes_by_kind(SimilarityConfig))
def test_help_lists_every_setting(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "demo-mol", "--model.similarity.kind", kind, "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    recipe = load_recipe("demo-mol")
    config = replace(recipe, model=replace(recipe.model, similarity=classes_by_kind(SimilarityConfig)[kind]()))
    assert [flag for flag in flatten(config) if f"--{flag.replace('_', '-')}" not in said] == []
