"""Composes the packages' configurations. Imports no torch."""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, Literal

from logitmix.comm.config import WireConfig
from logitmix.common.mappings import (
    OTHER_SECTIONS,
    brief,
    from_mapping,
    names_of_kind,
    nearest,
    plainly,
    require,
    require_from,
    to_mapping,
)
from logitmix.common.messages import require_no_secrets, say
from logitmix.common.plugins import Kinds, Registry, lacking, load_named, references
from logitmix.modules.config import ENCODERS, LOSSES, SIMILARITIES, ModelConfig, without_user_component
from logitmix.modules.schema import ITEM, Schema, Table
from logitmix.trainer.metrics import METRICS
from logitmix.trainer.schedule import SCHEDULES


@dataclass(frozen=True)
class DataConfig:
    """The dataset, and what of it is held out."""

    path: str = "data/demo"
    """Dataset directory, as `logitmix prepare` writes it."""
    split: Literal["leave-one-out", "time"] = "leave-one-out"
    """What is held out: each user's last two actions; or, with time, the latest actions of all users. Then each user's
    first action in the validation or test part is ranked, given all the user's earlier actions."""
    held_out: float = 0.1
    """With split time: share of all actions, the latest ones, that is for the test; as many before them are for
    validation."""
    targets: tuple[str, ...] = ()
    """Which actions are predicted: conditions on features of the actions, such as "event = purchase", that hold for all
    of them. Only these are trained on, held out and ranked; all actions are history. Without conditions, all are."""
    negatives: tuple[str, ...] = ()
    """Explicit negatives of a target, which take the place of the last of its sampled ones, up to half of them: a
    feature of its action that lists items, such as those that were shown with it, or the actions since the target
    before it that fulfill a condition, such as "event = dislike". These stay in the history, but are no targets.
    "all" of model.features leaves such lists out."""
    weight: str = ""
    """A feature of the actions, numbers of 0 or more such as dwell times or prices, that multiplies the loss of a
    target. The loss is the mean by these weights, so their unit does not matter. Without it, all count alike."""
    items: int = 0
    """Most items of the run: those with the latest training actions have rows, are ranked and exported. Others are left
    out of histories and targets, and held out they count as misses. 0: all items."""
    items_after: int = 1
    """Training actions of an item, below which it is one of data.items only where the others leave room."""
    validation: bool = True
    """Hold out actions for validation, too. Otherwise a run trains on them, and its last checkpoint counts as the
    best."""

    def __post_init__(self) -> None:
        require_no_secrets("data.path", self.path)
        require_from(0, 2**62, "data.items", self.items)
        require_from(1, 2**62, "data.items_after", self.items_after)
        if self.items_after > 1 and not self.items:
            raise ValueError(
                f"data.items_after is {self.items_after}, but data.items is 0, which keeps all items; set data.items, "
                "or leave data.items_after out"
            )
        require(0 < self.held_out < 0.5, "data.held_out", self.held_out, "above 0 and below 0.5")
        if self.held_out != DataConfig.held_out and self.split != "time":
            raise ValueError(
                f"data.held_out is {self.held_out}, but data.split is {self.split}, which holds out two actions of "
                "each user; set data.split to time, or leave data.held_out out"
            )


def conditions_of(negatives: Sequence[str]) -> list[str]:
    """Those entries of data.negatives that are conditions; the others are names of features."""
    return [of for of in negatives if not of.isidentifier()]


