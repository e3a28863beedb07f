"""Items without history: how often an item that was never trained is retrieved when a user takes it next.

    python -m benchmarks.cold_start [--models dot,mol] [--seeds 3] [--epochs 16] [--features "genres year" item_title]
    python -m benchmarks.cold_start --dataset demo-features --models auto --dropouts 0,0.1,0.3
    python -m benchmarks.cold_start --dataset demo-shop --epochs 6 [--features category "category released"]

10 % of MovieLens-100k's items (the cold ones) are taken out of every sequence. A model is trained on the rest with
genres and year, and exported; `update-items` adds the cold items from their features alone. Then each action on a cold
item is a request: its user's earlier warm items are the history, and all other items compete, warm and cold. HR@50 of
the model is compared with that of a random order (50 of the competing items), of popularity by genre (the mean number
of actions of warm items over an item's genres; the same for all users), of the user's own genres (cosine of the
history's counts of genres with the item's), and of the user's own titles (the same of the sum of their vectors).
`--source` (or LOGITMIX_REAL_DATA) is the folder with ml-100k.zip; without it, it is downloaded. Of demo-features, the
items' features are taken as they are, and chance alone is the baseline.
Beside it stand the test metrics of the known items.

Of demo-shop, whose items come week after week, the purchases of the last tenth of the time are the test part: HR@50 of
targets that training has no action of, for `auto` with the items' categories, the dates at which they came, or titles,
whose five words are three of twenty that its category has alone, and two of a hundred that all have.
"""

import csv
import itertools
import json
import os
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro

from benchmarks.measure import logitmix, machine, print_table, spread
from logitmix.modules.kinds.text import NGRAMS, TextEncoder
from logitmix.serving.request import Request
from logitmix.serving.retriever import Retriever
from logitmix.trainer.config import DataConfig
from logitmix.trainer.data.batches import split_by_time
from logitmix.trainer.data.columns import ranges
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.prepare.sources.demo import FIRST_TIME, DemoParameters, generate
from logitmix.trainer.prepare.sources.demo_features import of_items
from logitmix.trainer.prepare.sources.demo_shop import EVENTS, WEEK, ShopParameters
from logitmix.trainer.prepare.sources.demo_shop import generate as generate_shop
from logitmix.trainer.prepare.tables import SideTable

