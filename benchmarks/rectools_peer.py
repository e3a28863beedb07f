"""SASRec and HSTU of RecTools (github.com/MobileTeleSystems/RecTools) on MovieLens-1M's `ratings.dat`, as a peer of
ours: leave-one-out, history left out, ranks over all items.

    pip install "rectools[torch]==0.19.0"       # in an environment of its own, which needs no logitmix
    python -P benchmarks/rectools_peer.py ratings.dat --kind hstu --max-length 50 --seconds 80

Two blocks, one head, D = 64, dropout 0.2, batches of 16 users, Adam with a rate of 0.001; otherwise RecTools' defaults:
softmax over all items, of a dot product (SASRec), or of a cosine, here with a temperature of 0.05, and with times
(HSTU). CPU seconds are those of training, on one thread.
"""

import argparse
import time
from typing import Any

import numpy as np
import pandas
import torch
from pytorch_lightning import seed_everything
from rectools.dataset import Dataset
from rectools.models import HSTUModel, SASRecModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings")
    parser.add_argument("--kind", choices=("sasrec", "hstu"), default="hstu")
    parser.add_argument("--max-length", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--loss", default="softmax", help="of RecTools: softmax, sampled_softmax, gBCE or BCE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(0)
    sizes = {"n_blocks": 2, "n_heads": 1, "n_factors": 64, "dropout_rate": 0.2, "session_max_len": given.max_length}
    sizes |= {"lr": 0.001, "loss": given.loss}
    of_ratings(model_of(given.kind, sizes), given.ratings, given.seconds)


def model_of(kind: str, sizes: dict[str, Any]) -> SASRecModel | HSTUModel:
    sizes = sizes | {"batch_size": 16}
    if kind == "hstu":
        sizes["lightning_module_kwargs"] = {"logits_t": 0.05}
    return (HSTUModel if kind == "hstu" else SASRecModel)(**sizes)


def of_ratings(model: SASRecModel | HSTUModel, ratings: str, seconds: float) -> None:
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

    spent, epoch = 0.0, 0
    while spent < seconds:
        began = time.process_time()
        model.fit_partial(earlier[1], min_epochs=1, max_epochs=1)
        spent, epoch = spent + time.process_time() - began, epoch + 1
        (validation, _), (test, ndcg) = metrics(1), metrics(0)
        print(
            f"epoch {epoch}, {spent:.0f} CPU s: validation HR@10 {validation:.4f}, test {test:.4f}, NDCG@10 {ndcg:.4f}"
        )


if __name__ == "__main__":
    main()
