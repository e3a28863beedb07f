import shlex
import subprocess
from collections.abc import Callable

import pytest

from logitmix.trainer import cli
from logitmix.trainer.commands.completion import completion
from logitmix.trainer.config import Config, flatten, recipe_names
from logitmix.trainer.prepare.registry import SOURCES


@pytest.fixture(scope="module")
def script() -> str:
    return completion("bash", cli.COMMANDS, cli.OPTIONS)


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of the words after `logitmix`."""
    line = shlex.join(["logitmix", *words])
    asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _logitmix; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    told = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True)
    assert told.stderr == ""
    return told.stdout.split()


def test_commands_recipes_and_datasets_are_completed(script: str) -> None:
    assert completed(script, "") == [*cli.COMMANDS, *cli.OPTIONS]
    assert completed(script, "re") == ["report", "retrieve", "recommend"]
    assert completed(script, "train", "") == completed(script, "plan", "") == recipe_names()
    assert completed(script, "prepare", "ml-1") == [name for name in SOURCES if name.startswith("ml-1")]
    # Files, which are bash's own part.
    assert completed(script, "evaluate", "") == completed(script, "train", "ml-1m-mol", "--run", "") == []


def test_flags_of_every_command_are_completed(script: str) -> None:
    settings = {f"--{name.replace('_', '-')}" for name in flatten(Config())}
    assert settings < {*completed(script, "train", "auto", "--")}
    # Of another kind than the recipe's.
    assert completed(script, "plan", "auto", "--model.similarity.comp") == ["--model.similarity.component-dim"]
    assert completed(script, "evaluate", "runs/a", "--s") == ["--split"]
    assert completed(script, "update-items", "exports/a", "--item") == ["--items", "--item-column"]
    for command in cli.COMMANDS:
        assert completed(script, command, "x", "--hel") == ["--help"]


def test_values_of_flags_are_completed(script: str) -> None:
    assert completed(script, "train", "auto", "--model.encoder.kind", "") == [
        "sasrec",
        "ligr",
        "hstu",
        "fuxi",
        "pooled",
    ]
    assert completed(script, "export", "runs/a", "--precision", "b") == ["bf16"]
    assert completed(script, "train", "auto", "--help", "model.s") == ["model.similarity"]


def test_the_command_prints_the_script(
    script: str, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    cli.main(["--completion", "bash"])
    assert capsys.readouterr().out == script
    cli.main(["--completion", "zsh"])
    assert capsys.readouterr().out.endswith(script)
    assert "--completion is fish; it must be bash or zsh" in refusal("--completion", "fish")
