"""The serving directory: safetensors and JSON, so that reading it runs no code but ours. Format version 2.

    manifest.json        what is here; see below
    tower.safetensors    the weights of the towers
    items.safetensors    table [X, D], with which histories are encoded, and the item cache: what the similarity
                         (similarity.0, …; of MoL the components [X, I, C] and the gating weights [X, M]) and the
                         h-indexer (hindexer.0 [X, H], where there is one) make of the items
    ids.json             {"raw_ids": [X texts, by item index], "titles": [X texts] or null}

All tensors are FP32. The fields of the manifest:

    format, format_version    what and which this is
    logitmix, torch           versions that wrote it
    run, step, dataset        where the weights come from: names of run and dataset, step of the checkpoint
    model                     the model's configuration
    num_items                 X
    exclude_history           whether retrieval leaves a history's own items out where the caller does not say: as the
                              model was evaluated
    signature                 inputs and outputs of a retrieval
    files                     {name: {bytes, sha256, and of safetensors the tensors: {name: {dtype, shape}}}}
    sha256                    of the other fields, as compact JSON in ASCII with sorted keys

Axes: X items in the corpus, D encoder width, I item components, C component width, M mixture components, H h-indexer
width.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from logitmix.common.files import file_digest, json_digest, whole_directory
from logitmix.common.mappings import from_mapping
from logitmix.modules.config import ModelConfig
from logitmix.serving.model import item_shapes, weight_shapes
from logitmix.serving.topk import MAX_ITEMS

T = TypeVar("T")

FORMAT = "logitmix serving directory"
FORMAT_VERSION = 2
MANIFEST, WEIGHTS, ITEMS, IDS = "manifest.json", "tower.safetensors", "items.safetensors", "ids.json"

_SOURCE = ("run", "step", "dataset")
_WRITERS = ("logitmix", "torch")
_ABOUT_ITEMS = ("num_items", "exclude_history")
_FIELDS = ("format", "format_version", *_WRITERS, *_SOURCE, "model", *_ABOUT_ITEMS, "signature", "files", "sha256")


@dataclass(frozen=True)
class Source:
    """Where a model comes from: name of the run, step of the checkpoint, name of the dataset."""

    run: str
    step: int
    dataset: str


@dataclass(frozen=True, eq=False)
class Contents:
    """What a serving directory holds."""

    model: ModelConfig
    source: Source
    weights: Mapping[str, Tensor]
    """Of tower.safetensors."""
    items: Mapping[str, Tensor]
    """Of items.safetensors."""
    raw_ids: list[str]
    """[X], each once."""
    titles: list[str] | None
    """[X], for people to read."""
    exclude_history: bool
    """Whether retrieval leaves a history's own items out where the caller does not say."""


def write(contents: Contents, out: Path, overwrite: bool = False) -> dict[str, Any]:
    """Writes a serving directory, complete or not at all, and gives its manifest.

    Raises ValueError as `check_target` does, and where contents do not fit together; OSError where the disk is full
    or forbids it.
    """
    out = out.resolve()
    check_target(out, overwrite)
    _check_contents(contents)
    with whole_directory(out) as staging:
        manifest = _fill(staging, contents)
        check_target(out, overwrite)
    return manifest


def check_target(out: Path, overwrite: bool) -> None:
    """ValueError where `out` must not be written: something is there, and it is no serving directory to overwrite."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not _is_ours(out):
        raise ValueError(f"{out} is there and is not a serving directory; give another --out, or remove it first")
    if not overwrite:
        raise ValueError(f"{out} is there already; give --overwrite to replace it, or another --out")


def read(path: Path, device: torch.device | str = "cpu") -> Contents:
    """Reads and checks a serving directory; its tensors go to `device`.

    Raises ValueError that names the path and what to do, where there is no serving directory, where it is of another
    format version, or where a file is missing, damaged, or does not fit the manifest.
    """
    manifest = read_manifest(path)
    model = _parse(ModelConfig, manifest["model"], path / MANIFEST, "model.")
    source = _parse(Source, {name: manifest[name] for name in _SOURCE}, path / MANIFEST, "")
    _check_model(path, manifest, model)
    for name in (WEIGHTS, ITEMS, IDS):
        _check_file(path / name, manifest["files"][name])
    ids = _read_ids(path / IDS, manifest["num_items"])
    return Contents(
        model=model,
        source=source,
        weights=_read_tensors(path / WEIGHTS, weight_shapes(model), device),
        items=_read_tensors(path / ITEMS, item_shapes(model, manifest["num_items"]), device),
        raw_ids=ids["raw_ids"],
        titles=ids["titles"],
        exclude_history=manifest["exclude_history"],
    )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a serving directory, its own digest checked; the files are not looked at."""
    file = path / MANIFEST
    if not file.is_file():
        raise ValueError(f"no serving directory at {path} (it has no {MANIFEST}); {_advice(path)}")
    manifest = _read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        _broken(file, f"it is not the manifest of a {FORMAT}")
    if manifest.get("format_version") != FORMAT_VERSION:
        _broken(file, f"it has format version {manifest.get('format_version')}, this logitmix reads {FORMAT_VERSION}")
    _check_keys(file, manifest, _FIELDS, "")
    if manifest["sha256"] != _manifest_digest(manifest):
        _broken(file, "it is damaged (its sha256 differs)")
    return manifest