@dataclass(frozen=True)
class TableSettings:
    """One sharded embedding table."""

    sharding: Literal["auto", "row_wise", "table_wise", "column_wise"] = "auto"
    """How it is divided among the ranks; auto lets TorchRec's planner choose, within the rules of parallel/plan.py."""
    dim: int = 0
    """D: width of its rows; 0 takes model.dim."""
    precision: Literal["fp32", "fp16"] = "fp32"
    """Precision of its rows in memory. FBGEMM rounds updates of fp16 at random on CUDA; on a CPU to nearest, so that
    updates below 1/4096 of a weight are lost, and not with adam."""
    pooled: bool = False
    """For bags of many ids: the owners of rows send one sum for each bag, rather than its rows."""
    cache_load_factor: float = 1.0
    """Below 1, on CUDA: rows stay in the host's memory, as Adam's state does, and a GPU caches this share of them
    (FBGEMM's UVM caching)."""
    optimizer: str = "adam"
    """Only rows that a batch touches move. rowwise_adagrad keeps one number per row instead of 2 D."""
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    init_std: float = 0.02
    """Standard deviation of the truncated normal that rows start from."""
    capacity: int = 0
    """Of a table of a feature: rows for known values, which pass from value to value where there are more values than
    that. Values without a row have the unknown one's. 0: each value has its own row."""
    admit_after: int = 1
    """With capacity: the number of steps that must name a value before it gets a row."""
    evict: Literal["last_use", "frequency"] = "last_use"
    """With capacity: which value loses its row to another, the one that was named longest ago, or the one that the
    fewest steps have named."""

    def check(self, prefix: str) -> None:
        needs = "0 (that of the model) or a positive multiple of 4, as FBGEMM's rows are"
        require(self.dim >= 0 and self.dim % 4 == 0, f"{prefix}.dim", self.dim, needs)
        require(0 < self.cache_load_factor <= 1, f"{prefix}.cache_load_factor", self.cache_load_factor, "in (0, 1]")
        _check_rates(self, prefix)
        require(self.init_std >= 0, f"{prefix}.init_std", self.init_std, "0 or more")
        require_from(0, 2**62, f"{prefix}.capacity", self.capacity)
        require_from(1, 2**31 - 1, f"{prefix}.admit_after", self.admit_after)
        if self.sharding == "column_wise" and self.optimizer == "rowwise_adagrad":
            raise ValueError(
                f"{prefix}.sharding is {self.sharding} and {prefix}.optimizer rowwise_adagrad, whose one number for a "
                "row each shard of its columns would have for itself; choose another sharding or optimizer"
            )


_UNUSED = {"sgd": ("beta1", "beta2", "eps"), "rowwise_adagrad": ("beta1", "beta2")}
"""The settings of an optimizer that these do not use."""
_RATES = ("beta1", "beta2", "eps")


def _refuse_unused(prefix: str, given: Mapping[str, Any], optimizers: Sequence[str]) -> None:
    """Checks that one of the optimizers uses each of the given settings.

    Raises:
        ValueError: None of them uses a setting that differs from its default.
    """
    for name, value in given.items():
        if all(name in _UNUSED.get(optimizer, ()) for optimizer in optimizers):
            said = f"left out, because {prefix}.optimizer {optimizers[0]} does not use it"
            require(value == getattr(TableSettings, name), f"{prefix}.{name}", value, said)


def _check_rates(of: "TableSettings | DenseConfig", prefix: str) -> None:
    require(0 < of.lr < inf, f"{prefix}.lr", of.lr, "above 0 and finite")
    require(0 <= of.beta1 < 1, f"{prefix}.beta1", of.beta1, "in [0, 1)")
    require(0 <= of.beta2 < 1, f"{prefix}.beta2", of.beta2, "in [0, 1)")
    require(of.eps > 0, f"{prefix}.eps", of.eps, "above 0")


TABLE_OPTIMIZERS = Registry[Any](
    "table optimizer",
    {"adam": "logitmix.trainer.parallel.optimizer:ADAM", "rowwise_adagrad": None, "sgd": None},
    needs=("states", "update"),
    instances=True,
)
"""TableOptimizers of parallel/optimizer.py. Reading settings imports none. Of two, there is FBGEMM's form alone."""
TABLE_OPTIMIZERS.offer(TableSettings, "optimizer")


