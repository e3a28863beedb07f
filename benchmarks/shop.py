"""The weekly job of a shop beside `implicit` and RecTools: hit rates of known and of new items, and the time for all
users.

    logitmix prepare demo-shop --out data/shop
    logitmix train auto --data.path data/shop --data.targets "event = purchase" --model.features all --run runs/shop
    pip install implicit==0.7.3
    python -m venv rectools && rectools/bin/pip install "rectools[torch]==0.19.0"
    python -m benchmarks.shop runs/shop --rectools rectools/bin/python

Every method has the run's training actions, ranks by its rules and is asked for the same purchases. `implicit` is
fitted to purchases alone and to all actions, which its models do not tell apart; ALS has 64 factors. So is EASE of
RecTools (rectools_peer.py). Its SASRec sees all actions in their order, without features, and has purchases as targets,
which are the actions with weight; it trains for `--seconds` with each loss. RecTools' ranks end at 500. New
items are those that came in the last four weeks. Seconds are CPU seconds of one thread: to fit, without the run's
training, and to write the 100 best items of every user.
"""

import os
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tyro
from scipy.sparse import csr_matrix

from benchmarks.measure import cpu_seconds, logitmix, machine, print_table
from logitmix.comm.process_group import process_group
from logitmix.common.storage import fetch_run
from logitmix.trainer.data.batches import HeldOut, RankingUsers
from logitmix.trainer.data.columns import ranges
from logitmix.trainer.data.dataset import Dataset, load_dataset
from logitmix.trainer.evaluation.baselines import Score, popularity, rank_targets, target_counts
from logitmix.trainer.evaluation.evaluate import Evaluation
from logitmix.trainer.run.folder import read_config
from logitmix.trainer.run.results import read_ranks

CUTOFFS = (10, 100, 500)
NEW = 28 * 86_400
FACTORS = 64


@dataclass(frozen=True)
class Options:
    run: tyro.conf.Positional[Path]
    """Run on demo-shop."""
    rectools: str = ""
    """Python of an environment that has RecTools."""
    seconds: float = 233.0
    """CPU seconds that SASRec of RecTools trains for."""


def main(options: Options) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    config = read_config(fetch_run(str(options.run)))
    dataset = load_dataset(config.data.path)
    with process_group("cpu", 60) as ranks:
        evaluation = Evaluation(config, dataset, ranks)
    users = evaluation.users("test")
    is_new = dataset.first_times()[users.target] > dataset.timestamps_flat.max() - NEW
    rows: list[dict[str, Any]] = []

    def add(method: str, rank_U: np.ndarray, fit: float | None, all_users: float | None) -> None:
        parts = {"all": rank_U, "known": rank_U[~is_new], "new": rank_U[is_new]}
        rates = {f"{name} hr@{k}": float((of <= k).mean()) for name, of in parts.items() for k in CUTOFFS}
        rows.append({"method": method, **rates, "fit_s": fit, "all_users_s": all_users})

    def rank(score: Score) -> np.ndarray:
        return rank_targets(score, users, dataset.num_items, evaluation.exclude_history)

    add("logitmix", read_ranks(options.run), None, _recommended(options.run))
    add("popularity", rank(popularity(target_counts(dataset, evaluation.held_out))), None, None)
    for purchases in (True, False):
        what = "purchases" if purchases else "all actions"
        history = Histories(dataset, evaluation.held_out, purchases)
        for name, make in (("ALS", _als), ("BM25", _bm25)):
            score, fit, all_users = make(history)
            add(f"implicit {name}, {what}", rank(score), fit, all_users)
        if options.rectools:
            peer = partial(_rectools, options, history, users, evaluation.exclude_history)
            add(f"RecTools EASE, {what}", *peer("--kind", "ease"))
            for loss in () if purchases else ("sampled_softmax", "gBCE"):
                add(f"RecTools SASRec, {loss}", *peer("--kind", "sasrec", "--loss", loss))
    about = {"users": len(users), "of new items": int(is_new.sum()), "machine": machine()}
    cells = (["" if v is None else f"{v:.4f}" if isinstance(v, float) else v for v in row.values()] for row in rows)
    print_table(rows[0], cells, ", ".join(f"{name}: {value}" for name, value in about.items()), 200)


