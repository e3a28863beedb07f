"""Checkpoint -> serving directory, without a process group.

Axes: X items in the corpus, D encoder width.
"""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from logitmix.modules.towers import Tower
from logitmix.serving.format import Contents, Source, check_target, write
from logitmix.serving.model import TABLE, item_cache, item_shapes
from logitmix.trainer.checkpoint import SavedModel, load_saved
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.evaluate import excludes_history
from logitmix.trainer.run import require_same_dataset

_ITEMS = 2**13
"""Items whose cache is computed at once."""


def export(run: Path, out: Path, overwrite: bool = False, which: Literal["best", "last"] = "best") -> dict[str, Any]:
    """Writes a serving directory of a run's best checkpoint (or its last one) and gives its manifest.

    The raw ids and titles come from the dataset directory that the run names. Raises ValueError where `out` is there
    and is not to be overwritten, where the run has no intact checkpoint, or where the dataset is not there or is
    not the one that the run was trained on.
    """
    check_target(out, overwrite)
    model = load_saved(run, which)
    dataset = load_dataset(model.config.data.path)
    require_same_dataset(run, dataset)
    source = Source(run.resolve().name, model.step, dataset.name)
    exclude_history = excludes_history(model.config.evaluate.exclude_history, dataset)
    return export_model(model, dataset.raw_ids(), dataset.titles(), source, out, exclude_history, overwrite)


def export_model(
    model: SavedModel,
    raw_ids: list[str],
    titles: list[str] | None,
    source: Source,
    out: Path,
    exclude_history: bool = True,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes a serving directory of a model whose items have these raw ids and titles; gives its manifest.

    Raises ValueError as `logitmix.serving.format.write` does.
    """
    assert len(raw_ids) == model.num_items
    tower = model.tower.eval()
    contents = Contents(
        model=model.config.model,
        source=source,
        weights=tower.state_dict(),
        items=_items(tower, model.read_rows(0, model.num_items)),
        raw_ids=raw_ids,
        titles=titles,
        exclude_history=exclude_history,
    )
    return write(contents, out, overwrite)


@torch.inference_mode()
def _items(tower: Tower, item_XD: Tensor) -> dict[str, Tensor]:
    """The table and what the similarity and the h-indexer make of it."""
    shapes = item_shapes(tower.config, len(item_XD))
    items = {name: torch.empty(shape) for name, shape in shapes.items() if name != TABLE}
    for start in range(0, len(item_XD), _ITEMS):
        part = item_cache(tower, item_XD[start : start + _ITEMS])
        for name, value in part.items():
            items[name][start : start + _ITEMS] = value
    return {TABLE: item_XD, **items}
