import dataclasses
import hashlib
import json
import math
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from hostile_json import VALUES, edited, lacking, places, refused
from safetensors.torch import load_file, save_file
from small_models import export_small, small_model

from logitmix.common.checked import entry_of
from logitmix.common.files import publish
from logitmix.modules.schema import Feature, Schema, Table
from logitmix.serving.directory import format as serving_format
from logitmix.serving.directory import reader
from logitmix.serving.directory.format import FORMAT, Contents
from logitmix.serving.directory.reader import read, read_manifest
from logitmix.trainer.export import export as export_module

X = 40
FILES = (
    "manifest.json",
    "tower.safetensors",
    "items-00001-of-00003.safetensors",
    "ids.safetensors",
    "tables-00000-of-00001.safetensors",
    "vocabularies.safetensors",
    "columns.safetensors",
)
"""One of each kind."""
SHARD_BYTES = 16 * (4 * (16 + 3 * 4 + 6) + 8 + 1)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of 7, 7 and 6 items."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "SHARD_BYTES", SHARD_BYTES)
        return export_small(small_model("mol", X), tmp_path_factory.mktemp("export") / "served")


@pytest.fixture
def served(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "served"))


SCHEMA = Schema(
    (
        Feature("item", "item", "id", "item"),
        Feature("brand", "item", "id", "brand"),
        Feature("favorites", "user", "ids", "brand"),
        Feature("price", "item", "number", mean=0.1, deviation=2.5),
    ),
    (Table("item", 5), Table("brand", 3, dim=8)),
)