@dataclass(frozen=True)
class TablesConfig(TableSettings):
    """The sharded embedding tables. A table by itself: --tables.NAME.SETTING, or a section [tables.NAME]."""

    group_size: int = 0
    """Ranks that hold all tables together; other groups of as many ranks have copies (2D parallelism). Rows are sent
    within a group, and gradients summed over all. 0: all ranks are one group."""
    by_name: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=OTHER_SECTIONS)
    """Settings of single tables that differ from those of all."""

    def __post_init__(self) -> None:
        self.check("tables")
        require(self.group_size >= 0, "tables.group_size", self.group_size, "0 or more")
        for name, given in self.by_name.items():
            self.of(name).check(f"tables.{name}")
            _refuse_unused(f"tables.{name}", given, [self.of(name).optimizer])
        # A setting of all tables is also for those that have another optimizer.
        optimizers = [self.optimizer, *(given.get("optimizer", self.optimizer) for given in self.by_name.values())]
        _refuse_unused("tables", {name: getattr(self, name) for name in _RATES}, optimizers)

    def ranks_of_group(self, world_size: int) -> int:
        """Ranks of each group among so many. ValueError where the groups would not be equal."""
        size = min(self.group_size or world_size, world_size)
        if world_size % size:
            raise ValueError(
                f"tables.group_size is {self.group_size}, but {world_size} ranks cannot be divided into such groups; "
                "set it to a divisor, or to 0"
            )
        return size

    def of(self, name: str) -> TableSettings:
        """The settings of the table of that name."""
        settings = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(TableSettings)}
        return from_mapping(TableSettings, settings | self.by_name.get(name, {}), f"table {name}", f"tables.{name}.")


@dataclass(frozen=True)
class DenseConfig:
    """The data-parallel part: encoder, similarity, h-indexer."""

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled weight decay (AdamW)."""

    def __post_init__(self) -> None:
        _check_rates(self, "dense")
        _refuse_unused("dense", {name: getattr(self, name) for name in _RATES}, [self.optimizer])
        require(self.weight_decay >= 0, "dense.weight_decay", self.weight_decay, "0 or more")


@dataclass(frozen=True)
class TrainConfig:
    """How long and in what way a run trains, and what it saves."""

    seed: int = 0
    """Determines initial weights, dropout, negatives and batch order, for any number of ranks."""
    batch_size: int = 128
    """B: sequences of a global batch, divided among the ranks."""
    stride: int = 0
    """Divide a history longer than model.encoder.max_length into windows of that length, which begin so many actions
    apart, each a sequence; the same number leaves no overlap. 0: a user's sequence is the last window, and no earlier
    action is trained on."""
    epochs: float = 40.0
    """Passes over the sequences; 0.1 trains on a tenth of them."""
    stop_after_epochs: float = 0.0
    """Stop earlier, after these epochs, with the learning rates of train.epochs; 0 trains all epochs."""
    minutes: float = 0.0
    """Stop so that training ends after this much time with its evaluations and checkpoints, if the last evaluation
    takes no longer than those before; 0 trains all epochs."""
    patience: int = 0
    """Stop after this many evaluations in a row without a better evaluate.metric on validation; 0 never stops early."""
    refit: bool = False
    """When the best checkpoint has been chosen on validation, train anew for as many epochs on the validation actions
    too, in RUN/refit. Export and the evaluation of the test part then take that model."""
    schedule: str = "constant"
    """How the learning rates change after the warm-up; cosine and linear fall to 0 at the end of all epochs, or of
    train.minutes if that comes first, and wsd falls linearly over the last fifth."""
    warmup_steps: int = 0
    """Steps over which the learning rates rise linearly from 0."""
    ema: float = 0.0
    """Decay in each step of a moving average of all weights, such as 0.999, which is then evaluated, exported and taken
    by warm starts in their place; 0 averages nothing. Up to step 9 / (1 - ema) it is lower, to average about the last
    tenth of the steps."""
    clip: float = 0.0
    """Largest norm of all gradients together, including those of the tables' rows: larger gradients are scaled down to
    it. 0 clips nothing. With clipping, no row is updated before all gradients have arrived."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of encoder and similarity; weights and tables stay FP32. bf16 is autocast, except on a CPU without BF16
    arithmetic. auto: that which the run began with, or else bf16 on CUDA; on a CPU bf16 for MoL of many
    components, where it is faster, and fp32 otherwise."""
    compile: bool = False
    """Compile the encoder and the other layers of the towers with torch.compile, for fewer kernels on CUDA: the same
    losses up to rounding, but the first steps take minutes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    """CPU threads of a rank; bit-equal reruns need the same number."""
    log_every: int = 10
    """Steps between two rows of metrics."""
    checkpoint_every: int = 0
    """Steps between two checkpoints; 0 saves one at each evaluation."""
    keep: int = 2
    """Number of newest checkpoints kept, in addition to the best."""
    save_in_background: bool = False
    """Write checkpoints while training goes on; each rank then holds a second copy of its part of the tables and
    optimizers' states until it is written."""
    on_damage: Literal["continue", "stop"] = "continue"
    """What to do where a checkpoint is damaged: set it aside and continue from the one before, saying so, or stop."""
    on_save_failure: Literal["continue", "stop"] = "stop"
    """What to do where a checkpoint cannot be written, such as on a full disk (the one before stays in any case), or
    cannot be uploaded."""
    stop_seconds: int = 600
    """Seconds from a signal to the end of the job, at most, while its checkpoint is being written; where nothing is
    written for 25 s, it ends before."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """What gets the rows beside RUN/metrics.jsonl: tensorboard, mlflow, wandb (docs/extending.md)."""
    projector: bool = False
    """At the end, write the embeddings of the 5,000 most frequent items, with titles, for TensorBoard's projector."""
    profile: int = 0
    """Number of steps in torch's profiler trace, after a warm-up, in RUN/profile/; 0 traces none."""

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "train.seed", self.seed, "from 0 to 2^63 - 1")
        for name in ("batch_size", "threads", "log_every", "keep", "stop_seconds"):
            require_from(1, 2**31 - 1, f"train.{name}", getattr(self, name))
        require(0 <= self.stride < 2**31, "train.stride", self.stride, "0 or more")
        require(0 < self.epochs < 2**31, "train.epochs", self.epochs, "above 0 and below 2^31")
        require(
            0 <= self.stop_after_epochs <= self.epochs,
            "train.stop_after_epochs",
            self.stop_after_epochs,
            f"from 0 to train.epochs ({self.epochs:g})",
        )
        for name in ("minutes", "patience", "warmup_steps", "checkpoint_every", "profile"):
            require(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "0 or more")
        require(0 <= self.ema < 1, "train.ema", self.ema, "in [0, 1)")
        require(0 <= self.clip < inf, "train.clip", self.clip, "0 or more and finite")