@dataclass(frozen=True)
class Histories:
    """What `implicit` sees of users: how often they took each item."""

    dataset: Dataset
    held_out: HeldOut
    purchases: bool
    """Whether actions that may not be targets are left out."""

    @property
    def trained(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each user, the first action and how many from there on are for training."""
        first_U = self.dataset.offsets[:-1]
        return first_U, np.maximum(self.held_out.train_end - first_U, 0)

    def training(self) -> csr_matrix:
        return self._matrix(*self.trained)

    def before(self, users: RankingUsers) -> csr_matrix:
        return self._matrix(users.first, users.seen_lengths)

    def actions(self, first_U: np.ndarray, length_U: np.ndarray) -> np.ndarray:
        """User, item and place of each action, [3, A]."""
        place_A, user_A = ranges(first_U, length_U), np.repeat(np.arange(len(first_U)), length_U)
        if self.purchases and self.held_out.places is not None:
            kept = np.isin(place_A, self.held_out.places)
            place_A, user_A = place_A[kept], user_A[kept]
        return np.stack([user_A, self.dataset.items_flat[place_A], place_A])

    def weights(self, actions_3A: np.ndarray) -> np.ndarray:
        """1 for actions that may be targets, 0 for others."""
        places = self.held_out.places
        return np.ones(actions_3A.shape[1]) if places is None else np.isin(actions_3A[2], places).astype(float)

    def _matrix(self, first_U: np.ndarray, length_U: np.ndarray) -> csr_matrix:
        user_A, item_A, _ = self.actions(first_U, length_U)
        shape = (len(first_U), self.dataset.num_items)
        return csr_matrix((np.ones(len(user_A), np.float32), (user_A, item_A)), shape)


def _als(history: Histories) -> tuple[Score, float, float]:
    from implicit.als import AlternatingLeastSquares

    model = AlternatingLeastSquares(FACTORS, random_state=0, num_threads=1)
    fit, all_users = _fitted(model, history)

    def score(users: RankingUsers) -> np.ndarray:
        factors = model.recalculate_user(np.arange(len(users)), history.before(users))
        return (np.asarray(factors) @ model.item_factors.T).astype(np.float64)

    return score, fit, all_users


def _bm25(history: Histories) -> tuple[Score, float, float]:
    from implicit.nearest_neighbours import BM25Recommender

    model = BM25Recommender(K=100, num_threads=1)
    fit, all_users = _fitted(model, history)
    return lambda users: (history.before(users) @ model.similarity).toarray().astype(np.float64), fit, all_users


def _fitted(model: Any, history: Histories) -> tuple[float, float]:
    matrix = history.training()
    fit = cpu_seconds(lambda: model.fit(matrix, show_progress=False))
    return fit, cpu_seconds(lambda: model.recommend(np.arange(matrix.shape[0]), matrix, N=100))


def _rectools(
    options: Options, history: Histories, users: RankingUsers, exclude: bool, *words: str
) -> tuple[np.ndarray, float, float]:
    with TemporaryDirectory() as folder:
        file, script = Path(folder) / "shop.npz", Path(__file__).with_name("rectools_peer.py")
        given = {"before": history.actions(users.first, users.seen_lengths)}
        given["training"] = history.actions(*history.trained)
        weights = {f"{name}_weight": history.weights(of) for name, of in given.items()}
        if "ease" in words:
            weights = {name: np.ones_like(of) for name, of in weights.items()}
        np.savez(file, target=users.target, most=max(CUTOFFS), exclude=exclude, **given, **weights)
        # One customer in a hundred has more than 48 actions.
        words = (str(file), *words, "--max-length", "50", "--seconds", str(options.seconds))
        subprocess.run([options.rectools, "-P", str(script), *words], check=True, stdout=subprocess.DEVNULL)
        found = np.load(file)
        print(f"RecTools {' '.join(words[1:])}: {found['epochs']:.1f} epochs")
        return found["rank"], float(found["fit"]), float(found["all_users"])


def _recommended(run: Path) -> float:
    """Of the whole command, its start included."""
    with TemporaryDirectory() as folder:
        words = ("recommend", str(run), "--out", f"{folder}/all.parquet", "-k", "100", "--threads", "1")
        return cpu_seconds(partial(logitmix, *words))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
