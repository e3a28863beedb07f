"""SASRec and HSTU of RecTools (github.com/MobileTeleSystems/RecTools) on MovieLens-1M's `ratings.dat`, as a peer of
ours: leave-one-out, history left out, ranks over all items. On a file that shop.py has written, SASRec or EASE for
that.

    pip install "rectools[torch]==0.19.0"       # in an environment of its own, which needs no logitmix
    python -P benchmarks/rectools_peer.py ratings.dat --kind hstu --max-length 50 --seconds 80

Two blocks, one head, D = 64, dropout 0.2, batches of 16 users, Adam with a rate of 0.001; otherwise RecTools' defaults:
softmax over all items, of a dot product (SASRec), or of a cosine, here with a temperature of 0.05, and with times
(HSTU). For the shop, batches have 64 users, and the losses are those of 64 sampled negatives a position: an epoch of
softmax over all items takes more than the whole budget. CPU seconds are those of training, on one thread.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from pytorch_lightning import Callback, Trainer, seed_everything
from rectools.dataset import Dataset, IdMap, Interactions
from rectools.models import EASEModel, HSTUModel, SASRecModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings")
    parser.add_argument("--kind", choices=("sasrec", "hstu", "ease"), default="hstu")
    parser.add_argument("--max-length", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--loss", default="softmax", help="of RecTools: softmax, sampled_softmax, gBCE or BCE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(0)
    sizes = {"n_blocks": 2, "n_heads": 1, "n_factors": 64, "dropout_rate": 0.2, "session_max_len": given.max_length}
    sizes |= {"lr": 0.001, "loss": given.loss}
    if given.ratings.endswith(".npz"):
        of_shop(given.kind, sizes, Path(given.ratings), given.seconds)
    else:
        of_ratings(model_of(given.kind, sizes), given.ratings, given.seconds)


def model_of(kind: str, sizes: dict[str, Any]) -> SASRecModel | HSTUModel:
    sizes = sizes | {"batch_size": 16}
    if kind == "hstu":
        sizes["lightning_module_kwargs"] = {"logits_t": 0.05}
    return (HSTUModel if kind == "hstu" else SASRecModel)(**sizes)


class Budget(Callback):
    """Ends training after so many CPU seconds, within an epoch, too."""

    def __init__(self, seconds: float) -> None:
        self.end, self.epochs = time.process_time() + seconds, 0.0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.epochs += 1 / trainer.num_training_batches
        trainer.should_stop = time.process_time() >= self.end


def of_shop(kind: str, sizes: dict[str, Any], file: Path, seconds: float) -> None:
    """Writes the ranks of the targets, the seconds and the epochs in place of the actions."""
    given = np.load(file)

    def actions(name: str, of: IdMap | None = None) -> Dataset:
        """Of the items that `of` knows; by default of all."""
        user, item, place = given[name]
        when = pandas.to_datetime(place, unit="s")
        columns = {"user_id": user, "item_id": item, "weight": given[f"{name}_weight"], "datetime": when}
        table = pandas.DataFrame(columns)
        if of is None:
            return Dataset.construct(table)
        table = table[table["item_id"].isin(of.external_ids)]
        users = IdMap.from_values(table["user_id"].to_numpy())
        return Dataset(users, of, Interactions.from_raw(table, users, of))

    def recommended(dataset: Dataset, k: int, left_out: bool) -> pandas.DataFrame:
        users = dataset.user_id_map.external_ids
        return model.recommend(users, dataset, k, left_out, on_unsupported_targets="ignore")

    training, epochs = actions("training"), 0.0
    began = time.process_time()
    if kind == "ease":
        model: Any = EASEModel()
    else:
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)

        def trainer() -> Trainer:
            return Trainer(accelerator="cpu", min_epochs=0, max_epochs=-1, callbacks=[Budget(seconds)], **quiet)

        model = SASRecModel(**sizes, batch_size=64, n_negatives=64, get_trainer_func=trainer)
    model.fit(training)
    fit, began = time.process_time() - began, time.process_time()
    if kind != "ease":
        epochs = model.fit_trainer.callbacks[0].epochs
    recommended(training, 100, True)
    all_users = time.process_time() - began
    found = recommended(actions("before", training.item_id_map), int(given["most"]), bool(given["exclude"]))
    target = pandas.DataFrame({"user_id": np.arange(len(given["target"])), "item_id": given["target"]})
    rank = target.merge(found, "left", ["user_id", "item_id"])["rank"].fillna(2**31).to_numpy(np.int64)
    np.savez(file, rank=rank, fit=fit, epochs=epochs, all_users=all_users)


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
