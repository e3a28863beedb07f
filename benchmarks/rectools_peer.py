"""SASRec, HSTU and simple models of RecTools (github.com/MobileTeleSystems/RecTools) on MovieLens-1M's `ratings.dat`,
as peers of ours: leave-one-out, history left out, ranks over all items.

    pip install "rectools[torch]==0.19.0"       # in an environment of its own, which needs no logitmix
    python -P benchmarks/rectools_peer.py ratings.dat --kind hstu --max-length 50 --seconds 80

Two blocks with one head (or `--blocks 8 --heads 2`), D = 64, dropout 0.2, batches of 16 users, Adam with a constant
rate; otherwise RecTools' defaults: softmax over all items, of a dot product (SASRec), or of a cosine, here with a
temperature of 0.05, and with times (HSTU). `ease`, and `als` and `bm25` of implicit, have no epochs, and are fitted
anew with the validation actions for the test. CPU seconds are those of training, on one thread.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas
import torch
from implicit.als import AlternatingLeastSquares
from implicit.nearest_neighbours import BM25Recommender
from pytorch_lightning import seed_everything
from rectools.dataset import Dataset
from rectools.models import (
    EASEModel,
    HSTUModel,
    ImplicitALSWrapperModel,
    ImplicitItemKNNWrapperModel,
    SASRecModel,
)
from rectools.models.base import ModelBase


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings")
    parser.add_argument("--kind", choices=("sasrec", "hstu", *SIMPLE), default="hstu")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--every", type=int, default=1, help="epochs from one evaluation to the next")
    parser.add_argument("--loss", default="softmax", help="of RecTools: softmax, sampled_softmax, gBCE or BCE")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(given.seed)
    sizes = {"n_blocks": given.blocks, "n_heads": given.heads, "n_factors": 64, "dropout_rate": 0.2}
    sizes |= {"session_max_len": given.max_length, "lr": given.lr, "loss": given.loss}
    of_ratings(model_of(given.kind, sizes), given.ratings, given.seconds, given.every)


SIMPLE: dict[str, Callable[[], ModelBase]] = {
    "ease": lambda: EASEModel(num_threads=1),
    "als": lambda: ImplicitALSWrapperModel(AlternatingLeastSquares(64, random_state=0, num_threads=1)),
    "bm25": lambda: ImplicitItemKNNWrapperModel(BM25Recommender(K=100, num_threads=1)),
}


def model_of(kind: str, sizes: dict[str, Any]) -> ModelBase:
    if kind in SIMPLE:
        return SIMPLE[kind]()
    sizes = sizes | {"batch_size": 16}
    if kind == "hstu":
        sizes["lightning_module_kwargs"] = {"logits_t": 0.05}
    return (HSTUModel if kind == "hstu" else SASRecModel)(**sizes)


def of_ratings(model: ModelBase, ratings: str, seconds: float, every: int) -> None:
    names = ["user_id", "item_id", "weight", "datetime"]
    actions = pandas.read_csv(ratings, sep="::", engine="python", names=names)
    actions = actions.sort_values(["user_id", "datetime"], kind="stable").assign(weight=1.0)
    actions["datetime"] = pandas.to_datetime(actions["datetime"], unit="s")
    back = actions.groupby("user_id").cumcount(ascending=False)
    earlier = {place: Dataset.construct(actions[back > place]) for place in (0, 1)}

    def metrics(place: int) -> tuple[float, float]:
        """HR@10 and NDCG@10 of the test actions (0) or those of validation (1)."""
        target = actions[back == place]
        when = target[["user_id", "datetime"]].assign(weight=0.0) if model.require_recommend_context else None
        users = target["user_id"].to_numpy()
        found = model.recommend(users, earlier[place], k=10, filter_viewed=True, context=when)
        hits = found.merge(target[["user_id", "item_id"]])
        return len(hits) / len(users), float((1 / np.log2(hits["rank"] + 1)).sum() / len(users))

    def timed(fit: Callable[[], object]) -> float:
        began = time.process_time()
        fit()
        return time.process_time() - began

    def tell(epoch: int, spent: float, validation: float) -> None:
        test, ndcg = metrics(0)
        found = f"validation HR@10 {validation:.4f}, test {test:.4f}, NDCG@10 {ndcg:.4f}"
        print(f"epoch {epoch}, {spent:.0f} CPU s: {found}", flush=True)

    if not isinstance(model, SASRecModel | HSTUModel):
        spent, (validation, _) = timed(lambda: model.fit(earlier[1])), metrics(1)
        model.fit(earlier[0])
        tell(1, spent, validation)
        return
    spent, epoch = 0.0, 0
    while spent < seconds:
        spent += timed(lambda: model.fit_partial(earlier[1], min_epochs=1, max_epochs=1))
        epoch += 1
        if epoch % every == 0 or spent >= seconds:
            tell(epoch, spent, metrics(1)[0])


if __name__ == "__main__":
    main()
