"""The words of `logitmix train`: the settings that there are depend on the kinds of similarity and encoder."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from logitmix.common import plugins
from logitmix.modules.config import (
    ENCODERS,
    LOSSES,
    SIMILARITIES,
    DotConfig,
    HSTUConfig,
    MLPConfig,
    MoLConfig,
    PooledConfig,
    SASRecConfig,
)
from logitmix.trainer import cli
from logitmix.trainer.commands import doctor, recipe_help, retrieve
from logitmix.trainer.commands.evaluate import show_metrics
from logitmix.trainer.config import Config, dump_toml, flatten, load_recipe, with_settings

DEMO = load_recipe("demo-mol").model.similarity
FIVE, HEADS = replace(DEMO, query_components=5), HSTUConfig(blocks=2, heads=4)


@pytest.mark.parametrize(
    ("recipe", "words", "settings"),
    [
        ("demo-mol", "", DEMO),
        ("demo-mol", "--model.similarity.query_components=5", FIVE),
        ("demo-mol", "--model.similarity.kind=dot --model.similarity.no-normalize", DotConfig(normalize=False)),
        ("demo-mol", "--model.similarity.kind mlp --model.similarity.hidden 9", MLPConfig(hidden=9)),
        ("demo-mol", "--model.similarity.temperature 0.1 --model.similarity.kind dot", DotConfig(temperature=0.1)),
        ("ml-1m-dot", "--model.similarity.kind mol --model.similarity.gate-hidden 7", MoLConfig(gate_hidden=7)),
        ("", "--model.encoder.heads 2", SASRecConfig(heads=2)),
        # Settings that both kinds have are kept: SASRec's blocks and heads.
        ("", "--model.encoder.kind hstu", HSTUConfig(blocks=2, heads=1)),
        ("", "--model.encoder.kind hstu --model.encoder.no-times --model.encoder.heads 4", HEADS),
        ("", "--model.encoder.max-length 50 --model.encoder.kind=pooled", PooledConfig(max_length=50)),
        ("", "--model.encoder.kind pooled --model.encoder.hidden 32", PooledConfig(hidden=32)),
    ],
)  # fmt: skip
def test_a_recipe_takes_another_kind_and_its_settings(
    recipe: str, words: str, settings: Any, to_train: list[Config], tmp_path: Path
) -> None:
    (tmp_path / "empty.toml").write_text("")
    recipe = recipe or str(tmp_path / "empty.toml")
    cli.main(["train", recipe, *words.split()])
    before, section = load_recipe(recipe), "similarity" if settings.kind in SIMILARITIES else "encoder"
    assert to_train == [replace(before, model=replace(before.model, **{section: settings}))]


@pytest.mark.parametrize("of", ["", "start."])
@pytest.mark.parametrize(
    "settings",
    [
        {"model.similarity.kind": "deepfm", "model.similarity.hidden": 9},
        {"model.encoder.kind": "pooled", "model.similarity.kind": "mlp"},
    ],
)
def test_python_takes_another_kind_as_the_command_line_does(
    of: str, settings: dict[str, Any], to_train: list[Config], tmp_path: Path
) -> None:
    own = {"model.similarity.temperature": 0.2, "model.similarity.projection_hidden": 48, "model.encoder.blocks": 3}
    recipe = with_settings(load_recipe("demo-mol"), own)
    (tmp_path / "recipe.toml").write_text(dump_toml(recipe))
    settings = {f"{of}{name}": value for name, value in settings.items()}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    cli.main(["train", str(tmp_path / "recipe.toml"), *words])
    expected = with_settings(recipe, settings)
    taken = flatten(expected.first if of else expected)
    assert flatten(to_train[0].first if of else to_train[0]) == taken
    assert taken.get("model.similarity.temperature", 0.2) == 0.2 and taken.get("model.encoder.blocks", 3) == 3
    assert taken.get("model.similarity.projection_hidden", 48) == 48


def test_another_kind_may_need_other_values(to_train: list[Config], tmp_path: Path) -> None:
    """Those of the recipe may be refused with it: a correction of softmax."""
    (tmp_path / "recipe.toml").write_text("[model]\nloss = { in_batch = 512, negatives = 64 }\n")
    cli.main(["train", str(tmp_path / "recipe.toml"), "--model.loss.in-batch", "0", "--model.loss.kind", "bce"])
    (config,) = to_train
    assert (config.model.loss.kind, config.model.loss.in_batch, config.model.loss.negatives) == ("bce", 0, 64)


def test_a_table_is_set_by_its_name(to_train: list[Config], tmp_path: Path) -> None:
    words = "--tables.item.sharding row_wise --tables.lr 0.5 --tables.zip.init-std=.125 --tables.item.lr 2"
    words += " --tables.zip.pooled true --tables.zip.dim 16"
    cli.main(["train", "demo-mol", *words.split()])
    tables = to_train[0].tables
    assert tables.by_name == {
        "item": {"sharding": "row_wise", "lr": 2.0},
        "zip": {"init_std": 0.125, "pooled": True, "dim": 16},
    }
    assert (tables.lr, tables.of("item").lr, tables.of("zip").lr) == (0.5, 2.0, 0.5)
    # On top of a recipe's settings of tables.
    (tmp_path / "recipe.toml").write_text("[tables.item]\nlr = 3.0\neps = 0.5\n")
    cli.main(["train", str(tmp_path / "recipe.toml"), "--tables.item.lr", "4"])
    assert to_train[1].tables.by_name == {"item": {"lr": 4.0, "eps": 0.5}}


@pytest.fixture
def helped(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The page that `logitmix WORDS` prints on standard output."""

    def helped(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            cli.main(list(words))
        assert stop.value.code == 0
        return capsys.readouterr().out

    return helped


@pytest.mark.parametrize(
    ("section", "kind", "cls"),
    [
        (section, *entry)
        for section, kinds in (("similarity", SIMILARITIES), ("encoder", ENCODERS), ("loss", LOSSES))
        for entry in kinds.items()
    ],
)
def test_help_lists_every_setting(section: str, kind: str, cls: type, helped: Callable[..., str]) -> None:
    said = helped("train", "demo-mol", f"--model.{section}.kind", kind, "--help", "all")
    recipe = load_recipe("demo-mol")
    config = replace(recipe, model=replace(recipe.model, **{section: cls()}))
    assert [flag for flag in flatten(config) if f"--{flag.replace('_', '-')}" not in said] == []
    # A dataclass without a docstring gets one that repeats its fields.
    assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__)


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_says_what_a_recipe_changes_and_which_sections_there_are(command: str, helped: Callable[..., str]) -> None:
    said = helped(command, "ml-1m-mol", *["--train.clip", "0.5", "--tables.item.lr", "2", "--train.refit", "--help"])
    assert len(said.splitlines()) < 64
    changed, sections = said.partition("\noptions:")[0].splitlines(), said.partition("sections of settings:")[2]
    flags = (
        "train.epochs 24.0",
        "train.clip 0.5",
        "tables.item.lr 2",
        "train.refit",
        "start.model.loss.negatives 512",
    )
    assert {f"  --{flag}" for flag in flags} <= {*changed}
    assert not [line for line in changed if "train.seed" in line or "model.dim" in line]
    assert "--continue RUN" in said and "--continues" not in said
    names = [line.split()[0] for line in sections.splitlines() if line[2:3].strip() and line.startswith("  ")]
    assert names == list(recipe_help.sections_of(Config()))
    # Each with a line of its own about it.
    assert all(re.search(rf"^  {re.escape(name)}  +\w", sections, re.MULTILINE) for name in names)