K, COLD_SHARE, LENGTH = 50, 0.1, 100
SCHEMA = '[features.genres]\nkind = "ids"\n\n[features.year]\nkind = "id"\n'
COMMON = ["--train.batch-size", "32", "--model.encoder.max-length", str(LENGTH)]
MODELS = {
    "auto": ["auto", "--train.patience", "0", "--evaluate.no-baselines"],
    "dot": ["ml-1m-dot", *COMMON],
    "mol": ["ml-1m-mol", *COMMON, "--no-start", "--model.similarity.query-components", "4",
            "--model.similarity.item-components", "4", "--model.similarity.projection-hidden", "128",
            "--model.similarity.gate-hidden", "64"],
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    dataset: Literal["ml-100k", "demo-features", "demo-shop"] = "ml-100k"
    models: str = "dot,mol"
    seeds: int = 3
    """Number of seeds, each with its own cold items."""
    epochs: int = 16
    dropouts: str = "0.3"
    """Values of model.item_id_dropout."""
    features: tuple[str, ...] = ()
    """Features of the items, each a run: of ml-100k "genres year" if left empty, of demo-shop "category" and "category
    released". `item_title` is the vector of the title (kind text), `vector` in demo-shop another one (`_vectors`)."""
    users: int = ShopParameters.users
    """Of demo-shop, as `items`."""
    items: int = ShopParameters.items
    requests: int = 1_000_000
    """Most requests, a sample of the actions on cold items."""
    source: str = field(default_factory=lambda: os.environ.get("LOGITMIX_REAL_DATA", ""))
    """Folder with ml-100k.zip."""


@dataclass(frozen=True)
class Question:
    """A user's action on a cold item."""

    history: list[int]
    target: int


def main(options: Options) -> None:
    if options.dataset == "demo-shop":
        shop(options)
        return
    found: dict[str, list[float]] = {}
    known: dict[str, list[str]] = {}
    demo = options.dataset == "demo-features"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = ["--source", str(Path(options.source) / "ml-100k.zip")] if options.source and not demo else []
        logitmix("prepare", options.dataset, *given, "--out", str(folder / "whole"))
        dataset = load_dataset(folder / "whole")
        for seed in range(options.seeds):
            cold = np.random.default_rng(seed).permutation(dataset.num_items) < COLD_SHARE * dataset.num_items
            every = _questions(dataset, cold)
            asked = np.random.default_rng(seed).permutation(len(every))[: options.requests]
            questions = [every[place] for place in asked]
            of_seed = {"chance": _chance(dataset, questions)} if demo else _baselines(dataset, cold, questions)
            write_tables(folder / str(seed), dataset, cold)
            features = ("all",) if demo else options.features or ("genres year",)
            for arm in itertools.product(options.models.split(","), features, options.dropouts.split(",")):
                rate, tested = _hit_rate(folder / str(seed), *arm, dataset, questions, seed, options)
                name = "{}, {}, dropout {}".format(*arm)
                of_seed[name] = rate
                known.setdefault(name, []).append(
                    " ".join(f"{tested[metric]:.4f}" for metric in ("hr@10", "hr@50", "mrr"))
                )
            for method, rate in of_seed.items():
                found.setdefault(method, []).append(rate)
    setting = f"{options.dataset}, {options.seeds} seeds, {options.epochs} epochs; {machine()}"
    heads = ("method", "HR@50 of cold targets", "/ chance", "test HR@10, HR@50, MRR of known items")
    chance = statistics.mean(found["chance"])
    rows = (
        (method, spread(rates, 4), f"{statistics.mean(rates) / chance:.1f}", "; ".join(known.get(method, [])))
        for method, rates in found.items()
    )
    print_table(heads, rows, setting)


def shop(options: Options) -> None:
    """Prints HR@50 of all test targets and of those without a training action."""
    rows = list[tuple[str, ...]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_shop(folder, ShopParameters(users=options.users, items=options.items))
        words = ["--items", str(folder / "items.parquet"), "--where", "event = purchase", "--min-user-actions", "3"]
        words += ["--embed", "title"]
        logitmix("prepare", "table", "--source", str(folder / "actions.parquet"), "--out", str(folder / "data"), *words)
        for features in map(str.split, options.features or ("category", "category released")):
            run = folder / "-".join(features)
            words = ["--data.path", str(folder / "data"), "--run", str(run), "--data.split", "time"]
            words += ["--model.features", *features, "--model.dim", "32", "--model.encoder.max-length", "16"]
            words += ["--train.epochs", str(options.epochs), "--evaluate.no-baselines"]
            logitmix("train", "auto", *words, "--evaluate.users", "4000", "--evaluate.groups", "item_actions")
            found = json.loads((run / "results.json").read_text(encoding="utf-8"))
            rates = (found[of] for of in ("groups/item_actions=0/hr@50", "hr@50", "hr@10"))
            rows.append((", ".join(features), *(f"{rate:.4f}" for rate in rates)))
        dataset = load_dataset(folder / "data")
        held_out = split_by_time(dataset, DataConfig().held_out)
        place_U = held_out.targets["test"]
        target_U = dataset.items_flat[place_U[place_U >= 0]]
        trained = ranges(dataset.offsets[:-1], held_out.train_end - dataset.offsets[:-1])
        count_X = np.bincount(dataset.items_flat[trained], minlength=dataset.num_items)
        category_X = dataset.item_features["category"].values
        of_category = np.bincount(category_X, count_X) / np.maximum(np.bincount(category_X, count_X > 0), 1)
        hits = [_hit(of_category[category_X], target) for target in target_U[count_X[target_U] == 0]]
    heads = ("features", "HR@50 of cold targets", "HR@50", "HR@10")
    rows += [("popularity by category", f"{statistics.mean(hits):.4f}"), ("chance", f"{K / dataset.num_items:.4f}")]
    print_table(heads, rows, f"demo-shop, {options.epochs} epochs; {machine()}")


def _write_shop(folder: Path, parameters: ShopParameters) -> None:
    """Its actions; and its items with titles, and the dates at which they came, which those of the first week do not
    have."""
    topic_X, week_X, made, event_A = generate_shop(parameters, np.random.Generator(np.random.PCG64(0)))
    users, items = np.array(made.user_ids), np.array(made.item_ids)
    actions = {"user": users[made.users], "item": items[made.items], "timestamp": made.timestamps}
    pq.write_table(pa.table(actions | {"event": np.array(EVENTS)[event_A]}), folder / "actions.parquet")
    released_X = pa.array((FIRST_TIME + week_X * WEEK).astype("M8[s]"), mask=week_X == 0)
    columns = {"item": items, "category": [f"c{topic}" for topic in topic_X], "released": released_X}
    titles = _titles(topic_X)
    vectors = pa.array(list(_vectors(titles)), pa.list_(pa.float32()))
    pq.write_table(pa.table(columns | {"title": titles, "vector": vectors}), folder / "items.parquet")


def _titles(topic_X: np.ndarray) -> list[str]:
    random = np.random.default_rng(1)
    words = np.array(["".join(letters) for letters in random.choice(list("abcdefghijklmnop"), (2_100, 6))])
    words_of_topic = words[100:].reshape(100, 20)
    return [
        " ".join([*random.choice(words_of_topic[topic], 3, replace=False), *random.choice(words[:100], 2)])
        for topic in topic_X
    ]


def _vectors(titles: list[str]) -> np.ndarray:
    """As a sentence encoder's, float32 [X, 384] of norm 1: means of a vector for each word, with a part that all share
    and some noise."""
    rng = np.random.default_rng(7)
    of_word = {word: rng.normal(size=384) for word in dict.fromkeys(" ".join(titles).split())}
    means_XW = np.array([np.mean([of_word[word] for word in title.split()], axis=0) for title in titles])
    found_XW = means_XW + 0.27 * rng.normal(size=384) + 0.1 * rng.normal(size=means_XW.shape)
    return (found_XW / np.linalg.norm(found_XW, axis=1, keepdims=True)).astype(np.float32)


def _hit(score_X: np.ndarray, target: int) -> float:
    """Whether an item is among the best K; ties at the edge count by the share of them that would be drawn."""
    above, equal = (score_X > score_X[target]).sum(), (score_X == score_X[target]).sum()
    return min(1.0, max(0.0, (K - above) / equal))


def write_tables(folder: Path, dataset: Dataset, cold: np.ndarray) -> None:
    """Writes actions.csv of warm items, and the features of all items and of the cold ones."""
    folder.mkdir()
    users = np.repeat(np.arange(dataset.num_users), np.diff(dataset.offsets))
    with open(folder / "actions.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["user", "item", "timestamp"])
        for user, item, at in zip(users, dataset.items_flat, dataset.timestamps_flat, strict=True):
            if not cold[item]:
                rows.writerow([user, item, at])
    items = _demo_items(dataset) if dataset.name == "demo-features" else _movies(dataset)
    items = items.add_column(0, "item", pa.array(range(dataset.num_items)))
    pq.write_table(items, folder / "items.parquet")
    pq.write_table(items.filter(pa.array(cold)), folder / "cold.parquet")
    (folder / "schema.toml").write_text("" if dataset.name == "demo-features" else SCHEMA)


def _movies(dataset: Dataset) -> pa.Table:
    genres, years = _genres(dataset), dataset.item_features["year"].values
    names, known = dataset.vocabulary("genres"), dataset.vocabulary("year")
    of_items = ["|".join(names[of] for of in genres[item].nonzero()[0]) for item in range(dataset.num_items)]
    title = dataset.title_column()
    return pa.table({"genres": of_items, "year": [known[year] for year in years], "title": title})


def _demo_items(dataset: Dataset) -> pa.Table:
    """As they are generated."""
    made = generate(DemoParameters(), seed=0)
    rng = np.random.default_rng(1)
    columns = of_items(made, rng.normal(size=(DemoParameters.topics, 4)), rng)
    return pa.table(SideTable(pa.array(made.item_ids), columns).of(pa.array(dataset.raw_ids())))


def _genres(dataset: Dataset) -> np.ndarray:
    """Which genres each item has [X, G]."""
    column = dataset.item_features["genres"]
    assert column.offsets is not None
    has = np.zeros((dataset.num_items, dataset.schema.table("genres").rows), bool)
    has[np.repeat(np.arange(dataset.num_items), np.diff(column.offsets)), column.values] = True
    return has


def _questions(dataset: Dataset, cold: np.ndarray) -> list[Question]:
    questions = []
    for user in range(dataset.num_users):
        items = dataset.items_flat[dataset.offsets[user] : dataset.offsets[user + 1]]
        for place in np.flatnonzero(cold[items]):
            history = items[:place][~cold[items[:place]]].tolist()
            if history:
                questions.append(Question(history, int(items[place])))
    return questions


def _baselines(dataset: Dataset, cold: np.ndarray, questions: list[Question]) -> dict[str, float]:
    genres = _genres(dataset).astype(np.float64)
    actions = np.bincount(dataset.items_flat, minlength=dataset.num_items) * ~cold
    of_genre = genres.T @ actions / np.maximum(genres.T @ ~cold, 1)
    popularity = genres @ of_genre / np.maximum(genres.sum(1), 1)
    length = np.maximum(np.sqrt(genres.sum(1)), 1)
    column = dataset.title_column()
    assert column is not None
    titles = [title or "" for title in column.to_pylist()]
    encoder = TextEncoder.fit(NGRAMS, sorted({title for title, of in zip(titles, cold, strict=True) if not of}))
    vectors = encoder(titles)
    hits = {"popularity by genre": 0.0, "the user's genres": 0.0, "the user's titles": 0.0}
    for question in questions:
        of_user = genres[question.history].sum(0)
        scores = (popularity, genres @ of_user / length, vectors @ vectors[question.history].sum(0))
        for method, score_X in zip(hits, scores, strict=True):
            score_X = score_X.copy()
            score_X[question.history] = -np.inf
            hits[method] += _hit(score_X, question.target)
    shares = {method: hit / len(questions) for method, hit in hits.items()}
    return {"chance": _chance(dataset, questions)} | shares


def _chance(dataset: Dataset, questions: list[Question]) -> float:
    return statistics.mean(K / (dataset.num_items - len(set(question.history))) for question in questions)


def _hit_rate(
    folder: Path,
    model: str,
    features: str,
    dropout: str,
    dataset: Dataset,
    questions: list[Question],
    seed: int,
    options: Options,
) -> tuple[float, dict[str, float]]:
    """HR@50 of the cold items, and the run's results."""
    data, run = str(folder / "data"), str(folder / f"{model}-{features.replace(' ', '-')}-{dropout}")
    served = f"{run}-served"
    if not Path(data).exists():
        words = ["--items", str(folder / "items.parquet"), "--schema", str(folder / "schema.toml")]
        words += [] if dataset.name == "demo-features" else ["--embed", "title"]
        logitmix("prepare", "table", "--source", str(folder / "actions.csv"), "--out", data, *words)
    words = [*MODELS[model], "--data.path", data, "--run", run, "--train.seed", str(seed)]
    words += ["--model.features", *features.split()]
    words += ["--train.precision", "bf16", "--train.epochs", str(options.epochs)]
    words += ["--evaluate.every-epochs", str(max(1, options.epochs // 4)), "--train.device", "cpu"]
    logitmix("train", *words, "--model.item-id-dropout", dropout)
    logitmix("export", run, "--out", served)
    logitmix("update-items", served, "--items", str(folder / "cold.parquet"))
    retriever = Retriever.load(served)
    assert retriever.num_items == dataset.num_items
    requests: list[Request] = [{"history": question.history} for question in questions]
    hits = 0
    for start in range(0, len(requests), 256):
        found = [of["items"] for of in retriever.recommend(requests[start : start + 256], K, exclude_history=True)]
        for question, ranking in zip(questions[start : start + 256], found, strict=True):
            hits += any(row["id"] == str(question.target) for row in ranking)
    return hits / len(questions), json.loads((Path(run) / "results.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