def assert_same(left: Contents, right: Contents) -> None:
    assert left.about == right.about
    assert list(left.raw_ids) == list(right.raw_ids)
    assert (left.titles is None) == (right.titles is None) and list(left.titles or ()) == list(right.titles or ())
    assert {name: list(of) for name, of in left.vocabularies.items()} == {
        name: list(of) for name, of in right.vocabularies.items()
    }
    columns = [
        {name: (list(of.texts or ()), of.values.nan_to_num(-7).tolist()) for name, of in side.columns.items()}
        for side in (left, right)
    ]
    assert columns[0] == columns[1]
    rows = [{f"{name}.{n}": t for name, p in of.tables.items() for n, t in enumerate(p.parts)} for of in (left, right)]
    parts = [(of.weights, rows_of, *of.shards) for of, rows_of in zip((left, right), rows, strict=True)]
    for a, b in zip(*parts, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def reseal(served: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Changes the manifest and makes all digests right again, as someone with a purpose would."""
    manifest = json.loads((served / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        entry |= entry_of(served / name)
    change(manifest)
    (served / "manifest.json").write_text(FORMAT.text(manifest))


def assert_refused(served: Path, *parts: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(served)
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message
    assert f"logitmix export RUN --out {served}" in message


def test_texts_of_any_kind_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = ["", "é\n", '"', "\\", "1", "01"]
    monkeypatch.setattr(small_models, "raw_ids", lambda count: odd)
    contents = read(export_small(small_model("dot", len(odd)), tmp_path / "served"))
    assert list(contents.raw_ids) == odd and list(contents.titles or ()) == [f"«{text}»" for text in odd]
    assert [contents.raw_ids.find(text) for text in odd] == list(range(len(odd)))


def test_the_manifest_says_what_is_here(original: Path) -> None:
    manifest = read_manifest(original)
    assert (manifest["run"], manifest["step"], manifest["dataset"], manifest["num_items"]) == ("small", 12, "demo", X)
    assert manifest["torch"] == torch.__version__
    for number, R in enumerate((16, 16, 8)):
        assert manifest["files"][f"items-{number:05}-of-00003.safetensors"]["tensors"] == {
            "table": {"dtype": "F32", "shape": [R, 16]},
            "similarity.0": {"dtype": "F32", "shape": [R, 3, 4]},
            "similarity.1": {"dtype": "F32", "shape": [R, 6]},
            "corpus": {"dtype": "U8", "shape": [1, 2, 16, 4]},
            "corpus.scale": {"dtype": "F32", "shape": [1]},
        }
    assert manifest["files"]["ids.safetensors"]["tensors"]["raw_ids.order"] == {"dtype": "I64", "shape": [X]}
    assert manifest["files"]["tables-00000-of-00001.safetensors"]["tensors"] == {
        "item": {"dtype": "F32", "shape": [1, 16]}
    }
    assert len(manifest["files"]) == 8
    assert manifest["signature"]["inputs"]["history"]["max_length"] == 7
    for name, entry in manifest["files"].items():
        content = (original / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())


def test_an_export_is_the_same_each_time(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "SHARD_BYTES", SHARD_BYTES)
    again = export_small(small_model("mol", X), tmp_path / "again")
    assert all((again / name).read_bytes() == (original / name).read_bytes() for name in FILES)


def test_files_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        served = export_small(small_model("dot", X), tmp_path / "served")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in served.iterdir()} == {0o640}
    assert served.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("flips", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_seen(served: Path, name: str, flips: int) -> None:
    content, choose = (served / name).read_bytes(), random.Random(name)
    for _ in range(flips):
        changed = bytearray(content)
        changed[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        (served / name).write_bytes(changed)
        assert_refused(served, str(served / name))


@pytest.mark.parametrize("moment", ["_manifest", "check_file", "_read_tensors"])
def test_an_export_that_is_replaced_while_it_is_read_is_no_damage(
    original: Path, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The new one is read, and nothing of the old one with it."""
    monkeypatch.setattr(export_module, "SHARD_BYTES", SHARD_BYTES)
    another = export_small(small_model("mol", X, seed=1), tmp_path / "another")
    step = getattr(reader, moment)

    def replacing(*given: Any, **also: Any) -> Any:
        done = step(*given, **also)
        if given[0] in (served, served / "tower.safetensors") and another.exists():
            publish(another, served)
        return done

    monkeypatch.setattr(reader, moment, replacing)
    found = read(served)
    monkeypatch.undo()
    assert not another.exists()
    assert_same(found, read(served))


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda file: file.write_bytes(b""), "is damaged"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is damaged"),
        (Path.unlink, "is missing"),
        (_pipe, "is a pipe, not a file"),
    ],
)
def test_a_file_that_is_cut_missing_or_none_is_seen(
    served: Path, name: str, change: Callable[[Path], object], said: str
) -> None:
    change(served / name)
    if name == "manifest.json" and said != "is damaged":
        assert_refused(served, f"no serving directory at {served} (it has no manifest.json)")
    else:
        assert_refused(served, f"{served / name} {said}")


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "kind is 'another', not 'logitmix serving directory'": lambda m: m.update(kind="another"),
    "format_version is 1, and this logitmix reads 5": lambda m: m.update(format_version=1),
    "unknown key model.surprise": lambda m: m["model"].update(surprise=1),
    "files has no field ids.safetensors": lambda m: m["files"].pop("ids.safetensors"),
    "files has no field items-00000-of-00002.safetensors": lambda m: m["files"].pop(FILES[2]),
    "model.encoder.blocks is 0; it must be from 1 to 1,024": lambda m: m["model"]["encoder"].update(blocks=0),
    "its files have 40 items, and num_items is 41": lambda m: m.update(num_items=X + 1),
    "files has no field tables-00000-of-00001.safetensors": lambda m: m["files"].update(
        {"tables-00001-of-00002.safetensors": m["files"].pop(FILES[4])}
    ),
    "the tensors of its files are not those of its model ('own_row')": lambda m: m.update(item_cache=False),
    "its tensors of items-00000-of-00003.safetensors are not": lambda m: m.update(precision="bf16"),
    "its signature is not": lambda m: m["signature"]["outputs"].update(scores="F16"),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_manifest_that_does_not_fit_is_refused(served: Path, message: str) -> None:
    reseal(served, CHANGES[message])
    assert_refused(served, "manifest.json", message)


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_every_field_of_a_manifest_edited(served: Path, count: int) -> None:
    """With its digest made anew: it is taken, or refused in one line that names the file and the field."""
    chance, file, taken = random.Random(0), served / "manifest.json", 0
    tree = json.loads(file.read_text())
    del tree["sha256"]
    for at in chance.sample(list(places(tree)), count):
        texts = [edited(tree, (at, value)) for value in chance.sample(VALUES, 3)]
        for text in [*texts, *([lacking(tree, at)] if at else [])]:
            try:
                content = json.loads(text)
                file.write_text(FORMAT.text(content) if isinstance(content, dict) else text)
            except (ValueError, RecursionError):
                file.write_text(text)
            # What parts of a schema do not fit each other is said by the names of features and tables, and what does
            # not fit a file by that file's name.
            fields = () if at[:1] == ("schema",) else at
            named = str(served) if at[:1] == ("files",) else "manifest.json"
            taken += not refused(lambda: read(served), named, fields)
    assert 3 * taken < 2 * count


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.update(tensors=[1]),
        lambda entry: entry["tensors"].pop("raw_ids.data"),
        lambda entry: entry["tensors"]["raw_ids.data"].update(shape=[float("inf")]),
    ],
)
def test_a_manifest_that_does_not_describe_the_tensors_is_refused(
    served: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    reseal(served, lambda manifest: change(manifest["files"]["ids.safetensors"]))
    assert_refused(served, f"{served / 'ids.safetensors'}: its tensors are not those of the manifest")


def test_a_field_that_a_newer_configuration_adds_has_its_default(served: Path) -> None:
    before = read(served)
    reseal(served, lambda manifest: manifest["model"]["loss"].pop("kind"))
    assert_same(read(served), before)


def assert_change_refused(file: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    reseal(file.parent)
    assert_refused(file.parent, f"{file.name}: {message}")


OTHERS = "its tensors are not those of the manifest"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (FILES[2], lambda of: of.update(table=of["table"][:-1].clone()), OTHERS),
        (FILES[2], lambda of: of.update(surprise=torch.zeros(1)), OTHERS),
        (FILES[3], lambda of: of["raw_ids.bounds"].sub_(1), "its raw_ids.bounds do not divide their data"),
        (FILES[3], lambda of: of["titles.bounds"][3].add_(99), "its titles.bounds do not divide their data"),
        (FILES[3], lambda of: of["raw_ids.order"][3].fill_(X), "its raw_ids.order names texts that are not there"),
        (FILES[6], lambda of: of["category.values"][3].fill_(X), "its category.values are no places of its texts"),
        (FILES[6], lambda of: of["category.texts.order"][3].fill_(-1), "its category.texts.order names texts that are"),
        (FILES[6], lambda of: of["price.values"][3].fill_(math.inf), "its price.values are infinite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    served: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    assert_change_refused(served / name, change, message)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (FILES[1], {"surprise": torch.zeros(1)}, "its tensors of tower.safetensors are not those of its model (files."),
        (FILES[2], {"table": torch.zeros(16, 17)}, f"its tensors of {FILES[2]} are not those of its model (files."),
        (FILES[2], {"table": torch.zeros(())}, "the tensors of its files are not those of its model (list index out"),
        (FILES[3], {"raw_ids.order": torch.zeros(X)}, "its tensors of ids.safetensors are not those of its model (fi"),
        (FILES[4], {"item": torch.zeros(2, 16)}, "its files have 2 rows of table item, and its model has 1"),
    ],
)
def test_tensors_of_another_model_are_refused(
    served: Path, name: str, change: dict[str, torch.Tensor], said: str
) -> None:
    tensors = load_file(served / name) | change
    save_file(tensors, served / name)
    reseal(served, lambda manifest: manifest["files"][name].update(tensors=serving_format.described(tensors)))
    assert_refused(served, "manifest.json", said)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["tags.offsets"][3].add_(99), "its tags.offsets do not divide their values"),
        (lambda tensors: tensors["tags.values"][0].fill_(4), "its tags.values name rows that table tags does not have"),
        (lambda tensors: tensors["brand.values"][0].fill_(-1), "its brand.values name rows that table brand does not"),
        (lambda tensors: tensors.update(table=tensors.pop("own_row")), OTHERS),
    ],
)
def test_features_of_items_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    schema = Schema((*SCHEMA.features, Feature("tags", "item", "ids", "tags")), (*SCHEMA.tables, Table("tags", 4)))
    schema = dataclasses.replace(schema, tables=(Table("item", X + 1), *schema.tables[1:]))
    served = export_small(small_model("mol", X, schema=schema), tmp_path / "served", item_cache=False)
    assert read_manifest(served)["files"]["items-00000-of-00001.safetensors"]["tensors"].keys() == {
        "own_row", "corpus", "corpus.scale", "brand.values", "price.values", "tags.values", "tags.offsets"
    }  # fmt: skip
    assert_change_refused(served / "items-00000-of-00001.safetensors", change, message)


