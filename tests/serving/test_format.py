import dataclasses
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import SOURCE, export_small, raw_ids, small_model

from logitmix.serving.format import Contents, read, read_manifest, write
from logitmix.serving.model import item_shapes, weight_shapes

X = 20
FILES = ("manifest.json", "tower.safetensors", "items.safetensors", "ids.json")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_small(small_model("mol", X), tmp_path_factory.mktemp("export") / "served")


@pytest.fixture
def served(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "served"))


def random_contents(ids: list[str], titles: list[str] | None = None, seed: int = 0) -> Contents:
    config, generator = small_model("mol", 1).tower.config, torch.Generator().manual_seed(seed)
    weights, items = (
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for shapes in (weight_shapes(config), item_shapes(config, len(ids)))
    )
    return Contents(config, SOURCE, weights, items, ids, titles, exclude_history=True)


def assert_same(left: Contents, right: Contents) -> None:
    for field in ("model", "source", "raw_ids", "titles", "exclude_history"):
        assert getattr(left, field) == getattr(right, field)
    for a, b in ((left.weights, right.weights), (left.items, right.items)):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def reseal(served: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Changes the manifest and makes all digests right again, as someone with a purpose would."""
    manifest = json.loads((served / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        content = (served / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(manifest)
    manifest.pop("sha256", None)
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (served / "manifest.json").write_text(json.dumps(manifest))


def assert_refused(served: Path, *parts: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(served)
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message
    assert f"logitmix export RUN --out {served}" in message


@pytest.mark.parametrize("titles", [None, ["", "«é»\n", "\ud800", '"', "\\", "a", "a"]])
def test_what_was_written_is_read(tmp_path: Path, titles: list[str] | None) -> None:
    contents = random_contents(["", "é\n", "\ud800", '"', "\\", "1", "01"], titles)
    written = write(contents, tmp_path / "deep" / "served")
    assert_same(read(tmp_path / "deep" / "served"), contents)
    assert read_manifest(tmp_path / "deep" / "served") == written
    assert sorted(entry.name for entry in (tmp_path / "deep").iterdir()) == ["served"]


def test_the_manifest_says_what_is_here(original: Path) -> None:
    manifest = read_manifest(original)
    assert (manifest["run"], manifest["step"], manifest["dataset"], manifest["num_items"]) == ("small", 12, "demo", X)
    assert manifest["torch"] == torch.__version__
    assert manifest["files"]["items.safetensors"]["tensors"] == {
        "table": {"dtype": "F32", "shape": [X, 16]},
        "similarity.0": {"dtype": "F32", "shape": [X, 3, 4]},
        "similarity.1": {"dtype": "F32", "shape": [X, 6]},
        "hindexer.0": {"dtype": "F32", "shape": [X, 8]},
    }
    assert manifest["signature"]["inputs"]["history"]["max_length"] == 7
    for name, entry in manifest["files"].items():
        content = (original / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())


def test_an_export_is_the_same_each_time(original: Path, tmp_path: Path) -> None:
    again = export_small(small_model("mol", X), tmp_path / "again")
    assert all((again / name).read_bytes() == (original / name).read_bytes() for name in FILES)


def test_files_can_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        served = export_small(small_model("dot", X), tmp_path / "served")
    finally:
        os.umask(before)
    assert {(served / name).stat().st_mode & 0o777 for name in FILES} == {0o640}
    assert served.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_seen(original: Path, served: Path, name: str) -> None:
    """Or it is white space of the manifest, and what is read is the same."""
    content, choose, seen = (served / name).read_bytes(), random.Random(name), 0
    expected = read(original)
    for _ in range(60):
        changed = bytearray(content)
        changed[choose.randrange(len(content))] ^= choose.randrange(1, 256)
        (served / name).write_bytes(changed)
        try:
            found = read(served)
        except ValueError as error:
            seen += 1
            assert str(served / name) in str(error) and "\n" not in str(error)
        else:
            assert name == "manifest.json"
            assert_same(found, expected)
            assert read_manifest(served) == read_manifest(original)
    assert seen == 60 or (name == "manifest.json" and seen >= 40)


@pytest.mark.parametrize(("before", "after"), [('"step": 12', '"step": 13'), ('"run": "small"', '"run": "smell"')])
def test_a_changed_manifest_is_seen_where_nothing_else_depends_on_it(served: Path, before: str, after: str) -> None:
    text = (served / "manifest.json").read_text()
    assert before in text
    (served / "manifest.json").write_text(text.replace(before, after))
    assert_refused(served, "manifest.json: it is damaged (its sha256 differs)")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [0, 8, -1])
def test_a_truncated_file_is_seen(original: Path, served: Path, name: str, length: int) -> None:
    (served / name).write_bytes((served / name).read_bytes()[:length])
    if (name, length) == ("manifest.json", -1):
        assert_same(read(served), read(original))  # only the line end is gone
    else:
        assert_refused(served, f"{served / name}: it is damaged", "" if name == "manifest.json" else "bytes")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_seen(served: Path, name: str) -> None:
    (served / name).unlink()
    assert_refused(served, str(served), "no manifest.json" if name == "manifest.json" else f"{name}: it is missing")


def test_nothing_there(tmp_path: Path) -> None:
    assert_refused(tmp_path / "served", "no serving directory at")


def test_a_pipe_in_place_of_a_file_does_not_block(served: Path) -> None:
    (served / "ids.json").unlink()
    os.mkfifo(served / "ids.json")
    assert_refused(served, "ids.json: it is missing")


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "is not the manifest of a": lambda m: m.update(format="another"),
    "it has format version 1, this logitmix reads 2": lambda m: m.update(format_version=1),
    "a field surprise that": lambda m: m.update(surprise=1),
    "unknown key model.surprise": lambda m: m["model"].update(surprise=1),
    "unknown key model.encoder.surprise": lambda m: m["model"]["encoder"].update(surprise=1),
    "a field files.surprise that": lambda m: m["files"].update(surprise={}),
    "a field files.ids.json.surprise that": lambda m: m["files"]["ids.json"].update(surprise=1),
    "no field torch": lambda m: m.pop("torch"),
    "no field files.ids.json": lambda m: m["files"].pop("ids.json"),
    "no field files.items.safetensors.tensors": lambda m: m["files"]["items.safetensors"].pop("tensors"),
    "files is not a mapping": lambda m: m.update(files=[]),
    "model is not a mapping": lambda m: m.update(model=None),
    "model.encoder is a section": lambda m: m["model"].update(encoder=3),
    "step is '12'": lambda m: m.update(step="12"),
    "model.similarity.kind is 'cosine'": lambda m: m["model"]["similarity"].update(kind="cosine"),
    "model.encoder.blocks is 2.0": lambda m: m["model"]["encoder"].update(blocks=2.0),
    "model.encoder.blocks is 0; it must be at least 1": lambda m: m["model"]["encoder"].update(blocks=0),
    "num_items is 0": lambda m: m.update(num_items=0),
    "num_items is True": lambda m: m.update(num_items=True),
    "its tensors of items.safetensors are not those": lambda m: m.update(num_items=X + 1),
    "its tensors of tower.safetensors are not those": lambda m: m["model"]["encoder"].update(blocks=3),
    "exclude_history is 1, not true or false": lambda m: m.update(exclude_history=1),
    "its signature is not": lambda m: m["signature"]["outputs"].update(scores="F16"),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_manifest_that_does_not_fit_is_refused(served: Path, message: str) -> None:
    reseal(served, CHANGES[message])
    assert_refused(served, "manifest.json", message)


def test_a_field_that_a_newer_configuration_adds_has_its_default(served: Path) -> None:
    before = read(served)
    reseal(served, lambda manifest: manifest["model"]["loss"].pop("kind"))
    assert_same(read(served), before)


def test_no_nesting_breaks_the_reader(served: Path) -> None:
    (served / "manifest.json").write_text("[" * 100_000)
    assert_refused(served, "manifest.json", "nested too deep")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update(table=tensors["table"][:-1].clone()),
        lambda tensors: tensors.update(table=tensors["table"].double()),
        lambda tensors: tensors.update(table=tensors["table"].view(torch.int32)),
        lambda tensors: tensors.update(surprise=torch.zeros(1)),
        lambda tensors: tensors.pop("table"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(served: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(served / "items.safetensors")
    change(tensors)
    save_file(tensors, served / "items.safetensors")
    reseal(served)
    assert_refused(served, "items.safetensors: its tensors are not those of the manifest")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"raw_ids": raw_ids(X)[:-1], "titles": None}, "raw_ids are 19, for 20 items"),
        ({"raw_ids": raw_ids(X), "titles": ["a"]}, "titles are 1, for 20 items"),
        ({"raw_ids": [*raw_ids(X)[:-1], "id 0"], "titles": None}, "raw_ids name an item twice"),
        ({"raw_ids": list(range(X)), "titles": None}, "raw_ids are not all texts"),
        ({"raw_ids": None, "titles": None}, "raw_ids are not all texts"),
        ({"raw_ids": raw_ids(X)}, "no field titles"),
        ({"raw_ids": raw_ids(X), "titles": None, "surprise": 1}, "a field surprise"),
        (raw_ids(X), "its content is not a mapping"),
    ],
)
def test_ids_that_do_not_fit_are_refused(served: Path, ids: object, message: str) -> None:
    (served / "ids.json").write_text(json.dumps(ids))
    reseal(served)
    assert_refused(served, "ids.json", message)


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


def test_an_empty_directory_may_become_one(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    write(random_contents(["a"]), tmp_path / "served")
    assert read(tmp_path / "served").raw_ids == ["a"]


def test_overwrites_only_when_told(served: Path) -> None:
    before = read(served)
    with pytest.raises(ValueError, match="is there already; give --overwrite"):
        write(random_contents(["a"]), served)
    assert_same(read(served), before)
    write(random_contents(["a"]), served, overwrite=True)
    assert read(served).raw_ids == ["a"]
    assert [entry.name for entry in served.parent.iterdir()] == ["served"]


@pytest.mark.parametrize("name", FILES)
def test_overwrites_a_damaged_one(served: Path, name: str) -> None:
    content = (served / name).read_bytes()
    (served / name).write_bytes(content[: len(content) // 2])
    write(random_contents(["a"]), served, overwrite=True)
    assert read(served).raw_ids == ["a"]


def test_overwrites_where_a_link_leads(served: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(served)
    write(random_contents(["a"]), tmp_path / "current", overwrite=True)
    assert (tmp_path / "current").is_symlink() and read(served).raw_ids == ["a"]


def _stray_file(served: Path) -> Path:
    (served / "notes.txt").write_text("mine")
    return served / "notes.txt"


def _another_manifest(served: Path) -> Path:
    for name in FILES[1:]:
        (served / name).unlink()
    (served / "manifest.json").write_text('{"name": "a web page"}')
    return served / "manifest.json"


def _no_manifest(served: Path) -> Path:
    (served / "manifest.json").unlink()
    return served / "ids.json"


def _a_file(served: Path) -> Path:
    shutil.rmtree(served)
    served.write_text("mine")
    return served


@pytest.mark.parametrize("make", [_stray_file, _another_manifest, _no_manifest, _a_file])
def test_overwrites_nothing_else(served: Path, make: Callable[[Path], Path]) -> None:
    kept = make(served)
    content = kept.read_bytes()
    with pytest.raises(ValueError, match="is there and is not a serving directory"):
        write(random_contents(["a"]), served, overwrite=True)
    assert kept.read_bytes() == content
    assert [entry.name for entry in served.parent.iterdir()] == ["served"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (random_contents(["a", "a"]), "raw_ids name an item twice"),
        (random_contents(["a", "b"], ["one"]), "titles are 1, for 2 items"),
        (dataclasses.replace(random_contents(["a"]), raw_ids=[None]), "raw_ids are not all texts"),
    ],
)
def test_ids_that_do_not_fit_are_not_written(tmp_path: Path, contents: Contents, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(contents, tmp_path / "served")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_diverged_model_is_not_written(tmp_path: Path, bad: float) -> None:
    contents = random_contents(["a", "b"])
    contents.weights["query_tower.encoder.norm.weight"][3] = bad
    with pytest.raises(ValueError, match=r"query_tower\.encoder\.norm\.weight holds NaN or infinity"):
        write(contents, tmp_path / "served")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("limit", "message"), [(10, "File too large"), (4000, "tower.safetensors cannot be written")])
def test_a_failed_write_leaves_what_was_there(served: Path, limit: int, message: str) -> None:
    """A limit on the size of files stands in for a full disk."""
    before = read(served)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match=message):
            write(before, served, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_same(read(served), before)
    assert [entry.name for entry in served.parent.iterdir()] == ["served"]
