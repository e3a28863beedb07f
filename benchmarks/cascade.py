"""What two stages cost in quality: the k' items that the h-indexer keeps, then MoL, beside MoL over the whole corpus.

    python -m benchmarks.cascade RUN [RUN ...] [--shares 0.01,0.02,0.05,0.1,0.2,0.5] [--plot FILE]

Each run is exported and answers the test histories of all its users. `co-trained` is the run's own h-indexer.
`post-hoc` is one that is trained when the run is over, on its frozen model: the same loss, batches and number of
epochs, new projections. HR@10 is that of the test items; recall is the share of MoL's own best 10 and 100 items of the
whole corpus that the two stages return among their best 10 and 100. Then the precisions of the item cache: the share of
FP32's best 100 items of the whole corpus that each returns, for 1,000 users, and for FP32 the largest difference to the
scores of the trained model, relative to the largest score.

    python -m benchmarks.cascade --generate FOLDER

writes clicks.csv and items.csv of 25,000 users and 200,000 items, for `prepare table`: users move on along the rings of
items of five of 2,000 topics.
"""

import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks.measure import drawing, machine, print_table
from logitmix.comm.process_group import process_group
from logitmix.modules.config import has_user_component
from logitmix.modules.hindexer import HIndexer
from logitmix.modules.losses.blockwise import Examples
from logitmix.serving.directory.format import Source
from logitmix.serving.model import STORED, Precision
from logitmix.serving.retriever import Retriever
from logitmix.trainer.data.batches import RankingUsers, ranking_users
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.data.limited import held_out
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.evaluation.evaluate import excludes_history
from logitmix.trainer.export import export as exporting
from logitmix.trainer.loop import training_batches
from logitmix.trainer.run.checkpoint import SavedModel, load_saved

K, BEST = 100, 10
USERS = 1000
ARMS = ("co-trained", "post-hoc")


@dataclass(frozen=True)
class Options:
    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    shares: str = "0.01,0.02,0.05,0.1,0.2,0.5"
    """k', as shares of the corpus."""
    threads: int = 1
    plot: str = ""
    """A picture of recall against k'."""
    generate: str = ""


@dataclass(frozen=True)
class Trained:
    model: SavedModel
    dataset: Dataset
    users: RankingUsers
    exclude_history: bool

    @property
    def histories(self) -> list[list[int]]:
        return [
            self.dataset.items_flat[first:place].tolist()
            for first, place in zip(self.users.first, self.users.place, strict=True)
        ]

    def served(self, folder: Path, precision: Precision = "fp32") -> Retriever:
        config, dataset = self.model.config.model, self.dataset
        about = exporting.About(
            config,
            Source("run", self.model.step, dataset.name),
            self.model.num_items,
            self.exclude_history,
            self.model.tower.schema,
            precision=precision,
        )
        items = exporting.DatasetItems(
            dataset.raw_id_column, dataset.title_column, dataset.item_features, dataset.vocabulary_column
        )
        with process_group("cpu", 60) as ranks:
            exporting.export_model(self.model, about, items, folder, True, ranks)
        return Retriever.load(folder)


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    if options.generate:
        return generate(Path(options.generate))
    if not options.runs:
        raise SystemExit("give a RUN, or --generate FOLDER")
    shares = [float(share) for share in options.shares.split(",")]
    console = Console(stderr=True)
    results = [measured(Path(run), shares) for run in track(options.runs, "measuring", console=console)]
    setting = f"{len(options.runs)} runs; {machine()}"
    if options.plot:
        plot(results, shares, Path(options.plot))
    show(results, shares, setting)