SCHEDULES.offer(TrainConfig, "schedule")
HistoryRule = Literal["auto", "yes", "no"]
BASELINES = {"popularity": "popularity", "item_knn": "item-kNN"}
"""Names of the baselines in results, and for people."""
COMPARED_WITH = BASELINES | {"at_last_action": "asked at the last action's time", "peeked": "peeked: best on test"}
"""Prefixes (item_knn/hr@10) of what results hold beside the model's own test metrics, and their names for people."""


@dataclass(frozen=True)
class EvaluateConfig:
    """When and how the corpus is ranked, and the metric that chooses the best checkpoint."""

    every_epochs: float = 1.0
    """Epochs between two evaluations on the validation items, each of which saves a checkpoint; 0.1 evaluates ten times
    an epoch, and 0 nothing, neither these nor the test items."""
    metric: str = "hr@10"
    """Validation metric that chooses the best checkpoint."""
    exclude_history: HistoryRule = "auto"
    """Leave all items of a user's history out of that user's ranking, in evaluation and serving. auto: yes, as in
    related work, unless repeats are common in the dataset."""
    users: int = 0
    """Number of users ranked, a sample, the same one for each train.seed; 0 ranks all."""
    batch_size: int = 64
    """Users ranked at once."""
    peek_test: bool = False
    """Also evaluate on the test part each time, and report its best epoch beside the one chosen on validation, as
    research code often does. Such a figure is too good: it was chosen by what it measures."""
    groups: tuple[str, ...] = ()
    """Also the metrics of groups of users, each with its number of users: by new_user (training sees no action of
    theirs), history_length, item_actions (training actions of the target: 0 is cold), or any feature of users, of the
    target, or of its action."""
    want: str = ""
    """With model.wanted: the kind of action that every query asks for; the target's own when left empty."""
    baselines: bool = True
    """At the end, also evaluate the baselines popularity and item-kNN, which a model should beat."""

    def __post_init__(self) -> None:
        require(self.every_epochs >= 0, "evaluate.every_epochs", self.every_epochs, "0 or more")
        require(self.users >= 0, "evaluate.users", self.users, "0 or more")
        require_from(1, 2**20, "evaluate.batch_size", self.batch_size)
        if self.peek_test and not self.every_epochs:
            raise ValueError(
                "evaluate.peek_test is set, but evaluate.every_epochs is 0, so nothing is evaluated; set it to 1"
            )


