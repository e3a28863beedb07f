"""A run's output for TensorBoard and its names, all on rank 0.

TensorBoard sorts groups of charts by name, and the names here put the most wanted ones on top: loss, metrics
(validation), metrics_hindexer, metrics_test, optimizer, similarity, speed, wire, wire_by_table. If a value has a unit,
its name says so. Values that do not change during a run are text, never a curve.

Axes: X items of the corpus, V of them that are shown, D width of an embedding.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from logitmix.common.files import write_whole
from logitmix.trainer.config import COMPARED_WITH, Config, dump_toml, flatten
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.parallel.parallelize import ParallelModel

CONSTANT = ("epoch", "users", "corpus", "repeated_targets")
"""Metrics that are the same in every row, or rise with the step."""
TRAINING_TAGS = {
    "loss": "loss",
    "gradient_norm": "optimizer/gradient_norm",
    "learning_rate": "optimizer/learning_rate",
    "examples_per_second": "speed/examples_per_second",
    "time": "speed/seconds_per_step",
    "memory": "speed",
}
"""By the first part of a metric's name; the similarity's diagnostics have other names."""
SIDE_BY_SIDE = {
    "quality": {"hit rates on validation": ["Multiline", ["^metrics/hr@"]]},
    "loss": {"losses": ["Multiline", ["^loss/"]]},
    "speed": {"seconds per step, by part": ["Multiline", ["^speed/seconds_per_step/"]]},
    "wire": {"bytes per step, by table": ["Multiline", ["^wire_by_table/.*/bytes_per_step$"]]},
}
"""Charts with several curves: patterns of tags."""
PROJECTED_ITEMS = 5000
"""Most frequent items that the projector shows."""


class Board:
    """The event file of a run while it trains; it holds the configuration as text."""

    def __init__(self, run: Path, config: Config, first_step: int) -> None:
        """`first_step` is the first to be written: what a killed attempt wrote from this step on is hidden."""
        self.config = config
        self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_step)
        self.writer.add_text("configuration", _preformatted(dump_toml(config)), first_step)
        self.writer.add_custom_scalars(SIDE_BY_SIDE)

    def close(self) -> None:
        self.writer.close()

    def add_row(self, kind: str, step: int, row: Mapping[str, float]) -> None:
        """Writes the curves in a row of metrics.jsonl."""
        for name, value in row.items():
            if tag := self._tag(kind, name, row):
                self.writer.add_scalar(tag, value, step)
        self.writer.flush()

    def add_histogram(self, name: str, values: np.ndarray, step: int) -> None:
        self.writer.add_histogram(f"similarity/{name}", values, step)

    def _tag(self, kind: str, name: str, row: Mapping[str, float]) -> str | None:
        """The tag of a metric's curve; None if it is not drawn."""
        first, _, rest = name.partition("/")
        if first in CONSTANT:
            return None
        if kind != "train":
            measured = "metrics_peeked" if kind == "peeked" else "metrics"
            return f"{measured}_hindexer/{rest}" if first == "hindexer" else f"{measured}/{name}"
        if first == "wire":
            return _wire_tag(rest) if row["wire/bytes_per_step"] else None
        train = self.config.train
        if first == "learning_rate" and train.schedule == "constant" and not train.warmup_steps:
            return None
        group = TRAINING_TAGS.get(first)
        if group is None:
            return f"similarity/{name}"
        rest = rest or ("total" if first == "loss" else "")
        return f"{group}/{rest}" if rest else group


def _wire_tag(name: str) -> str | None:
    """Under `wire`, all tables together; FP32's bytes of single tables follow from their shares."""
    if name.endswith("fp32_bytes_per_step"):
        return None
    return f"wire_by_table/{name}" if name.count("/") > 1 else f"wire/{name}"


def _preformatted(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def write_results_to_board(run: Path, config: Config, results: Mapping[str, float]) -> None:
    """Writes test metrics and examples per second, with the configuration as hyperparameters, but not the baselines,
    which do not depend on it."""
    left_out = (*CONSTANT, "step", "seconds", *COMPARED_WITH)
    found = {name: float(value) for name, value in results.items() if name.partition("/")[0] not in left_out}
    tags = {f"metrics_test/{name}": value for name, value in found.items()}
    flat = flatten(config)
    # TensorBoard would show a bool as 0.0 or 1.0, and takes no list.
    settings = {name: value if type(value) in (int, float) else str(value) for name, value in flat.items()}
    with SummaryWriter(str(run / "tensorboard")) as writer:
        for tag, value in tags.items():
            writer.add_scalar(tag, value, int(results["step"]))
        # SummaryWriter.add_hparams would make a separate run.
        for summary in hparams(settings, tags):
            writer.file_writer.add_summary(summary)


@torch.no_grad()
def write_projector(run: Path, dataset: Dataset, model: ParallelModel) -> None:
    """The item tower's embeddings of the most frequent items, with their titles, for TensorBoard's projector. Rank 0
    writes them, the others send rows. Collective."""
    count_X = np.bincount(dataset.items_flat, minlength=dataset.num_items)
    main = model.ranks.rank == 0
    item_V = np.sort(np.argsort(-count_X, kind="stable")[: PROJECTED_ITEMS if main else 0])
    embedder = Embedder(*model.evaluated(), columns_of(dataset, model.tower.schema))
    vector_VD = embedder.items(item_V).vector_RD.float().cpu().numpy()
    if not main:
        return
    ids, titles = dataset.raw_id_column(), dataset.title_column()
    rows: list[Sequence[Any]] = [("title", "id", "actions")]
    for item in item_V.tolist():
        raw_id = ids[item].as_py()
        rows.append(((titles[item].as_py() if titles else None) or raw_id, raw_id, count_X[item]))
    board = run / "tensorboard"
    write_whole(board / "items.tsv", _tsv(row_D.tolist() for row_D in vector_VD))
    write_whole(board / "titles.tsv", _tsv(rows))
    write_whole(
        board / "projector_config.pbtxt",
        'embeddings {\n  tensor_name: "items"\n  tensor_path: "items.tsv"\n  metadata_path: "titles.tsv"\n}\n',
    )


def _tsv(rows: Iterable[Iterable[Any]]) -> str:
    return "".join("\t".join(" ".join(str(value).split()) for value in row) + "\n" for row in rows)
