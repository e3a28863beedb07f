"""What a manifest and the files of a serving directory must be; ValueError, with what to do, for all else."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from logitmix.common.files import file_digest, other_kind
from logitmix.common.mappings import brief, first_line
from logitmix.serving.directory.format import (
    IDS,
    SOURCE,
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
from logitmix.serving.model import STORED, row_shapes
from logitmix.serving.topk import MAX_ITEMS

_WRITERS = ("logitmix", "torch")
_ABOUT_ITEMS = ("num_items", "exclude_history", "item_cache", "precision")
FIELDS = (
    "format",
    "format_version",
    *_WRITERS,
    *SOURCE,
    "model",
    "schema",
    *_ABOUT_ITEMS,
    "signature",
    "files",
    "sha256",
)


def check_about(file: Path, manifest: Mapping[str, Any], about: About) -> None:
    if type(about.num_items) is not int or not 1 <= about.num_items <= MAX_ITEMS:
        broken(file, f"num_items is {brief(about.num_items)}, not a number from 1 to {MAX_ITEMS}")
    for name in ("exclude_history", "item_cache"):
        if type(value := getattr(about, name)) is not bool:
            broken(file, f"{name} is {brief(value)}, not true or false")
    if not isinstance(about.precision, str) or about.precision not in STORED:
        broken(file, f"precision is {brief(about.precision)}, not {' or '.join(STORED)}")
    if manifest["signature"] != signature(about.model, about.schema):
        broken(file, "its signature is not that of its model and schema")


def check_files(file: Path, files: Any, about: About) -> dict[str, dict[str, Any]]:
    """The tensors of all files, as in the manifest: those that follow from the model and the number of items."""
    if not isinstance(files, dict):
        broken(file, "files is not a mapping")
    extras = {name: entry for name, entry in files.items() if is_extra(name)}
    for name, entry in extras.items():
        check_keys(file, entry, ("bytes", "sha256", *(["cpu"] if is_compiled(name) else [])), f"files.{name}.")
        _check_digest(file, entry, f"files.{name}.")
        cpu = entry.get("cpu", ["any"])
        if not isinstance(cpu, list) or not cpu or not all(isinstance(of, str) for of in cpu):
            broken(file, f"files.{name}.cpu is not a list of names")
    files = {name: entry for name, entry in files.items() if name not in extras}
    shards, tables = numbered(items_file, files), numbered(tables_file, files)
    check_keys(file, files, (WEIGHTS, VOCABULARIES, IDS, *tables, *shards), "files.")
    for name in files:
        check_keys(file, files[name], ("bytes", "sha256", "tensors"), f"files.{name}.")
        _check_tensors(file, files[name], f"files.{name}.")
    tensors = {name: entry["tensors"] for name, entry in files.items()}
    try:
        rows = [tensors[name][row_tensor(about)]["shape"][0] for name in shards]
        expected = expected_tensors(tensors, about)
        table_rows = _row_counts([tensors[name] for name in tables])
    except (LookupError, ValueError, RuntimeError) as error:
        broken(file, f"the tensors of its files are not those of its model ({first_line(error)})")
    if sum(rows) != about.num_items:
        broken(file, f"its files have {sum(rows)} items, and num_items is {about.num_items}")
    for name in files:
        if tensors[name] != expected[name]:
            wrong = next(of for of in tensors[name] | expected[name] if tensors[name].get(of) != expected[name].get(of))
            said = f"{wrong:.80} is {brief(tensors[name].get(wrong))}, of its model {expected[name].get(wrong)}"
            broken(file, f"its tensors of {name} are not those of its model (files.{name}.tensors.{said})")
    for name, (count, _) in row_shapes(about.model, about.schema).items():
        if table_rows[name] != count:
            broken(file, f"its files have {table_rows[name]} rows of table {name}, and its model has {count}")
    return tensors


def check_file(file: Path, entry: Mapping[str, Any], content: bool = True) -> None:
    if not file.exists():
        broken(file, "it is missing")
    if kind := other_kind(file):
        broken(file, f"it is a {kind}, not a file")
    size = file.stat().st_size
    if size != entry["bytes"]:
        broken(file, f"it is damaged ({size} bytes, {entry['bytes']} in the manifest)")
    if content and file_digest(file) != entry["sha256"]:
        broken(file, "it is damaged (its sha256 is not the manifest's)")


def _check_tensors(file: Path, entry: Mapping[str, Any], prefix: str) -> None:
    _check_digest(file, entry, prefix)
    if not isinstance(entry["tensors"], dict):
        broken(file, f"{prefix}tensors is not a mapping")
    for name, of in entry["tensors"].items():
        within = f"{prefix}tensors.{name:.80}."
        check_keys(file, of, ("dtype", "shape"), within)
        if not isinstance(of["dtype"], str):
            broken(file, f"{within}dtype is {brief(of['dtype'])}, not a text")
        if not isinstance(of["shape"], list) or not all(map(_is_size, of["shape"])):
            broken(file, f"{within}shape is {brief(of['shape'])}, not a list of sizes")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _check_digest(file: Path, entry: Mapping[str, Any], prefix: str) -> None:
    if not _is_size(entry["bytes"]):
        broken(file, f"{prefix}bytes is {brief(entry['bytes'])}, not a number of bytes")
    if not isinstance(entry["sha256"], str):
        broken(file, f"{prefix}sha256 is {brief(entry['sha256'])}, not a text")


def check_keys(file: Path, tree: Any, keys: tuple[str, ...], prefix: str) -> None:
    if not isinstance(tree, dict):
        broken(file, f"{prefix.rstrip('.') or 'its content'} is not a mapping")
    for key in keys:
        if key not in tree:
            broken(file, f"it has no field {prefix}{key}")
    for key in tree:
        if key not in keys:
            broken(file, f"it has a field {prefix}{key:.80} that this logitmix does not know")


def _row_counts(files: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Rows of each table's pieces, all together."""
    counts: Counter[str] = Counter()
    for found in files:
        counts.update({name: piece["shape"][0] for name, piece in found.items()})
    return counts


def broken(file: Path, problem: str) -> NoReturn:
    raise ValueError(f"{file}: {problem}; {advice(file.parent)} --overwrite")


def advice(path: Path) -> str:
    return f"make it with: logitmix export RUN --out {path}"