METRICS.offer(EvaluateConfig, "metric")
KINDS: Mapping[str, Kinds] = {
    "model.similarity.kind": SIMILARITIES, "model.encoder.kind": ENCODERS, "model.loss.kind": LOSSES
}  # fmt: skip
"""Settings that name a kind, on which the other settings of their section depend."""
STARTED = ("model", "tables", "dense", "train", "evaluate")
"""Sections whose settings may differ in the run that is trained first."""


@dataclass(frozen=True)
class Config:
    """A named run: defaults < recipe < command line."""

    warm_start: str = ""
    """Run whose best checkpoint gives the initial weights, matched by the raw ids and values of its dataset, which
    must be there. `train --continue RUN` goes on with its optimizers, too."""
    continues: bool = False
    """Go on with its optimizers, too; --continue RUN sets both."""
    start: dict[str, Any] = field(default_factory=dict)
    """Settings of a run that is trained first, in RUN/start, for the initial weights; it has half of train.minutes."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    tables: TablesConfig = field(default_factory=TablesConfig)
    dense: DenseConfig = field(default_factory=DenseConfig)
    comm: WireConfig = field(default_factory=WireConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        require_no_secrets("warm_start", self.warm_start)
        if self.continues and not self.warm_start:
            raise ValueError("continues is set, but no run to go on from; give --continue RUN")
        longest = self.model.encoder.max_length
        if self.train.stride > longest:
            raise ValueError(
                f"train.stride is {self.train.stride}, but windows have {longest} actions (model.encoder.max_length), "
                "and those between two would not be trained on; lower train.stride"
            )
        if self.data.negatives and self.model.loss.resample:
            raise ValueError(
                f"model.loss.resample is {self.model.loss.resample}, which leaves out some of the negatives of "
                "data.negatives; set it to 0"
            )
        if self.train.patience and not self.evaluate.every_epochs:
            raise ValueError(
                f"train.patience is {self.train.patience}, but evaluate.every_epochs is 0, so nothing is evaluated; "
                "set evaluate.every_epochs to 1, or train.patience to 0"
            )
        if (self.train.patience or self.train.refit) and not self.data.validation:
            name, without = ("patience", "0") if self.train.patience else ("refit", "false")
            raise ValueError(
                f"train.{name} needs the validation actions, but data.validation is false; set train.{name} to "
                f"{without}, or leave data.validation out"
            )
        if self.train.refit and not self.evaluate.every_epochs:
            raise ValueError(
                "train.refit is set, but evaluate.every_epochs is 0, so no checkpoint is chosen; set it to 1"
            )
        if self.evaluate.want and not self.model.wanted:
            raise ValueError(
                f"evaluate.want is {self.evaluate.want}, but the model knows no action to come; leave it out, or train "
                "with model.wanted"
            )
        if first := self.first:
            least, most = first.train.minutes > 0, self.train.minutes
            fits = not most or (least and first.train.minutes < most)
            require(fits, "start.train.minutes", first.train.minutes, f"above 0 and below train.minutes ({most:g})")

    @property
    def first(self) -> "Config | None":
        """The settings of the run that is trained first; None where there is none."""
        if not self.start or self.warm_start:
            return None
        for name in self.start:
            require(name in STARTED, "start", name, f"settings of {', '.join(STARTED)}")
        first = with_settings(self.inherited(), flatten(self.start), "start")
        for name in ("refit", "threads", "device"):
            value, own = getattr(first.train, name), getattr(self.train, name)
            require(value == own, f"start.train.{name}", value, f"that of the run itself ({own})")
        return first

    def inherited(self) -> "Config":
        """What that run takes over from this one where `start` has nothing else. A user's id that is a component here
        is left out: that run would learn queries with the user added, and here they are without."""
        train = replace(self.train, minutes=self.train.minutes / 2, stop_after_epochs=0.0)
        evaluate = replace(self.evaluate, baselines=False)
        model = without_user_component(self.model)
        return Config("", False, {}, self.data, model, self.tables, self.dense, self.comm, train, evaluate)


def recipe_names() -> list[str]:
    files = resources.files("logitmix.trainer.recipes").iterdir()
    return sorted(entry.name[: -len(".toml")] for entry in files if entry.name.endswith(".toml"))


def load_recipe(name: str) -> Config:
    """A shipped recipe by its name, or a TOML file by its path.

    Raises ValueError for an unknown name, broken TOML, an unknown key or a value of the wrong type.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ValueError(
                f"no recipe file {name}; give the path of a TOML file or one of: {', '.join(recipe_names())}"
            )
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: not UTF-8 at byte {error.start}, as TOML must be") from None
        return load_toml(text, name)
    if name not in recipe_names():
        raise ValueError(
            f"no recipe named {name!r}{nearest(name, recipe_names())}; there are: {', '.join(recipe_names())}"
        )
    text = resources.files("logitmix.trainer.recipes").joinpath(f"{name}.toml").read_text()
    return load_toml(text, f"{name}.toml")