def signature(model: ModelConfig) -> dict[str, Any]:
    """What a retrieval takes and gives, for readers of the manifest."""
    return {
        "inputs": {
            "history": {
                "items": "raw ids, or item indices from 0 to num_items - 1",
                "order": "oldest first",
                "min_length": 1,
                "max_length": model.encoder.max_length,
                "longer": "the last max_length are encoded",
            },
            "k": "number of items to retrieve",
        },
        "outputs": {
            "items": "item indices, highest score first, equal scores by rising index; -1 where none is left",
            "scores": "F32, the similarity; -inf where no item is left",
        },
    }


def _fill(part: Path, contents: Contents) -> dict[str, Any]:
    _write_json(part / IDS, {"raw_ids": contents.raw_ids, "titles": contents.titles})
    for name, tensors in ((WEIGHTS, contents.weights), (ITEMS, contents.items)):
        try:
            save_file(dict(tensors), part / name)
        except SafetensorError as error:
            raise OSError(f"{part / name} cannot be written: {error}") from None
        # safetensors makes files that only their owner can read; the umask decides, as it does for the JSON files.
        (part / name).chmod((part / IDS).stat().st_mode)
    manifest = _manifest(part, contents)
    _write_json(part / MANIFEST, manifest, indent=2)
    return manifest


def _manifest(part: Path, contents: Contents) -> dict[str, Any]:
    tensors = _tensors(contents.model, len(contents.raw_ids))
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "logitmix": version("logitmix"),
        "torch": str(torch.__version__),
        **dataclasses.asdict(contents.source),
        "model": dataclasses.asdict(contents.model),
        "num_items": len(contents.raw_ids),
        "exclude_history": contents.exclude_history,
        "signature": signature(contents.model),
        "files": {
            name: {"bytes": (part / name).stat().st_size, "sha256": file_digest(part / name)} | extra
            for name, extra in tensors.items()
        },
    }
    return manifest | {"sha256": _manifest_digest(manifest)}


def _tensors(model: ModelConfig, num_items: int) -> dict[str, dict[str, Any]]:
    """The field "tensors" of each file's entry."""
    shapes = {WEIGHTS: weight_shapes(model), ITEMS: item_shapes(model, num_items)}
    return {
        file: {"tensors": {name: {"dtype": "F32", "shape": shape} for name, shape in of_file.items()}}
        for file, of_file in shapes.items()
    } | {IDS: {}}


def _is_ours(path: Path) -> bool:
    """A serving directory, be it a damaged one, with nothing in it that is not ours to remove."""
    if not (path / MANIFEST).is_file() or FORMAT.encode() not in (path / MANIFEST).read_bytes():
        return False
    return {entry.name for entry in path.iterdir()} <= {MANIFEST, WEIGHTS, ITEMS, IDS}


def _check_contents(contents: Contents) -> None:
    """ValueError for what a trained model or a dataset can be, assert for what export made."""
    X = len(contents.raw_ids)
    for tensors, shapes in (
        (contents.weights, weight_shapes(contents.model)),
        (contents.items, item_shapes(contents.model, X)),
    ):
        assert {name: list(value.shape) for name, value in tensors.items()} == shapes
        for name, value in tensors.items():
            assert value.dtype == torch.float32
            if not torch.isfinite(value).all():
                raise ValueError(f"{name} holds NaN or infinity: the training diverged; export another checkpoint")
    problem = _ids_problem({"raw_ids": contents.raw_ids, "titles": contents.titles}, X)
    if problem:
        raise ValueError(f"the dataset's {problem}; prepare it again")


