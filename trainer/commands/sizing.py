"""The recipes `auto` and `auto-mol`: settings that follow from a dataset's size; and recipes for more ranks. Imports no
torch."""

import math
import textwrap
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from logitmix.common.files import from_json
from logitmix.common.mappings import require_from
from logitmix.common.storage import fetch, fetch_run, path_of
from logitmix.trainer.config import Config, flatten, load_recipe, with_settings

AUTO, AUTO_MOL = "auto", "auto-mol"
OF_START = ("model.loss.negatives", "model.loss.share", "train.epochs", "evaluate.every_epochs")
"""What is sized of the run that auto-mol trains first, and not of itself."""
MOL_EPOCHS = 5
"""Of auto-mol's MoL, unless these are fewer than STEPS."""
ONE_STAGE = 20_000
"""Most items that auto-mol scores without an h-indexer, and with which `auto` takes it."""
LONGEST = 200
"""Positions of a history that a model sees at most; half as many with up to 50 actions a user, a quarter with 25."""
POSITIONS = 4000
"""Positions of a batch, about; fewer with short histories, because a batch has BATCH_SIZES users."""
BATCH_SIZES = (16, 128)
NEGATIVES = 2048
"""Of a batch; up to twice as many items are all negatives, because the loss then scores all of them anyway."""
STEPS = 300
"""Fewest steps between two evaluations."""
MOST_STEPS = 30_000
"""Most steps of training; patience usually ends it long before."""
HSTU_ACTIONS, HSTU_MEAN = 400_000, 150
"""Fewest actions, in all and of a user on average, with which HSTU learns faster than SASRec; fewer were not seen to
suffice (benchmarks/notes/own-data.md)."""
KIND, LENGTH, STRIDE, MINUTES = "model.encoder.kind", "model.encoder.max_length", "train.stride", "train.minutes"
BATCH, EXPLICIT, MOST_ITEMS = "train.batch_size", "data.negatives", "data.items"
ENCODER, SIMILARITY = "model.encoder.", "model.similarity."
BLOCKS, HEADS, SCORE = f"{ENCODER}blocks", f"{ENCODER}heads", f"{SIMILARITY}kind"
AS_BEFORE = "as in the run before"
DOT = {SCORE: "dot"}
MOL_MINUTES = 20
"""Fewest train.minutes with which `auto` takes MoL."""
OF_ONE = (
    *(SIMILARITY, "model.loss.", "model.hindexer.", BLOCKS, "tables.", "dense."),
    *("train.epochs", "train.stop_after_epochs", "train.schedule", "start.", "no_start"),
)
"""Settings, or how their names begin, with which `auto` takes no MoL: the two trainings differ in them, or fewer blocks
were level."""
OF_BOTH = ("sharding", "group_size")
"""How the names of those end of which that is not true."""
WITH_EXPLICIT = {
    "model.loss.negatives": (128, "those of data.negatives replace up to half"),
    "model.loss.share": ("group", "a target that has such ones shares none"),
}
HSTU = {
    KIND: ("hstu", "ahead of SASRec where so many actions are of long histories"),
    BLOCKS: (8, "ahead of 2 after about three minutes on a core"),
    HEADS: (2, "for 8 blocks"),
}
SHALLOW_MINUTES = 3
SHALLOW = {
    BLOCKS: (2, "8 are ahead only after about three minutes on a core"),
    HEADS: (1, "for 2 blocks"),
}
"""Of HSTU, with fewer train.minutes."""
EMA = 0.99
AVERAGED = 1_000_000
"""Most items whose rows are averaged: every tenth step passes over all of them, whatever a batch asks for."""
RANKED = 20_000
"""Most users that an evaluation ranks: with this many, a hit rate of 5 % has a 95 % interval of +- 0.3 %."""

DROPOUT = "model.item_id_dropout"
ITEM_ID_DROPOUT = 0.1
"""So that a model learns to rank items by their features alone; it costs the known items nothing that was seen
(benchmarks/notes/features.md)."""

