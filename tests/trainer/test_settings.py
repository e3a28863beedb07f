"""Every setting of every part changes something, or is refused by its name: none is accepted and then ignored.

The settings are those of the dataclasses, so a new one that nothing uses fails here.
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from small_data import WEIGHTED, a_pipeline, gather_table, small_config, write_dataset

from logitmix.modules.kinds.registry import KINDS
from logitmix.trainer.config import Config, flatten
from logitmix.trainer.loop import train
from logitmix.trainer.run.metrics import read_rows

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
CODE = "\n".join(
    file.read_text(encoding="utf-8")
    for folder in ("comm", "modules", "trainer")
    for file in (ROOT / folder).rglob("*.py")
    if file.name != "config.py"
)
NOTHING: Mapping[str, Any] = types.MappingProxyType({})
COMMON: Mapping[str, Any] = {
    "model.encoder.max_length": 12,
    "comm.emulate": True,
    "train.precision": "fp32",
    "train.epochs": 3,
    "train.keep": 1,
    "train.loggers": [],
    "evaluate.every_epochs": 0.5,
}
"""Settings that each one is tried with."""
NEEDS: dict[str, dict[str, Any]] = {
    "continues": {"warm_start": "earlier"},
    "data.held_out": {"data.split": "time"},
    "data.items_after": {"data.items": 30},
    "model.user_id_dropout": {"model.features": ["user"]},
    "model.wanted_dropout": {"model.wanted": "action"},
    "model.similarity.user_component": {"model.features": ["user"]},
    "model.loss.group_positions": {"model.loss.share": "group"},
    "tables.pooled": {"model.features": ["tags"]},
    "tables.capacity": {"model.features": ["tags"]},
    "tables.admit_after": {"model.features": ["tags"], "tables.tags.capacity": 3},
    "tables.evict": {"model.features": ["country"], "tables.country.capacity": 2, "train.batch_size": 1},
    "train.checkpoint_every": {"train.keep": 20},
    "evaluate.want": {"model.wanted": "action"},
}
"""Further settings that one depends on, by its flag."""
OTHERS: dict[str, list[Any]] = {
    "warm_start": ["earlier"],
    "start": [{"train": {"epochs": 1}}],
    "data.path": ["another"],
    "data.targets": [["action = type-1"]],
    "data.negatives": [["query"]],
    "data.weight": ["rating"],
    "model.features": [[name] for name in {feature.kind: feature.name for feature in WEIGHTED.features}.values()],
    "model.wanted": ["action"],
    "tables.sharding": ["table_wise", "column_wise"],
    "tables.eps": [1.0],
    "tables.by_name": [{"item": {"lr": 0.5}}],
    "train.minutes": [1e-9],
    "train.warmup_steps": [2],
    "train.device": ["cuda"],
    "train.loggers": [["tensorboard"]],
    "evaluate.metric": ["mrr"],
    "evaluate.exclude_history": ["yes"],
    "evaluate.groups": [["country"]],
    "evaluate.want": ["type-1"],
}
"""Other values, where the type does not tell them or the usual ones change nothing in so small a run."""
UNSEEN = {
    "comm.dense": "two ranks sum gradients in it",
    "comm.parts": "two ranks exchange rows in parts",
    "comm.timeout_seconds": "ranks wait so long for another",
    "tables.group_size": "ranks are divided so",
    "train.precision": "a processor without BF16 arithmetic computes in FP32",
    "train.compile": "it takes minutes",
    "train.threads": "it is to change no result",
    "train.save_in_background": "it is to change no result",
    "train.on_damage": "a damaged checkpoint shows it",
    "train.on_save_failure": "a full disk shows it",
    "train.stop_seconds": "a signal shows it",
    "evaluate.batch_size": "it is to change no result",
}
"""Settings that an undisturbed run of one process does not show, and the reason: code must read them."""


@dataclass(frozen=True)
class Setting:
    """A setting that is tried."""

    flag: str
    hint: Any
    beside: Mapping[str, Any]
    """The settings that choose the part that it is one of."""

    def __str__(self) -> str:
        return " ".join([self.flag, *map(str, self.beside.values())])


def settings_of(section: type, prefix: str = "", beside: Mapping[str, Any] = NOTHING) -> Iterator[Setting]:
    """The settings of a section and of those within, of each kind of these and for each of their optimizers."""
    hints = typing.get_type_hints(section)
    for entry in dataclasses.fields(section):
        flag, hint = prefix + entry.name, hints[entry.name]
        if isinstance(hint, types.UnionType):
            for part in typing.get_args(hint):
                yield from settings_of(part, f"{flag}.", {f"{flag}.kind": part.kind})
        elif dataclasses.is_dataclass(hint):
            optimizers = typing.get_args(typing.get_type_hints(hint).get("optimizer"))
            for chosen in [{f"{flag}.optimizer": name} for name in optimizers] or [NOTHING]:
                yield from settings_of(hint, f"{flag}.", chosen)
        elif flag not in beside:
            yield Setting(flag, hint, beside)


SETTINGS = list(settings_of(Config))
PARTS = [dict(part) for part in {tuple(setting.beside.items()): None for setting in SETTINGS} if part]
"""The kinds and optimizers that there are, each as the setting that chooses it."""


def others(setting: Setting, value: Any) -> list[list[Any]]:
    """Other values than the given one, in groups: of a group, the first that is not refused is tried."""
    if setting.flag in OTHERS:
        return [[other] for other in OTHERS[setting.flag]]
    if setting.hint is bool:
        return [[not value]]
    if setting.hint is int:
        return [[other for other in (2 * value, value + 1, value + 4, value // 2, 3) if other != value]]
    if setting.hint is float:
        return [[value / 2 or 0.25, value + 1.0]]
    return [[choice] for choice in typing.get_args(setting.hint) if choice != value]


class Runs:
    """Short trainings, and what they leave."""

    def __init__(self, folder: Path, places: Mapping[str, Path]) -> None:
        self.folder, self.places = folder, places
        self.known: dict[tuple[str, bool], object] = {}

    def config(self, settings: Mapping[str, Any]) -> Config:
        """ValueError for what a configuration refuses."""
        named = {
            name: str(self.places.get(value, value)) if type(value) is str else value
            for name, value in settings.items()
        }
        return small_config(self.places["data"], COMMON | named)

    def found(self, config: Config, whole: bool) -> object:
        """What some steps of training leave, or what a `whole` run does."""
        key = repr(config), whole
        if key not in self.known:
            self.known[key] = self._run(config) if whole else self._steps(config)
        return self.known[key]

    def _steps(self, config: Config) -> object:
        """Losses, rates and weights, and how tables are divided."""
        with a_pipeline(config, 3) as pipeline:
            losses = [{name: loss.item() for name, loss in pipeline.train_step().items()} for _ in range(3)]
            model = pipeline.model
            weights = {name: of.tolist() for name, of in model.tower.state_dict().items()}
            tables = {name: gather_table(model, name).tolist() for name in model.shards()}
            return losses, weights, tables, model.plan

    def _run(self, config: Config) -> object:
        """Its files, the rows of metrics and results, without what differs from run to run."""
        run = self.folder / str(len(self.known))
        results = train(config, run)
        rows = [{name: of for name, of in row.items() if not UNSTEADY.match(name)} for row in read_rows(run)]
        steady = {name: of for name, of in results.items() if not UNSTEADY.match(name)}
        digests = {file.parent.name: json.loads(file.read_text())["files"] for file in run.rglob("checkpoint.json")}
        names = {str(path.relative_to(run)) for path in run.rglob("*") if path.suffix in ("", ".json", ".tsv")}
        return steady, rows, digests, sorted(names)


UNSTEADY = re.compile("time/|memory/|examples_per_second|seconds")


@pytest.fixture(scope="module")
def runs(featured: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    places = {"data": featured, "another": write_dataset(folder / "another", seed=1), "earlier": folder / "earlier"}
    runs = Runs(folder, places)
    train(runs.config({"train.seed": 1}), folder / "earlier")
    return runs


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_setting_changes_something_or_is_refused_by_its_name(runs: Runs, setting: Setting) -> None:
    if setting.flag in UNSEEN:
        assert re.search(rf"\.{setting.flag.rpartition('.')[2]}\b", CODE)
        return
    given = {**setting.beside, **NEEDS.get(setting.flag, {})}
    before = runs.config(given)
    value = flatten(before).get(setting.flag)
    for values in others(setting, value):
        refused: list[str] = []
        for other in values:
            try:
                config = runs.config({**given, setting.flag: other})
                assert config != before
                if runs.found(config, False) == runs.found(before, False):
                    assert runs.found(config, True) != runs.found(before, True), f"{setting} {other} changes nothing"
                break
            except ValueError as error:
                refused.append(str(error))
        else:
            name = setting.flag.rpartition(".")[2]
            assert all(name in said and "\n" not in said for said in refused), refused


def test_features_of_all_kinds_are_tried() -> None:
    # A text is stored as a vector.
    assert {feature.kind for feature in WEIGHTED.features} == KINDS.keys() - {"text"}


@pytest.mark.parametrize("section", dict.fromkeys(name for part in PARTS for name in part))
def test_no_two_kinds_are_alike(runs: Runs, section: str) -> None:
    found = [runs.found(runs.config(part), False) for part in PARTS if section in part]
    assert all(one != other for one, other in combinations(found, 2))