class _Runs:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("name", FILES)
def test_no_pickle_is_read(served: Path, tmp_path: Path, name: str) -> None:
    attack = pickle.dumps(_Runs(tmp_path / "ran"))
    (served / name).write_bytes(attack)
    if name != "manifest.json":
        reseal(served)
    assert_refused(served, name)
    assert not (tmp_path / "ran").exists()
    pickle.loads(attack)
    assert (tmp_path / "ran").exists()


def test_overwrites_only_when_told(served: Path) -> None:
    before = read(served)
    with pytest.raises(ValueError, match="exists already; give --overwrite"):
        export_small(small_model("dot", 1), served)
    assert_same(read(served), before)
    export_small(small_model("dot", 1), served, overwrite=True)
    assert len(read(served).raw_ids) == 1
    assert [entry.name for entry in served.parent.iterdir()] == ["served"]


def test_overwrites_where_a_link_leads(served: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(served)
    export_small(small_model("dot", 1), tmp_path / "current", overwrite=True)
    assert (tmp_path / "current").is_symlink() and len(read(served).raw_ids) == 1


def _stray_file(served: Path) -> Path:
    (served / "notes.txt").write_text("mine")
    return served / "notes.txt"


def _another_manifest(served: Path) -> Path:
    shutil.rmtree(served)
    served.mkdir()
    (served / "manifest.json").write_text('{"name": "a web page"}')
    return served / "manifest.json"


@pytest.mark.parametrize("make", [_stray_file, _another_manifest])
def test_overwrites_nothing_else(served: Path, make: Callable[[Path], Path]) -> None:
    kept = make(served)
    content = kept.read_bytes()
    with pytest.raises(ValueError, match="exists and is not a serving directory"):
        export_small(small_model("dot", 1), served, overwrite=True)
    assert kept.read_bytes() == content
    assert [entry.name for entry in served.parent.iterdir()] == ["served"]


def test_features_in_the_table_of_items_are_not_exported(tmp_path: Path) -> None:
    schema = Schema((*Schema.of_ids(X).features, Feature("last", "user", "id", "item")), Schema.of_ids(X).tables)
    with pytest.raises(ValueError, match="exports hold no table of items for other features, and the model uses last"):
        export_small(small_model("mol", X, schema=schema), tmp_path / "served")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_diverged_model_is_not_written(tmp_path: Path, bad: float) -> None:
    for damage in (lambda model: model.item_XD[-1, 3:4], lambda model: model.tower.similarity.item_gate[0].bias):
        model = small_model("mol", X)
        damage(model).data.fill_(bad)
        with pytest.raises(ValueError, match=r"(table|item_gate\.0\.bias) holds NaN or infinity"):
            export_small(model, tmp_path / "served")
        assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("limit", "message"), [(10, "File too large"), (4000, "safetensors cannot be written")])
def test_a_failed_write_leaves_what_was_there(served: Path, limit: int, message: str) -> None:
    """A limit on the size of files stands in for a full disk."""
    before = read(served)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=message):
            export_small(small_model("mol", X), served, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(read(served), before)
    assert [entry.name for entry in served.parent.iterdir()] == ["served"]
