"""Strict TOML in, the same TOML out, and errors that say which flag to change."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from small_data import require_limits

from logitmix.common.mappings import from_mapping
from logitmix.modules.config import SIMILARITIES
from logitmix.trainer.config import (
    Config,
    TableSettings,
    dump_toml,
    flatten,
    load_recipe,
    load_toml,
    recipe_names,
)

NAN, INF = float("nan"), float("inf")


LIMITS: dict[str, tuple[list[float], list[float]]] = {
    "tables.dim": ([-4, 6], [0, 4, 128]),
    **dict.fromkeys(("tables.lr", "dense.lr"), ([0.0, -1.0, NAN], [1e-9])),
    **dict.fromkeys(("tables.beta1", "tables.beta2", "dense.beta1", "dense.beta2"), ([-0.1, 1.0, NAN], [0.0, 0.999])),
    **dict.fromkeys(("tables.eps", "dense.eps"), ([0.0, NAN], [1e-12])),
    "tables.init_std": ([-0.1, NAN], [0.0, 1.0]),
    "dense.weight_decay": ([-0.1, NAN], [0.0, 0.1]),
    "comm.timeout_seconds": ([0, -5, 10**18], [1, 86_400]),
    "comm.parts": ([0, 10**9], [1, 1024]),
    "data.held_out": ([0.0, 0.5, NAN], [0.1]),
    "train.seed": ([-1, 2**63], [0, 2**63 - 1]),
    "train.batch_size": ([0, 2**31], [1]),
    "train.minutes": ([-0.5, NAN], [0.0, 0.5]),
    "train.clip": ([-1.0, NAN, INF], [0.0, 1.0]),
    **dict.fromkeys(("train.epochs", "train.threads", "train.log_every", "train.keep"), ([0], [1])),
    "evaluate.batch_size": ([0, 10**9], [1]),
}
"""Values that are refused, and that are not."""


@pytest.mark.parametrize("flag", LIMITS)
def test_what_cannot_work_is_refused_by_the_name_of_its_flag(flag: str) -> None:
    prefix, field = flag.split(".")
    require_limits(type(getattr(Config(), prefix)), prefix, field, *LIMITS[flag])


CONFIGS = {kind: from_mapping(Config, {"model": {"similarity": {"kind": kind}}}, "here") for kind in SIMILARITIES}
"""All at its default, once for each kind of similarity."""


def with_value(flag: str, value: Any) -> dict[str, Any]:
    """The tree with one leaf."""
    *sections, name = flag.split(".")
    tree: dict[str, Any] = {name: value}
    for section in reversed(sections):
        tree = {section: tree}
    return tree


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_number_is_checked_and_named_by_the_flag_that_sets_it(kind: str) -> None:
    for flag, value in flatten(CONFIGS[kind]).items():
        if type(value) in (int, float):
            tree = with_value(flag, type(value)(-1))
            tree.setdefault("model", {}).setdefault("similarity", {})["kind"] = kind
            with pytest.raises(ValueError, match=rf"^here: {re.escape(flag)} (is |\()-1"):
                from_mapping(Config, tree, "here")


def test_every_choice_is_checked_and_lists_what_there_is() -> None:
    free = ("data.path", "data.weight", "model.wanted", "evaluate.want", "warm_start")
    texts = [flag for flag, value in flatten(Config()).items() if type(value) is str and flag not in free]
    assert "model.similarity.kind" in texts and "comm.forward" in texts
    for flag in texts:
        for wrong in ("nonsense", 3, True, ["dot"]):
            with pytest.raises(ValueError, match=rf"^here: {re.escape(flag)} is .*; it must be one of \w+") as error:
                from_mapping(Config, with_value(flag, wrong), "here")
        for choice in str(error.value).partition("one of ")[2].split(", "):
            assert flatten(from_mapping(Config, with_value(flag, choice), "here"))[flag] == choice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[modle]", "recipe.toml: unknown key modle (did you mean model?)"),
        ("model = { encoder = { head = 2 } }", "recipe.toml: unknown key model.encoder.head (did you mean heads?)"),
        (
            "[evaluate]\nwant = 'buy'",
            "recipe.toml: evaluate.want is buy, but the model knows no action to come; leave it out, or train with "
            "model.wanted",
        ),
        (
            "model.similarity = { gate_hidden = 4 }",
            "recipe.toml: model.similarity.gate_hidden is a setting of kind mol, but model.similarity.kind is dot",
        ),
        (
            'model.similarity = { kind = "moll" }',
            "recipe.toml: model.similarity.kind is 'moll' (did you mean mol?); it must be one of "
            + ", ".join(SIMILARITIES),
        ),
    ],
)
def test_an_unknown_key_is_refused_and_the_nearest_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_toml(text, "recipe.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.dim = 64.0", "model.dim is 64.0; it must be of type int"),
        ("train.epochs = true", "train.epochs is True; it must be of type float"),
        ("comm.emulate = 1", "comm.emulate is 1; it must be of type bool"),
        ("evaluate.exclude_history = true", "evaluate.exclude_history is True; it must be one of auto, yes, no"),
        ("model = 3", "model is a section, not a value"),
        ("train.patience = 2\nevaluate.every_epochs = 0", "train.patience is 2, but evaluate.every_epochs is 0"),
        ("train.stride = 201", "train.stride is 201, but windows have 200 actions"),
        ("data.held_out = 0.2", "data.held_out is 0.2, but data.split is leave-one-out"),
        ("train.refit = true\ndata.validation = false", "train.refit needs the validation actions"),
        ("train.patience = 2\ndata.validation = false", "train.patience needs the validation actions"),
        (
            "train.refit = true\nevaluate.every_epochs = 0",
            "train.refit is set, but evaluate.every_epochs is 0, so no che",
        ),
        (
            "train.epochs = 2\ntrain.stop_after_epochs = 2.5",
            "train.stop_after_epochs is 2.5; it must be from 0 to train",
        ),
        (
            "evaluate = { peek_test = true, every_epochs = 0 }",
            "evaluate.peek_test is set, but evaluate.every_epochs is 0",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_flag(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^recipe.toml: {re.escape(message)}"):
        load_toml(text, "recipe.toml")


def test_broken_toml_is_an_error_that_names_the_file_and_the_line() -> None:
    with pytest.raises(ValueError, match=r"^recipe\.toml: not valid TOML: .*line 2"):
        load_toml("[model]\ndim = \n", "recipe.toml")
    with pytest.raises(ValueError, match=r"^recipe\.toml: not valid TOML: a number has more than 4300 digits$"):
        load_toml(f"[train]\nkeep = {'9' * 5000}\n", "recipe.toml")


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_the_same_after_being_written_and_read(name: str, tmp_path: Path) -> None:
    config = load_recipe(name)
    assert load_toml(dump_toml(config), name) == config
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(config))
    assert load_recipe(str(file)) == config
    assert config != Config()


TABLES = """
[tables]
lr = 0.5
beta1 = 0.5
[tables.item]
sharding = "row_wise"
lr = 2
[tables.zip]
optimizer = "sgd"
dim = 16
"""


def test_a_table_has_settings_of_its_own_and_the_others_of_all() -> None:
    config = load_toml(TABLES, "here")
    item, zip_code, other = (config.tables.of(name) for name in ("item", "zip", "brand"))
    assert (item.sharding, item.lr, item.beta1, item.optimizer) == ("row_wise", 2.0, 0.5, "adam")
    assert (zip_code.sharding, zip_code.lr, zip_code.optimizer, zip_code.dim) == ("auto", 0.5, "sgd", 16)
    assert other == replaced(TableSettings(lr=0.5), ["beta1"], 0.5)
    assert load_toml(dump_toml(config), "here") == config
    own = {"tables.item.sharding": "row_wise", "tables.item.lr": 2, "tables.zip.optimizer": "sgd", "tables.zip.dim": 16}
    assert flatten(config) == flatten(Config()) | {"tables.lr": 0.5, "tables.beta1": 0.5} | own
    # What is said of all tables still reaches those that have settings of their own.
    assert replaced(config, ["tables", "beta1"], 0.75).tables.of("item").beta1 == 0.75


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tables.item]\nlrr = 1", r"unknown key tables\.item\.lrr \(did you mean lr\?\)"),
        ("[tables.item]\nlr = -1", r"tables\.item\.lr is -1\.0; it must be above 0 and finite"),
        ("[tables.item]\nlr = true", r"tables\.item\.lr is True; it must be of type float"),
        ('[tables.item]\nsharding = "rows"', r"tables\.item\.sharding is 'rows'; it must be one of auto, row_wise"),
        ("[tables]\nitem = 3", r"unknown key tables\.item"),
        ('[tables]\nsharding = "column_wise"\noptimizer = "rowwise_adagrad"', r"tables\.sharding is column_wise and"),
        (
            '[tables]\noptimizer = "rowwise_adagrad"\n[tables.zip]\nsharding = "column_wise"',
            r"tables\.zip\.sharding is column_wise and tables\.zip\.optimizer rowwise_adagrad",
        ),
        (
            '[tables]\nbeta1 = 0.5\n[tables.zip]\noptimizer = "rowwise_adagrad"\nbeta2 = 0.5',
            r"tables\.zip\.beta2 is 0\.5; it must be left out, because tables\.zip\.optimizer rowwise_adagrad",
        ),
        (
            '[tables]\noptimizer = "sgd"\neps = 0.5\n[tables.zip]\nlr = 0.5',
            r"tables\.eps is 0\.5; it must be left out, because tables\.optimizer sgd does not use it$",
        ),
    ],
)
def test_wrong_settings_of_a_table_are_refused_by_its_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^recipe.toml: (table item: )?{message}"):
        load_toml(text, "recipe.toml")


def replaced(config: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    return dataclasses.replace(config, **{name: replaced(getattr(config, name), rest, value) if rest else value})


def test_the_recipes_are_those_of_the_paper() -> None:
    assert recipe_names() == sorted(recipe_names()) and {"demo-mol", "ml-1m-dot", "ml-1m-mol"} <= set(recipe_names())
    similarity = load_recipe("ml-1m-mol").model.similarity
    # Appendix A: 8 x 8 x 32, gating MLPs of 128, projections of 512, dropout 0.1 and 0.2, tau = 20.
    assert dataclasses.astuple(similarity) == (
        "mol", True, 0.05, 8, 8, 32, False, "decomposed", 128, 512, False, 0.1, 0.2, 0.0, 0.0
    )  # fmt: skip
    # A quarter of the paper's batches, and for the dot product four times its negatives.
    for name, negatives in (("ml-1m-dot", 512), ("ml-1m-mol", 128)):
        config = load_recipe(name)
        assert (config.train.batch_size, config.model.loss.negatives) == (32, negatives)
        assert config.model.loss.kind == "softmax"
        assert dataclasses.astuple(config.model.encoder) == ("sasrec", 2, 1, 0.2, 0.0, 200)
        assert (config.tables.lr, config.dense.lr, config.data.path) == (1e-3, 1e-3, "data/ml-1m")


def test_an_unknown_recipe_names_the_nearest_and_all(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^no recipe named 'ml-1m-mole' \(did you mean ml-1m-mol\?\); there are: amazon-dot, "
    ):
        load_recipe("ml-1m-mole")
    with pytest.raises(ValueError, match=rf"^no recipe file {tmp_path}/none\.toml; .* one of: amazon-dot, "):
        load_recipe(f"{tmp_path}/none.toml")


def test_explicit_negatives_are_not_resampled() -> None:
    text = '[data]\nnegatives = ["shown"]\n[model.loss]\nshare = "sequence"\nresample = 8'
    with pytest.raises(ValueError, match=r"^here: model\.loss\.resample is 8, .* data\.negatives; set it to 0"):
        load_toml(text, "here")


def test_a_recipe_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_bytes(b'[data]\npath = "caf\xe9"\n')
    with pytest.raises(ValueError, match=r"recipe\.toml: not UTF-8 at byte 18, as TOML must be$"):
        load_recipe(str(tmp_path / "recipe.toml"))