def generate(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random, U, L, T, ring, interests = np.random.default_rng(0), 25_000, 30, 2_000, 100, 5
    weight_T = np.arange(1, T + 1) ** -0.5
    topic = random.choice(T, (U, interests), p=weight_T / weight_T.sum())
    place, active, every = random.random((U, interests)) * ring, random.integers(0, interests, U), np.arange(U)
    with (folder / "clicks.csv").open("w") as file:
        file.write("user,item,timestamp\n")
        for time in range(L):
            active = np.where(random.random(U) < 0.2, random.integers(0, interests, U), active)
            at = place[every, active]
            item = topic[every, active] * ring + np.round(at + random.normal(0, 0.03 * ring, U)).astype(int) % ring
            place[every, active] = (at + 0.055 * ring) % ring
            file.writelines(f"u{user},{of},{time}\n" for user, of in enumerate(item))
    rows = (f"{item},t{item // ring},p{item % ring // 2}\n" for item in range(T * ring))
    (folder / "items.csv").write_text("item,topic,place\n" + "".join(rows))


def measured(run: Path, shares: list[float]) -> dict[str, dict[str, float]]:
    model = load_saved(run)
    dataset = load_dataset(model.config.data.path)
    of_run = held_out(model.config, dataset)
    users = ranking_users(dataset, "test", model.config.model.encoder.max_length, of_run)
    trained = Trained(model, dataset, users, excludes_history(model.config, dataset))
    X, target_B = model.num_items, torch.from_numpy(users.target)[:, None]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "served"
        retriever, histories = trained.served(folder), trained.histories
        whole = retriever.retrieve(histories, K, stage1=X).items
        rows = {"one stage": _row(whole, whole, target_B)}
        rows |= precisions(trained, folder, retriever)
        for arm in ARMS:
            if arm == "post-hoc":
                train_hindexer(trained)
                retriever = trained.served(folder)
            for share in shares:
                found = retriever.retrieve(histories, min(K, round(share * X)), stage1=round(share * X)).items
                rows[f"{arm} {share:g}"] = _row(found, whole, target_B)
    return rows


def _row(found_BK: Tensor, whole_BK: Tensor, target_B: Tensor) -> dict[str, float]:
    return {
        "hr@10": float((found_BK[:, :BEST] == target_B).any(1).float().mean()),
        "recall@10": recall(found_BK[:, :BEST], whole_BK[:, :BEST]),
        "recall@100": recall(found_BK, whole_BK),
    }


def recall(found_BK: Tensor, expected_BK: Tensor) -> float:
    """The share of the expected items that were found."""
    common = (found_BK[:, :, None] == expected_BK[:, None, :]).any(1) & (expected_BK >= 0)
    return float(common.sum() / (expected_BK >= 0).sum())


@torch.no_grad()
def precisions(trained: Trained, folder: Path, exact: Retriever) -> dict[str, dict[str, float]]:
    some, X = trained.users.sample(USERS, seed=0), trained.model.num_items
    of_users = replace(trained, users=some)
    expected = exact.retrieve(of_users.histories, K, stage1=X)
    rows = {"fp32": {"of the trained model's scores": _difference(of_users, exact)}}
    for precision in STORED:
        if precision != "fp32":
            found = of_users.served(folder.with_name(precision), precision).retrieve(of_users.histories, K, stage1=X)
            rows[precision] = {"recall@100": recall(found.items, expected.items)}
    return rows


def _difference(trained: Trained, retriever: Retriever) -> float:
    """To scores that the modules compute in training's own form, of all items."""
    tower = trained.model.tower.eval()
    with process_group("cpu", 60) as ranks:
        embedder = Embedder(tower, trained.model.sharded_rows(ranks), columns_of(trained.dataset, tower.schema))
        query = tower.query_sides(embedder.queries(trained.users)).similarity
        item = tower.item_sides(embedder.items(torch.arange(trained.model.num_items).numpy())).similarity
    found = retriever.retrieve(trained.histories, K, exclude_history=False, stage1=trained.model.num_items)
    worst, largest = 0.0, 0.0
    with torch.enable_grad():  # plain torch, not the kernel
        for b, index_K in enumerate(found.items):
            one = tuple(part[b : b + 1].detach() for part in query)
            score_K = tower.similarity.all_pairs(one, tuple(part[index_K].detach() for part in item))[0].detach()
            worst = max(worst, float((score_K - found.scores[b]).abs().max()))
            largest = max(largest, float(score_K.abs().max()))
    return worst / largest


def train_hindexer(trained: Trained) -> None:
    """Replaces the model's h-indexer by one that is trained on the frozen model, as long as the run was."""
    model, config = trained.model, trained.model.config
    tower = model.tower.eval().requires_grad_(False)
    torch.manual_seed(config.train.seed)
    hindexer = HIndexer(config.model.dim, config.model.hindexer, has_user_component(config.model))
    hindexer.reset_parameters(torch.Generator().manual_seed(config.train.seed + 1))
    optimizer = torch.optim.Adam(
        hindexer.parameters(), lr=config.dense.lr, betas=(config.dense.beta1, config.dense.beta2)
    )
    tables = {table.name: model.read_rows(table.name, 0, table.rows) for table in tower.schema.tables}
    with process_group("cpu", 60) as ranks:
        batches = training_batches(config, trained.dataset, ranks)
    for step in range(round(config.train.epochs * batches.steps_per_epoch)):
        batch = replace(batches.at(step), noise=None)
        rows = {name: tables[name][ids] for name, ids in batch.ids.items() if isinstance(ids, Tensor)}
        query, item = tower.at_positions(rows, batch)
        row_T = batch.packing.row_T
        examples = Examples(row_T, batch.target_T, batch.bounds, batch.negatives_GN, batch.log_q_V)
        sides = hindexer.query_side(query, row_T), hindexer.item_side(item, batch.id_V)
        loss = hindexer.sampled_softmax(*sides, examples) / batch.total_targets
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tower.hindexer = hindexer.requires_grad_(False).eval()


def show(results: list[dict[str, dict[str, float]]], shares: list[float], setting: str) -> None:
    metrics = ("hr@10", "recall@10", "recall@100")
    named = {"one stage": ("one stage", "all")}
    named |= {f"{arm} {share:g}": (arm, f"{share:.0%}") for arm in ARMS for share in shares}
    rows = ((*said, *(_of_runs(results, name, metric) for metric in metrics)) for name, said in named.items())
    print_table(("stages", "k'", "HR@10", *metrics[1:]), rows, setting, 140)
    stored = [("fp32", "", _of_runs(results, "fp32", "of the trained model's scores", "{:.1e}"))]
    stored += [(of, _of_runs(results, of, "recall@100"), "") for of in ("bf16", "fp16", "int8")]
    heads = ("item cache", "share of FP32's best 100", "largest difference to the trained model's scores")
    print_table(heads, stored, "", 140)


def _of_runs(results: list[dict[str, dict[str, float]]], name: str, metric: str, form: str = "{:.4f}") -> str:
    values = [result[name][metric] for result in results]
    shown = form.format(statistics.fmean(values))
    return shown if len(values) == 1 else f"{shown} ({', '.join(form.format(value) for value in values)})"


def plot(results: list[dict[str, dict[str, float]]], shares: list[float], file: Path) -> None:
    with drawing(file, figsize=(6, 4), dpi=120) as (_, axes):
        for arm, style in zip(ARMS, ("-", "--"), strict=True):
            for metric, color in (("recall@10", "C0"), ("recall@100", "C1")):
                means = [statistics.fmean(result[f"{arm} {share:g}"][metric] for result in results) for share in shares]
                axes.plot(shares, means, style, marker="o", color=color, label=f"{metric}, {arm}")
        axes.set(xscale="log", xlabel="k', share of the corpus", ylabel="share of MoL's own best items")
        axes.set_xticks(shares, [f"{share:.0%}" for share in shares])
        axes.grid(alpha=0.3)
        axes.legend()


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
