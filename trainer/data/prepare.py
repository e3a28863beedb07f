"""`logitmix prepare`: raw files -> dataset directory.

One pass over the source codes users and items as integers; then the item filter, the user filter (each once: this is no
iterated core), a stable sort by user and time, and the writing. Nothing is cut off here: a trainer takes the last
actions it wants. Memory peaks at about 40 bytes an action, beside every distinct raw id (about 150 bytes each) and one
block of the file; there is no Python object per action.

The dataset appears at once and complete: it is written to a hidden directory beside the output, which is then renamed.
"""

from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from logitmix.common.files import whole_directory
from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.dataset import is_dataset
from logitmix.trainer.data.files import digests
from logitmix.trainer.data.raw import RawDataset
from logitmix.trainer.data.registry import source_of
from logitmix.trainer.data.rejects import Rejects, TooManyRejects
from logitmix.trainer.data.writer import DatasetContents, write_dataset


def prepare(options: PrepareOptions, console: Console | None = None) -> dict[str, Any]:
    """Writes the dataset at `options.directory` and returns the content of its dataset.json.

    Progress and malformed lines go to `console` (standard error).
    Raises ValueError with one line for whatever is wrong with the options or the source; then nothing is left behind
    but, where malformed lines stopped the job, their list at `<out>.rejects.tsv`.
    """
    console = console or Console(stderr=True)
    out = options.directory
    _check_out(out, options.overwrite)
    if options.source and not Path(options.source).exists():
        raise ValueError(f"no file or folder at {options.source}; give the downloaded file with --source")
    with (
        whole_directory(out) as staging,
        closing(Rejects(staging / "rejects.tsv", options.max_rejects, console)) as rejects,
    ):
        try:
            with _progress(console) as progress:
                raw = _read(options, rejects, progress)
                return _write(staging, options, raw, rejects)
        except TooManyRejects as error:
            rejects.close()
            kept = out.with_name(out.name + ".rejects.tsv")
            rejects.path.replace(kept)
            raise ValueError(f"{error}; they are listed in {kept}") from None


def _progress(console: Console) -> Progress:
    # A log file would get one line for every bar.
    return Progress(
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip


def _check_out(out: Path, overwrite: bool) -> None:
    if out.is_symlink():
        raise ValueError(f"{out} is a symbolic link; write to where it leads, or choose another --out")
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.is_dir() and is_dataset(out):
        if not overwrite:
            raise ValueError(
                f"there is a dataset at {out} already; replace it with --overwrite, or choose another --out"
            )
    elif out.exists():
        raise ValueError(f"{out} is there and holds more than a dataset, or none; choose another --out")


def _read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset:
    source = source_of(options.name)
    assert source is not None
    reader = import_module(f"logitmix.trainer.data.sources.{source.module}")
    raw: RawDataset = reader.read(options, rejects, progress)
    if not len(raw.actions.users) and not rejects.count:
        raise ValueError(f"{raw.source}: holds no actions; is it the right file?")
    rejects.finish()
    return raw


def _write(directory: Path, options: PrepareOptions, raw: RawDataset, rejects: Rejects) -> dict[str, Any]:
    actions = raw.actions
    read = {"users": len(actions.user_ids), "items": len(actions.item_ids), "actions": len(actions.users)}
    origin = raw.source and {"name": raw.source.name, "sha256": digests(raw.source, raw.files)}
    contents = _arrange(raw, options.min_user_actions, options.min_item_actions)
    return write_dataset(
        directory,
        contents,
        options.name,
        filters={"min_user_actions": options.min_user_actions, "min_item_actions": options.min_item_actions},
        read=read,
        rejected_lines=rejects.count,
        source=origin,
        generator=raw.generator,
    )


def _arrange(raw: RawDataset, min_user_actions: int, min_item_actions: int) -> DatasetContents:
    """Filters, numbers and sorts. Takes the action arrays out of `raw`, to free each as soon as it is done with."""
    actions = raw.actions
    kept = np.bincount(actions.items, minlength=len(actions.item_ids))[actions.items] >= min_item_actions
    user_counts = np.bincount(actions.users[kept], minlength=len(actions.user_ids))
    user_kept = user_counts >= max(min_user_actions, 1)
    if not user_kept.any():
        raise ValueError(
            f"no user has {max(min_user_actions, 1)} or more actions (there were {len(actions.user_ids):,} users with "
            f"{len(actions.users):,} actions); lower --min-user-actions or --min-item-actions"
        )
    kept &= user_kept[actions.users]
    user_order = _order_of_ids(actions.user_ids, user_kept)
    item_order = _order_of_ids(actions.item_ids, np.bincount(actions.items[kept], minlength=len(actions.item_ids)) > 0)
    users = _ranks(user_order, len(actions.user_ids))[actions.users[kept]]
    items = _ranks(item_order, len(actions.item_ids))[actions.items[kept]]
    timestamps = actions.timestamps[kept]
    actions.users = actions.items = actions.timestamps = kept = np.empty(0)
    # lexsort is stable: actions of one user at one time stay in file order.
    order = np.lexsort((timestamps, users))
    user_ids, item_ids = actions.user_ids.take(pa.array(user_order)), actions.item_ids.take(pa.array(item_order))
    return DatasetContents(
        offsets=np.concatenate(([0], np.cumsum(np.bincount(users)))),
        items=items[order],
        timestamps=timestamps[order],
        item_ids=item_ids,
        user_ids=user_ids,
        titles=raw.items.of(item_ids).get("title"),
    )


def _order_of_ids(ids: pa.StringArray, kept: np.ndarray) -> np.ndarray:
    """Codes of the kept ids: by number where all are digits (up to 18), else by their UTF-8 bytes."""
    codes = np.flatnonzero(kept)
    texts = ids.take(pa.array(codes))
    keys = {"text": texts}
    if pc.all(pc.match_substring_regex(texts, "^[0-9]{1,18}$")).as_py():
        keys = {"number": texts.cast(pa.int64()), "text": texts}
    order = pc.sort_indices(pa.table(keys), sort_keys=[(key, "ascending") for key in keys])
    return codes[order.to_numpy()]


def _ranks(order: np.ndarray, size: int) -> np.ndarray:
    ranks = np.empty(size, np.int32)
    ranks[order] = np.arange(len(order), dtype=np.int32)
    return ranks