Sized = Mapping[str, tuple[Any, str]]
"""Settings by name, each with the reason."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


def sized(
    description: Mapping[str, Any], given: Mapping[str, Any] = NOTHING, source: Mapping[str, Any] = NOTHING
) -> Sized:
    """What follows from the content of a dataset.json, from the settings that are `given`, and from those of the run,
    if any, whose weights the run starts from."""
    users, actions = (max(1, description[name]) for name in ("users", "actions"))
    items, mean = _items(description, given), actions / users
    longest = source.get(LENGTH, 50 if mean <= 25 else 100 if mean <= 50 else LONGEST)
    # Two actions are held out, and of the others all but the last are inputs.
    batch = min(_power_of_two(POSITIONS / max(1.0, min(mean - 3, longest))), _power_of_two(users / 4))
    batch = max(1, min(max(batch, min(BATCH_SIZES[0], users)), BATCH_SIZES[1]))
    hstu = not source and actions >= HSTU_ACTIONS and mean >= HSTU_MEAN and given.get(KIND, "hstu") == "hstu"
    windows = (source["train.stride"] > 0 if source else hstu) and not given.keys() & {LENGTH, STRIDE}
    own = max(1, int(given.get(BATCH, batch)))
    steps = -(-users // own)
    most = -(-(users + actions // longest) // own) if windows else steps
    known = _of_items(description)
    # Neither paid (benchmarks/notes/features.md), and with dates, requests would need their time.
    left_out = [f["name"] for f in known if f["kind"] in ("date", "text")]
    features = [f["name"] for f in known if f["name"] not in left_out]
    settings: dict[str, tuple[Any, str]] = {
        LENGTH: (longest, f"users have {mean:.1f} actions on average"),
        BATCH: (batch, f"about {batch * min(mean, longest):,.0f} positions a step"),
        "model.loss.negatives": (
            (0, f"all {items:,} items") if items <= 2 * NEGATIVES else (NEGATIVES, f"of {items:,} items")
        ),
        "evaluate.every_epochs": (-(-STEPS // steps), f"an epoch is {'at least ' if windows else ''}{steps:,} steps"),
        "train.epochs": (max(3, MOST_STEPS // most), "or until validation stops rising"),
    }
    if hstu:
        settings |= HSTU | (SHALLOW if 0 < float(given.get(MINUTES, 0)) < SHALLOW_MINUTES else {})
    if given.get(EXPLICIT):
        settings |= WITH_EXPLICIT
    if windows:
        settings[STRIDE] = (longest, "longer histories are trained on in windows, so that no action is left out")
    if items <= AVERAGED:
        settings["train.ema"] = (EMA, "evaluates and exports a moving average of the weights")
    if users > RANKED:
        settings["evaluate.users"] = (RANKED, f"of {users:,}")
    if known:
        without = f"{', '.join(left_out)}: dates and vectors of texts did not pay"
        of_items = "those of items: requests need not name them" + (f", without {without}" if left_out else "")
        by_texts = f"without {without}; --model.features {' '.join(left_out)} ranks items added later by them"
        settings["model.features"] = (features, of_items if features else by_texts)
        settings[DROPOUT] = (ITEM_ID_DROPOUT, "so that items added later are ranked by their features")
    return settings


def load_sized(
    name: str,
    data_path: str = "",
    scale: int = 1,
    given: Mapping[str, Any] = NOTHING,
    run: str = "",
) -> tuple[Config, Sized]:
    """A recipe from `load_recipe`, with the dataset's settings if it is sized, and these settings; for `scale` times
    the batch, and with the settings that are `given`. Without a path, the dataset is the recipe's own. If `run` has
    been trained, it keeps MoL or the dot product, and what train.minutes decided when it began; if warm_start is given,
    the model is that run's. If there is no dataset, or what is given is no number, nothing is sized, and reading it
    raises the error later."""
    require_from(1, 2**16, "--scale", scale)
    recipe, found = _load(name, data_path, given, run)
    if scale == 1:
        return recipe, found
    settings = scaled(recipe, scale)
    return with_settings(recipe, {name: value for name, (value, _) in settings.items()}), {**found, **settings}


def scaled(config: Config, scale: int) -> Sized:
    """Settings of a recipe for `scale` times its batch, such as for so many GPUs; docs/scale.md has what it costs.

    Learning rates rise with the root of the batch, as Adam's noise asks for (Malladi et al., "On the SDEs and Scaling
    Rules for Adaptive Gradient Algorithms", 2022); a moving average forgets as many examples (Busbridge et al., "How to
    Scale Your EMA", 2023); epochs, and the epochs of a warm-up, stay.
    """
    now, times = flatten(config), f"{scale} times the batch"
    rates = [name for name in now if name.endswith(".lr")]

    def of_runs(name: str) -> list[str]:
        """Of this run and of the one that is trained first, where the recipe has it."""
        return [of_run for of_run in (name, f"start.{name}") if now.get(of_run)]

    settings: dict[str, tuple[Any, str]]
    settings = {name: (now[name] * scale, times) for name in of_runs("train.batch_size")}
    settings |= {name: (float(f"{now[name] * math.sqrt(scale):.4g}"), f"times the root of {scale}") for name in rates}
    settings |= {name: (max(1, now[name] // scale), times) for name in of_runs("train.warmup_steps")}
    settings |= {name: (float(f"{now[name] ** scale:.6g}"), times) for name in of_runs("train.ema")}
    return settings


def _load(name: str, data_path: str, given: Mapping[str, Any], run: str) -> tuple[Config, Sized]:
    recipe = load_recipe(name)
    if name not in (AUTO, AUTO_MOL):
        return recipe, {}
    place = data_path or recipe.data.path
    if not (fetch(place) / "dataset.json").is_file():
        return recipe, {}
    resumed, source = _trained(run), NOTHING
    if isinstance(start := given.get("warm_start"), str) and start:
        source = _trained(start) or resumed
    try:
        description = _description(place)
        if resumed:
            # What minutes decided when it began stays.
            shows = HEADS if BLOCKS in given else BLOCKS
            given = {**given, MINUTES: SHALLOW_MINUTES / 2 if resumed.get(shows) == SHALLOW[shows][0] else 0}
        elif name == AUTO_MOL and not given.keys() & {"warm_start", "no_start"}:
            # The dot product has half of them.
            given = {**given, MINUTES: float(given.get(MINUTES, 0)) / 2}
        found, items = sized(description, given, source), _items(description, given)
        if name == AUTO:
            name, found = _with_choice(found, items, given, resumed or source)
            recipe = load_recipe(name)
        if name == AUTO_MOL:
            found = _of_mol(found, items, given)
        found = {**found, **_of_source(source, name, given)}
    except (ValueError, KeyError, TypeError, OverflowError):
        return recipe, {}
    own = flatten(with_settings(recipe, {KIND: found[KIND][0]} if KIND in found else {}))
    found = {name: of for name, of in found.items() if name.endswith(".kind") or of != (own.get(name), AS_BEFORE)}
    return with_settings(recipe, {"data.path": place, **{name: value for name, (value, _) in found.items()}}), found


def _trained(run: str) -> Mapping[str, Any]:
    """The settings of a run that has been trained, if only in part; none if there is no such run."""
    if not run:
        return NOTHING
    path = fetch_run(run)
    # Until there is a checkpoint, another command may begin the run anew.
    trained = any(path.glob("checkpoints/step-*")) or any(path.glob("start/checkpoints/step-*"))
    config = path / "config.toml"
    return flatten(load_recipe(str(config))) if trained and config.is_file() else NOTHING


def _with_choice(found: Sized, items: int, given: Mapping[str, Any], before: Mapping[str, Any]) -> tuple[str, Sized]:
    """The recipe that `auto` takes, itself or auto-mol, and what is sized, with the reason of that choice.

    MoL was ahead of more of its dot product in equal time where HSTU is deep and items are few
    (benchmarks/notes/mol-and-dot-product.md)."""
    if before:
        mol = before[SCORE] == "mol" and SCORE not in given
        return (AUTO_MOL, {**found, SCORE: ("mol", AS_BEFORE)}) if mol else (AUTO, found)
    if STRIDE not in found or items > ONE_STAGE or SCORE in given:
        return AUTO, found
    pays = "ahead on such data, after the dot product"
    if others := [name for name in given if name.startswith(OF_ONE) and not name.endswith(OF_BOTH)]:
        return AUTO, {**found, SCORE: ("dot", f"MoL, {pays}, is left to the recipe auto-mol: {others[0]} is given")}
    minutes = float(given.get(MINUTES, 0))
    if 0 < minutes < MOL_MINUTES or minutes == math.inf:
        return AUTO, {**found, SCORE: ("dot", f"MoL is {pays}, with {MOL_MINUTES} minutes or more")}
    return AUTO_MOL, {**found, SCORE: ("mol", pays)}


def _of_source(source: Mapping[str, Any], recipe: str, given: Mapping[str, Any]) -> Sized:
    """The settings of the model of the run that another one starts from: MoL's if both have it."""
    if not source or given.get(KIND, source[KIND]) != source[KIND]:
        return {}
    kept, weight = ["model.dim", ENCODER], "model.hindexer.weight"
    if source[SCORE] == given.get(SCORE, "mol" if recipe == AUTO_MOL else "") == "mol":
        kept += [SIMILARITY, "model.hindexer."]
    # Where items have become many, there is an h-indexer from now on.
    return {
        name: (value, AS_BEFORE)
        for name, value in source.items()
        if name.startswith(tuple(kept)) and (name, value) != (weight, 0)
    }