def load_toml(text: str, source: str) -> Config:
    """The settings of a TOML file. The plugins in its list `plugins` are loaded by the rules of `load_named`. Strict:
    unknown keys and wrong types are errors that name `source` and the key."""
    tree, plugins = _parsed(text, source)
    load_named(plugins, source)
    return from_mapping(Config, tree, source)


def settings_without_import(text: str, source: str) -> dict[str, Any]:
    """Returns the settings of a TOML file by name, `flatten`ed, and imports no plugin that the file names. If this
    process lacks one of them, what the settings may be is not known: they are as they stand there, but for those that
    CHECKED_ALWAYS has, and a line says so. Raises ValueError as `load_toml` does."""
    tree, plugins = _parsed(text, source)
    if not (missing := lacking(plugins)):
        return flatten(from_mapping(Config, tree, source))
    say(f"{source} names the plugin {missing[0]}, which is not imported (--import): the settings are not checked")
    defaults = flatten(Config())
    settings = {name: defaults[name] for name in CHECKED_ALWAYS} | flatten(tree)
    for name in CHECKED_ALWAYS:
        wanted = type(defaults[name])
        fits = type(settings[name]) is wanted and (wanted is not list or all(type(of) is str for of in settings[name]))
        require(fits, f"{source}: {name}", brief(settings[name]), f"of type {wanted.__name__}")
    return settings


CHECKED_ALWAYS = ("data.validation", "data.negatives", "evaluate.metric", "train.seed")
"""Settings by which runs are compared, and which are no plugin's kinds."""


def _parsed(text: str, source: str) -> tuple[dict[str, Any], list[str]]:
    """The content of a TOML file but its list `plugins`, and this list."""
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: not valid TOML: {plainly(str(error))}") from None
    plugins = tree.pop("plugins", [])
    require(
        isinstance(plugins, list) and all(isinstance(name, str) for name in plugins),
        f"{source}: plugins", plugins, "a list of files and modules",
    )  # fmt: skip
    return tree, plugins


def dump_toml(config: Config) -> str:
    """The settings, and the plugins that this process was given."""
    import tomli_w  # only what writes settings needs it

    plugins = {"plugins": references()} if references() else {}
    return tomli_w.dumps(plugins | to_mapping(config))


