"""Embeddings of items for TensorBoard's projector.

Axes: X items of the corpus, V of them that are shown, D width of an embedding.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from logitmix.common.files import write_whole
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.data.lookups import columns_of
from logitmix.trainer.evaluation.embed import Embedder
from logitmix.trainer.parallel.parallelize import ParallelModel

PROJECTED_ITEMS = 5000
"""Most frequent items that the projector shows."""


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
    # Without the logger of that name there is none yet.
    board.mkdir(exist_ok=True)
    write_whole(board / "items.tsv", _tsv(row_D.tolist() for row_D in vector_VD))
    write_whole(board / "titles.tsv", _tsv(rows))
    write_whole(
        board / "projector_config.pbtxt",
        'embeddings {\n  tensor_name: "items"\n  tensor_path: "items.tsv"\n  metadata_path: "titles.tsv"\n}\n',
    )


def _tsv(rows: Iterable[Iterable[Any]]) -> str:
    return "".join("\t".join(" ".join(str(value).split()) for value in row) + "\n" for row in rows)