def test_help_of_a_section_has_its_settings(helped: Callable[..., str], refusal: Callable[..., str]) -> None:
    for section, value in recipe_help.sections_of(load_recipe("ml-1m-mol")).items():
        said = helped("train", "ml-1m-mol", "--help", section)
        flags = set(re.findall(r"^\W? --(\w[\w.-]+)", said, re.MULTILINE))
        # A switch's negation stands on a line of its own where both are too long for one.
        flags = {flag for flag in flags if ".no-" not in flag}
        own = flatten(value, f"{section}.")
        assert flags == {name.replace("_", "-") for name in own if "by_name" not in name}
    said = refusal("train", "ml-1m-mol", "--help", "modle")
    assert "no section 'modle' (did you mean model?); --help takes data, model, " in said


def test_help_and_versions_load_no_torch() -> None:
    """Which takes seconds."""
    program = """
import contextlib, io, sys
from logitmix.trainer import cli
for command in [*cli.COMMANDS, "train demo-mol", "plan demo-mol"]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main([*command.split(), "--help"])
for words in (["--help"], ["--version"]):
    cli.main(words)
assert "torch" not in sys.modules
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    said = told.stdout.splitlines()[-1]
    for name in ("logitmix", "torch", "torchrec"):
        assert f"{name} {version(name)}" in said.split(", ")
    assert re.search(r", fbgemm-gpu(-cpu)? \d", said)


@pytest.mark.parametrize("text", ["1 / 0", "import sys; sys.exit(3)"])
def test_a_broken_plugin_ends_no_command_that_does_without_it(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(plugins, "_broken", {})
    (tmp_path / "own-1.dist-info").mkdir()
    (tmp_path / "own-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.2\n")
    (tmp_path / "own-1.dist-info/entry_points.txt").write_text("[logitmix.plugins]\nany = own_broken\n")
    (tmp_path / "own_broken.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("logitmix.trainer.commands.doctor.examine", doctor._plugins)
    line = f"logitmix: the installed plugin own is broken: {tmp_path}/own_broken.py:1: "
    remedy = "; install one that works, or go on without it: pip uninstall own\n"
    for words, status, out in (
        (["--version"], 0, f"logitmix {version('logitmix')}, "),
        (["--help"], 0, "usage: logitmix COMMAND"),
        (["train", "--help"], 2, ""),
        (["report", "run"], 2, ""),
        ([], 2, ""),
    ):
        with contextlib.nullcontext() if status == 0 else pytest.raises(SystemExit, match=str(status)):
            cli.main(words)
        said = capsys.readouterr()
        assert said.out.startswith(out) and bool(said.out) == bool(out)
        first, *others = said.err.splitlines(keepends=True)
        assert first.startswith(line) and first.endswith(remedy) and (not others or not words)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["doctor"])
    said = capsys.readouterr()
    assert said.out.startswith("broken  plugins      the installed plugin own is broken: ") and not said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train demo-mol --train.threads 3.5", "--train.threads is 3.5; it must be a whole number; see logitmix train"),
        ("train demo-mol --dense.lr fast", "--dense.lr is fast; it must be a number; see logitmix train"),
        ("train demo-mol --model.encoder.times", "model.encoder.times is a setting of kind hstu"),
        ("train demo-mol --model.encoder.kind hsut", "model.encoder.kind is 'hsut' (did you mean hstu?)"),
        ("train demo-mol --train.clip nan", "train.clip is nan; it must be 0 or more and finite"),
        (f"train demo-mol --train.keep {'9' * 5000}", "--train.keep: a number has more than 4300 digits; see"),
        ("prepare tabel", "no data format named 'tabel' (did you mean table?); there are:"),
        ("train demo-mol --train.eopchs 3", "unknown option --train.eopchs (did you mean --train.epochs?); see"),
        ("train demo-mol --zzz 3 --data.pth x", "unknown option --zzz; see logitmix train demo-mol --help"),
        (
            "train demo-mol more",
            "unknown word more; a flag takes one value, and several as a,b; see logitmix train demo-mol --help",
        ),
        ("train demo-mol --train.epochs", "--train.epochs needs a value; see logitmix train demo-mol --help"),
        ("train demo-mol --data.split times", "--data.split is 'times'; it must be one of leave-one-out, time\n"),
        ("evaluate", "evaluate needs RUN; see logitmix evaluate --help"),
        ("train demo-mol --tables.item.lr x", "table item: tables.item.lr is 'x'; it must be of type float"),
        (
            "train demo-mol --tables.item.lr --train.epochs 3",
            "table item: tables.item.lr is ''; it must be of type float",
        ),
        ("train demo-mol --tables.item.lrr 1", "table item: unknown key tables.item.lrr (did you mean lr?)"),
        ("train demo-mol --tables.by-name.item.lr 1", "unknown option --tables.by-name.item.lr"),
    ],
)
def test_what_is_wrong_with_the_words_is_said_plainly(words: str, said: str, refusal: Callable[..., str]) -> None:
    assert refusal(*words.split()).startswith(f"logitmix: {said}")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64424509440 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"),
    ],
)
def test_too_little_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: str, words: list[str]) -> None:
        raise error

    monkeypatch.setattr(cli, "run", fail)
    with pytest.raises(SystemExit, match="1"):
        cli.main(["train"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("logitmix: there is not enough memory; lower what takes it: train.batch_size, ")


def test_titles_and_ids_in_brackets_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich would read them as markup: [blue] disappears, and [/b] is an error."""
    row = {"rank": 1, "id": "id[red]", "title": "Shirt [blue] [/b]", "score": 1.0}
    retriever: Any = SimpleNamespace(ask=lambda *_: [{"items": [row]}])
    retrieve.show_items(retriever, retrieve.Arguments("export"))
    said = capsys.readouterr().out
    assert "id[red]" in said and "Shirt [blue] [/b]" in said
    show_metrics({"hr@10": 0.5}, "runs/a[lr]: test", as_json=False)
    assert "runs/a[lr]" in "".join(capsys.readouterr().out.split())


def test_a_refit_has_no_directory_of_its_own(tmp_path: Path, refusal: Callable[..., str]) -> None:
    (tmp_path / "config.toml").write_text("")
    assert "--run has no place beside --refit" in refusal("train", "--refit", str(tmp_path), "--run", "other")


@pytest.mark.parametrize("threads", ["-1", "100000"])
def test_threads_have_limits(threads: str, refusal: Callable[..., str]) -> None:
    said = refusal("evaluate", "nothing", "--threads", threads)
    assert f"threads is {threads}; it must be from 1 to" in said