def flatten(config: object, prefix: str = "") -> dict[str, Any]:
    """{"model.encoder.heads": 1, …}"""
    flat: dict[str, Any] = {}
    for name, value in (config if isinstance(config, Mapping) else to_mapping(config)).items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """What is to be said of each setting that is another one now, by its name."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]

    def shown(value: Any) -> str:
        return "not set" if value in ("", None) else str(value)

    return {name: f"{name} was {shown(before.get(name))}, is {shown(now.get(name))}" for name in names}


def with_start(config: Config, first: Config) -> Config:
    """The configuration whose run that is trained first has these settings and no others."""
    now = flatten(first)
    own = {f"start.{name}": now[name] for name in changed(flatten(config.inherited()), now) if name in now}
    return with_settings(replace(config, start={}), own or {"start.train.epochs": first.train.epochs}, "--start")


def with_settings(config: Config, settings: Mapping[str, Any], source: str = "settings") -> Config:
    """The configuration with these settings on top: {"train.epochs": 8}. If a kind of similarity,
    encoder or loss changes, settings that both kinds have are kept. `source` is for errors.

    Raises ValueError for an unknown setting or an impossible value.
    """
    tree = to_mapping(config)
    # The kind first, because it removes settings of its section.
    for name, value in sorted(settings.items(), key=lambda setting: not setting[0].endswith(".kind")):
        *sections, key = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            require(isinstance(node, dict), name, value, "the name of a setting, such as train.epochs")
        require(not isinstance(value, Mapping), name, value, "a value of one setting, such as train.epochs")
        if kinds := KINDS.get(name.removeprefix("start.")):
            for other in set(node) - names_of_kind(kinds, value):
                del node[other]
        node[key] = list(value) if isinstance(value, tuple) else value
    return from_mapping(Config, tree, source)


def with_tables_by_name(config: Config, by_name: Mapping[str, dict[str, Any]]) -> Config:
    """The configuration with these settings of single tables on top of its own."""
    before = config.tables.by_name
    merged = before | {name: before.get(name, {}) | settings for name, settings in by_name.items()}
    return replace(config, tables=replace(config.tables, by_name=merged))


def model_schema(schema: Schema, config: Config) -> Schema:
    """The part of a dataset's schema that the model uses, with the configured widths and capacities of tables, and no
    more items than data.items.

    Raises ValueError for an unknown feature or table, a capacity of the items' table, and settings of rows that pass
    from value to value where there are none.
    """
    used = schema.only(config.model.features)
    left_out = {*config.data.negatives} - {*config.model.features}
    used = used.only([feature.name for feature in used.features if feature.name not in left_out])
    if config.model.wanted:
        used = used.wanting(config.model.wanted, schema)
    names = [table.name for table in used.tables]
    for name in config.tables.by_name:
        if name not in names:
            raise ValueError(f"tables.{name}: no table {name}{nearest(name, names)}; there are: {', '.join(names)}")
    if not any(config.tables.of(name).capacity for name in names):
        for name, setting in product(names, ("admit_after", "evict")):
            value, without = getattr(config.tables.of(name), setting), "left out, because no table has a capacity"
            require(value == getattr(TableSettings, setting), f"tables.{name}.{setting}", value, without)
    return replace(used, tables=tuple(_configured(table, config) for table in used.tables))


def _configured(table: Table, config: Config) -> Table:
    settings = config.tables.of(table.name)
    table = replace(table, dim=settings.dim or config.model.dim)
    if settings.capacity and table.name == ITEM:
        raise ValueError(
            f"the capacity of table {ITEM} is {settings.capacity}, but all its items are ranked, and each needs its "
            "own row: limit them by --data.items, and set --tables.NAME.capacity for tables of features alone"
        )
    if config.data.items and table.name == ITEM:
        return replace(table, rows=1 + min(config.data.items, table.rows - 1))
    if not settings.capacity or table.rows == 1:
        return table
    return replace(table, rows=1 + min(settings.capacity, table.rows - 1), values=table.rows)