def _check_model(path: Path, manifest: Mapping[str, Any], model: ModelConfig) -> None:
    """The fields that follow from the model's configuration and the number of items."""
    file, num_items, files = path / MANIFEST, manifest["num_items"], manifest["files"]
    if type(num_items) is not int or not 1 <= num_items <= MAX_ITEMS:
        _broken(file, f"num_items is {num_items!r}, not a number from 1 to {MAX_ITEMS}")
    if type(manifest["exclude_history"]) is not bool:
        _broken(file, f"exclude_history is {manifest['exclude_history']!r}, not true or false")
    if manifest["signature"] != signature(model):
        _broken(file, "its signature is not that of its model")
    tensors = _tensors(model, num_items)
    _check_keys(file, files, tuple(tensors), "files.")
    for name, extra in tensors.items():
        _check_keys(file, files[name], ("bytes", "sha256", *extra), f"files.{name}.")
        if files[name].get("tensors") != extra.get("tensors"):
            _broken(file, f"its tensors of {name} are not those of its model")


def _check_file(file: Path, entry: Mapping[str, Any]) -> None:
    if not file.is_file():
        _broken(file, "it is missing")
    size = file.stat().st_size
    if size != entry["bytes"]:
        _broken(file, f"it is damaged ({size} bytes, {entry['bytes']} in the manifest)")
    if file_digest(file) != entry["sha256"]:
        _broken(file, "it is damaged (its sha256 is not the manifest's)")


def _read_tensors(file: Path, shapes: Mapping[str, list[int]], device: torch.device | str) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            found = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (it is no mapping)
            if {name: (part.get_dtype(), part.get_shape()) for name, part in found.items()} != {
                name: ("F32", shape) for name, shape in shapes.items()
            }:
                _broken(file, "its tensors are not those of the manifest")
            return {name: tensors.get_tensor(name) for name in shapes}
    except SafetensorError as error:
        _broken(file, f"it is no safetensors file ({error})")


def _read_ids(file: Path, num_items: int) -> dict[str, Any]:
    ids = _read_json(file)
    _check_keys(file, ids, ("raw_ids", "titles"), "")
    problem = _ids_problem(ids, num_items)
    if problem:
        _broken(file, f"its {problem}")
    return ids


def _ids_problem(ids: Mapping[str, Any], num_items: int) -> str | None:
    for name, values in ids.items():
        if name == "titles" and values is None:
            continue
        if not isinstance(values, list) or not all(type(value) is str for value in values):
            return f"{name} are not all texts"
        if len(values) != num_items:
            return f"{name} are {len(values)}, for {num_items} items"
    if len(set(ids["raw_ids"])) != num_items:
        return "raw_ids name an item twice"
    return None


def _parse(cls: type[T], tree: Any, file: Path, prefix: str) -> T:
    """A field that is missing has its default: what a newer logitmix adds must default to what there was before."""
    if not isinstance(tree, dict):
        _broken(file, f"{prefix.rstrip('.')} is not a mapping")
    try:
        return from_mapping(cls, tree, str(file), prefix)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{error}; {_advice(file.parent)}") from None


def _check_keys(file: Path, tree: Any, keys: tuple[str, ...], prefix: str) -> None:
    if not isinstance(tree, dict):
        _broken(file, f"{prefix.rstrip('.') or 'its content'} is not a mapping")
    for key in keys:
        if key not in tree:
            _broken(file, f"it has no field {prefix}{key}")
    for key in tree:
        if key not in keys:
            _broken(file, f"it has a field {prefix}{key} that this logitmix does not know")


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes().decode())
    except RecursionError:
        _broken(file, "it is damaged (nested too deep)")
    except ValueError as error:
        _broken(file, f"it is damaged ({error})")


def _write_json(file: Path, content: object, indent: int | None = None) -> None:
    # ASCII with escapes: every text comes back as it was, unpaired surrogates too.
    file.write_text(json.dumps(content, indent=indent, allow_nan=False) + "\n", encoding="ascii")


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    return json_digest({name: value for name, value in manifest.items() if name != "sha256"})


def _broken(file: Path, problem: str) -> NoReturn:
    raise ValueError(f"{file}: {problem}; {_advice(file.parent)} --overwrite")


def _advice(path: Path) -> str:
    return f"make it with: logitmix export RUN --out {path}"
