"""What the manifest of a serving directory must be; ValueError that names the file and the field for all else."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logitmix.common.checked import require_entry, require_fields
from logitmix.common.mappings import brief, first_line, from_mapping
from logitmix.common.messages import prefixed
from logitmix.serving.directory.format import (
    COLUMNS,
    IDS,
    PROJECTIONS,
    VOCABULARIES,
    WEIGHTS,
    About,
    expected_tensors,
    is_compiled,
    is_extra,
    items_file,
    numbered,
    row_tensor,
    signature,
    tables_file,
)
from logitmix.serving.model import row_shapes
from logitmix.serving.topk import MAX_ITEMS

_WRITERS, _SOURCE = ("logitmix", "torch"), ("run", "step", "dataset")
_ABOUT = ("model", "num_items", "exclude_history", "schema", "item_cache", "precision", "removed")
FIELDS = (*_WRITERS, *_SOURCE, *_ABOUT, "signature", "files")


def about_of(file: Path, manifest: Mapping[str, Any]) -> About:
    """What a manifest says of an export, besides its files. A setting of the model that is missing takes its default:
    one that a newer logitmix adds must default to the earlier behavior."""
    given = [name for name in (*_ABOUT, "filterable") if name in manifest]
    tree = {name: manifest[name] for name in given} | {"source": {name: manifest[name] for name in _SOURCE}}
    with prefixed(f"{file}: ", TypeError):
        about = from_mapping(About, tree, str(file))
    if not 1 <= about.num_items <= MAX_ITEMS:
        raise ValueError(f"{file}: num_items is {about.num_items}, not a number from 1 to {MAX_ITEMS}")
    if about.removed < 0:
        raise ValueError(f"{file}: removed is {about.removed}, not a number from 0")
    if manifest["signature"] != signature(about):
        raise ValueError(f"{file}: its signature is not that of its model and schema")
    return about


def data_files(file: Path, files: Any, about: About) -> list[str]:
    """The names of all files but the extras, as in the manifest."""
    if not isinstance(files, dict):
        raise ValueError(f"{file}: files is {brief(files)}, not a mapping")
    extras = {name: entry for name, entry in files.items() if is_extra(name)}
    for name, entry in extras.items():
        require_entry(entry, f"{file}: files.{name}", ["cpu"] if is_compiled(name) else [])
        cpu = entry.get("cpu", ["any"])
        if not isinstance(cpu, list) or not cpu or not all(isinstance(of, str) for of in cpu):
            raise ValueError(f"{file}: files.{name}.cpu is not a list of names")
    others = {name: entry for name, entry in files.items() if name not in extras}
    shards, tables = numbered(items_file, others), numbered(tables_file, others)
    some = [COLUMNS] * bool(about.filterable) + [PROJECTIONS] * bool(about.projected)
    require_fields(others, (WEIGHTS, VOCABULARIES, IDS, *some, *tables, *shards), f"{file}: files")
    for name, entry in others.items():
        require_entry(entry, f"{file}: files.{name}", ["tensors"])
    return list(others)


def require_model_tensors(file: Path, tensors: Mapping[str, dict[str, Any]], about: About) -> None:
    """ValueError if the tensors of the files, described, are not those that follow from the model and the number of
    items."""
    try:
        rows = [tensors[name][row_tensor(about)]["shape"][0] for name in numbered(items_file, tensors)]
        expected = expected_tensors(tensors, about)
        table_rows = Counter[str]()
        for name in numbered(tables_file, tensors):
            table_rows.update({table: of["shape"][0] for table, of in tensors[name].items()})
    except (LookupError, ValueError, RuntimeError) as error:
        raise ValueError(f"{file}: the tensors of its files are not those of its model ({first_line(error)})") from None
    ranked = rows[:-1] if about.removed else rows
    if sum(ranked) != about.num_items:
        raise ValueError(f"{file}: its files have {sum(ranked)} items, and num_items is {about.num_items}")
    if about.removed and rows[-1] != about.removed:
        raise ValueError(f"{file}: its last file has {rows[-1]} removed items, and removed is {about.removed}")
    for name in tensors:
        if tensors[name] != expected[name]:
            wrong = next(of for of in tensors[name] | expected[name] if tensors[name].get(of) != expected[name].get(of))
            said = f"{wrong:.80} is {brief(tensors[name].get(wrong))}, of its model {expected[name].get(wrong)}"
            raise ValueError(f"{file}: its tensors of {name} are not those of its model (files.{name}.tensors.{said})")
    for name, (count, _) in row_shapes(about.model, about.schema).items():
        if table_rows[name] != count:
            raise ValueError(
                f"{file}: its files have {table_rows[name]} rows of table {name}, and its model has {count}"
            )