def _items(description: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    """Of the run, at least 1."""
    items: int = max(1, description["items"])
    return min(items, int(given.get(MOST_ITEMS, 0)) or items)


def _of_mol(found: Sized, items: int, given: Mapping[str, Any]) -> Sized:
    """Those of `auto` as those of auto-mol, which trains it first."""
    every = "evaluate.every_epochs"
    settings = {f"start.{name}" if name in OF_START else name: of for name, of in found.items()}
    if every in given:
        # It is of both.
        del settings[f"start.{every}"]
    if "model.dim" in given:
        settings[f"{SIMILARITY}component_dim"] = (int(given["model.dim"]), "as wide as the embedding")
    # `auto` is evaluated every STEPS.
    epochs = max(MOL_EPOCHS, found["evaluate.every_epochs"][0])
    settings["train.epochs"] = (epochs, f"{STEPS:,} steps or more")
    settings["evaluate.every_epochs"] = (epochs // MOL_EPOCHS, "about five evaluations")
    if found[LENGTH][0] < LONGEST:
        settings["model.loss.share"] = ("group", "most histories are shorter than a group of positions")
    if given.get(EXPLICIT):
        settings |= WITH_EXPLICIT | {"model.loss.resample": (0, "it would leave some of data.negatives out")}
    if items > ONE_STAGE:
        settings["model.hindexer.weight"] = (0.3, f"finds those of {items:,} items that MoL scores")
    return settings


def _description(place: str) -> Mapping[str, Any]:
    """Of a dataset that has been fetched."""
    found: Mapping[str, Any] = from_json((path_of(place) / "dataset.json").read_text(encoding="utf-8"))
    return found


def _of_items(description: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The features of items but their ids."""
    return [f for f in description["schema"]["features"] if f["owner"] == "item" and f["name"] != "item"]


def settled(config: Config, found: Sized) -> tuple[Config, str]:
    """A recipe from `load_sized` that has the user's settings, and a line with those of `found` that it keeps and their
    reasons. Items' ids are not dropped where the model has no features of items."""
    if DROPOUT in found and config.model.item_id_dropout == ITEM_ID_DROPOUT:
        of_items = {"all", *(of["name"] for of in _of_items(_description(config.data.path)))}
        if not of_items & {*config.model.features}:
            config = with_settings(config, {DROPOUT: 0.0})
    now = flatten(config)
    # Nothing is trained first where the weights come from elsewhere.
    now = {name: value for name, value in now.items() if not (config.warm_start and name.startswith("start."))}
    kept = {name: of for name, of in found.items() if now.get(name) == of[0]}
    if not kept:
        return config, ""
    said = "; ".join(f"{name.removeprefix('model.')} {value} ({reason})" for name, (value, reason) in kept.items())
    return config, textwrap.fill(f"sized: {said}", 120, subsequent_indent=" " * 7, break_on_hyphens=False)


def _power_of_two(number: float) -> int:
    """The largest power of two up to the number, at least 1."""
    return 1 << max(0, int(number).bit_length() - 1)
