"""Deltas of exports: base and deltas are the whole export, file for file, and what is not in order is refused."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from safetensors.torch import load_file
from small_models import SmallModel, every_feature, export_small, raw_ids, small_model
from test_server import assert_alike, running
from waiting import until

from logitmix.modules.schema import Schema
from logitmix.serving import server as server_module
from logitmix.serving.directory import delta, reader
from logitmix.serving.directory.delta import DELTA, DELTA_MANIFEST, ROWS
from logitmix.serving.live import LiveExport
from logitmix.serving.retriever import Retriever
from logitmix.trainer import cli
from logitmix.trainer.export import export as export_module
from logitmix.trainer.export.delta import fold, with_deltas, write_delta

X = 40


def touched(model: SmallModel, items: list[int], more: int = 0) -> SmallModel:
    """The model with other rows for some items, and with new ones."""
    item_XD = torch.cat([model.item_XD, torch.randn(more, 16, generator=torch.Generator().manual_seed(more))])
    item_XD[items] += 1
    # Items without a feature: the schema has their number.
    tower = small_model("mol", len(item_XD), schema=replace_items(model.tower.schema, len(item_XD))).tower
    tower.load_state_dict(model.tower.state_dict())
    return replace(model, item_XD=item_XD, tower=tower)


def replace_items(schema: Schema, num_items: int) -> Schema:
    first, *others = schema.tables
    return replace(schema, tables=(replace(first, rows=num_items + 1), *others))


def other_tower(model: SmallModel, seed: int = 9) -> SmallModel:
    schema = model.tower.schema
    return replace(model, tower=small_model("mol", len(model.item_XD), schema=schema, seed=seed).tower)


class Chain:
    """Exports of models, one after the other, in a folder: the first one, the others' deltas, and each one whole."""

    def __init__(self, folder: Path, *models: SmallModel, **options: Any) -> None:
        self.base, self.deltas = folder / "base", folder / "deltas"
        self.deltas.mkdir()
        self.wholes = [export_small(of, folder / f"whole-{n}", **options) for n, of in enumerate(models)]
        shutil.copytree(self.wholes[0], self.base)
        for number, whole in enumerate(self.wholes[1:], start=1):
            before = reader.read(self.wholes[number - 1])
            self.said = write_delta(before, whole, self.deltas / f"d{number}", number)

    def assert_whole(self, out: Path) -> None:
        fold(self.base, self.deltas, out)
        whole = self.wholes[-1]
        assert {file.name for file in out.iterdir()} == {file.name for file in whole.iterdir()}
        for file in whole.iterdir():
            assert file.read_bytes() == (out / file.name).read_bytes(), file.name


@pytest.mark.parametrize(
    ("options", "features"), [({}, False), ({}, True), ({"item_cache": False}, True), ({"precision": "int8"}, False)]
)
def test_base_and_deltas_are_the_whole_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], features: bool
) -> None:
    """Rows and new items, then the towers; with features the number of items stays."""
    monkeypatch.setattr(export_module, "SHARD_BYTES", 2**11)
    schema = every_feature(X) if features else None
    one = small_model("mol", X, schema=schema)
    two = touched(one, [3, X - 1], 0 if features else 9)
    made = Chain(tmp_path, one, two, other_tower(two), **options)
    assert made.said["computed"]
    made.assert_whole(tmp_path / "folded")


def test_items_may_go_and_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a dataset that was prepared anew: the rest of its rows is not in the delta."""
    monkeypatch.setattr(export_module, "SHARD_BYTES", 2**11)
    one = small_model("mol", X)
    base = export_small(one, tmp_path / "base")
    left = torch.randperm(X, generator=torch.Generator().manual_seed(0))[: X - 5]
    two = touched(replace(one, item_XD=one.item_XD[left]), [2])
    monkeypatch.setattr(small_models, "raw_ids", lambda count: [raw_ids(X)[item] for item in left.tolist()])
    whole = export_small(two, tmp_path / "whole")
    (tmp_path / "deltas").mkdir()
    write_delta(reader.read(base), whole, tmp_path / "deltas" / "1", 1)
    rows = load_file(tmp_path / "deltas" / "1" / ROWS)
    assert rows["items/table/changed"].tolist() == [2] and "items/raw_ids/values" not in rows
    fold(base, tmp_path / "deltas", tmp_path / "folded")
    for file in whole.iterdir():
        assert file.read_bytes() == (tmp_path / "folded" / file.name).read_bytes(), file.name


def test_a_text_that_a_delta_changes_is_found_at_its_new_place_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another item takes the index of one that is gone."""
    one = small_model("mol", X, schema=every_feature(X))
    base = export_small(one, tmp_path / "base")
    ids = raw_ids(X)
    renamed = ["renamed" if item == 5 else raw_id for item, raw_id in enumerate(ids)]
    monkeypatch.setattr(small_models, "raw_ids", lambda count: renamed)
    whole = export_small(one, tmp_path / "whole")
    (tmp_path / "deltas").mkdir()
    write_delta(reader.read(base), whole, tmp_path / "deltas" / "1", 1)
    contents, _ = with_deltas(reader.read(base), tmp_path / "deltas")
    assert contents.raw_ids.order is not None and sorted(contents.raw_ids.order.tolist()) == list(range(X))
    assert [contents.raw_ids.find(raw_id) for raw_id in (*renamed, ids[5])] == [*range(X), None]
    fold(base, tmp_path / "deltas", tmp_path / "folded")
    for file in whole.iterdir():
        assert file.read_bytes() == (tmp_path / "folded" / file.name).read_bytes(), file.name


def test_a_delta_is_as_large_as_what_changed(tmp_path: Path) -> None:
    def numbers(num_items: int, count: int) -> int:
        folder = tmp_path / f"{num_items} {count}"
        folder.mkdir()
        one = small_model("mol", num_items)
        Chain(folder, one, touched(one, list(range(7, 7 + count))))
        return sum(of.nbytes for of in load_file(folder / "deltas" / "d1" / ROWS).values())

    of_four, of_eight = numbers(100, 4), numbers(100, 8)
    assert of_eight == 2 * of_four and numbers(200, 4) == of_four


def test_another_model_or_none_is_no_delta(tmp_path: Path) -> None:
    one = export_small(small_model("mol", X), tmp_path / "one")
    before = reader.read(one)
    with pytest.raises(ValueError, match="does not differ from the earlier one: there is no"):
        write_delta(before, one, tmp_path / "delta", 1)
    other = export_small(small_model("dot", X), tmp_path / "other")
    with pytest.raises(ValueError, match="the model of the run is not that of the earlier export"):
        write_delta(before, other, tmp_path / "delta", 1)
    assert not (tmp_path / "delta").exists()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    one = small_model("mol", X)
    two = touched(one, [3], 1)
    return Chain(tmp_path_factory.mktemp("chain"), one, two, other_tower(two), touched(other_tower(two), [5], 2))


@pytest.fixture
def chain(three: Chain, tmp_path: Path) -> Chain:
    """A copy, to be changed."""
    copy = object.__new__(Chain)
    copy.base, copy.wholes = shutil.copytree(three.base, tmp_path / "base"), three.wholes
    copy.deltas = shutil.copytree(three.deltas, tmp_path / "deltas")
    return copy


def renumber(delta: Path, **fields: Any) -> None:
    DELTA.write(delta / DELTA_MANIFEST, DELTA.read(delta / DELTA_MANIFEST) | fields)


WITHOUT = f"d3 has no {DELTA_MANIFEST}; copy the whole delta, or remove it"


NOT_NEXT = "a delta between them is missing, or it is of another export"


def refusals() -> dict[str, tuple[Any, int, str]]:
    """What happens to three deltas, how many are still applied, and what is said."""

    def twice(folder: Path) -> None:
        shutil.copytree(folder / "d2", folder / "d2 again")

    def swapped(folder: Path) -> None:
        renumber(folder / "d2", number=3)
        renumber(folder / "d3", number=2)

    def damaged(folder: Path) -> None:
        rows = folder / "d3" / ROWS
        rows.write_bytes(rows.read_bytes()[:-1] + b"?")

    def changed(folder: Path) -> None:
        manifest = folder / "d2" / DELTA_MANIFEST
        manifest.write_text(manifest.read_text().replace('"number": 2', '"number": 7'))

    return {
        "missing": (
            lambda folder: shutil.rmtree(folder / "d2"),
            1,
            NOT_NEXT,
        ),
        "the first is missing": (
            lambda folder: shutil.rmtree(folder / "d1"),
            0,
            NOT_NEXT,
        ),
        "doubled": (twice, 1, "both have number 2; remove one of them"),
        "reordered": (swapped, 1, NOT_NEXT),
        "damaged": (damaged, 2, f"{ROWS} is damaged (its SHA-256 is not that in delta.json)"),
        "without its delta.json": (lambda folder: (folder / "d3" / DELTA_MANIFEST).unlink(), 2, WITHOUT),
        "edited": (changed, 1, f"{DELTA_MANIFEST} is damaged (its sha256 is not that of its content)"),
    }


@pytest.mark.parametrize("name", refusals())
def test_what_is_not_in_order_is_refused_and_the_rest_is_served(chain: Chain, tmp_path: Path, name: str) -> None:
    change, applied, said = refusals()[name]
    rows, manifest = ((chain.deltas / "d3" / file).read_bytes() for file in (ROWS, DELTA_MANIFEST))
    change(chain.deltas)
    lines: list[str] = []
    export = LiveExport(chain.base, lines.append, deltas=chain.deltas)
    assert export.retriever.delta == applied
    assert export.retriever.digest == reader.read(chain.wholes[applied]).digest
    assert said in export.refused and "\n" not in export.refused
    assert len(lines) == 1 and lines[0].startswith("not all deltas are applied: ") and said in lines[0]
    assert not export.refresh() and len(lines) == 1
    with pytest.raises(ValueError) as raised:
        fold(chain.base, chain.deltas, tmp_path / "out")
    assert said in str(raised.value) and not (tmp_path / "out").exists()
    if name in ("damaged", "without its delta.json"):
        (chain.deltas / "d3" / ROWS).write_bytes(rows)
        (chain.deltas / "d3" / DELTA_MANIFEST).write_bytes(manifest)
        until(export.refresh)
        assert (export.retriever.delta, export.refused) == (3, "")


def test_items_pass_through_the_last_of_several_towers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last delta is damaged; what the server has then is that of the one before."""
    one = small_model("mol", X)
    two = touched(one, [3], 1)
    made = Chain(tmp_path, one, other_tower(one, 8), two, other_tower(two), other_tower(two, 8))
    computed = [delta.read_delta(made.deltas / f"d{number}").computed for number in (1, 2, 3, 4)]
    assert computed == [True, True, True, True]
    calls: list[Any] = []
    items_of = delta.items_of
    monkeypatch.setattr(delta, "items_of", lambda *of: calls.append(of) or items_of(*of))
    for applied in (4, 3):
        calls.clear()
        live, whole = LiveExport(made.base, print, deltas=made.deltas).retriever, Retriever.load(made.wholes[applied])
        assert live.digest == whole.digest and len(calls) == 1
        found, wanted = live.retrieve([[3, 1], [X]], 9), whole.retrieve([[3, 1], [X]], 9)
        assert torch.equal(found.items, wanted.items) and torch.equal(found.scores, wanted.scores)
        (made.deltas / "d4" / ROWS).write_bytes(b"")


def test_deltas_go_on_where_an_export_has_the_first_ones(chain: Chain, tmp_path: Path) -> None:
    """A folded export takes the base's place; deltas that it has may stay or go."""
    kept = chain.deltas.rename(tmp_path / "kept")
    chain.deltas.mkdir()
    (kept / "d1").rename(chain.deltas / "d1")
    fold(chain.base, chain.deltas, chain.base, overwrite=True)
    (kept / "d2").rename(chain.deltas / "d2")
    assert [delta.number for delta in with_deltas(reader.read(chain.base), chain.deltas)[1]] == [2]
    shutil.rmtree(chain.deltas / "d1")
    contents, deltas = with_deltas(reader.read(chain.base), chain.deltas)
    assert [delta.number for delta in deltas] == [2] and contents.digest == reader.read(chain.wholes[2]).digest
    with pytest.raises(ValueError, match="exists already; give --overwrite"):
        fold(chain.base, chain.deltas, chain.base)


def test_what_a_killed_process_left_is_no_delta(chain: Chain) -> None:
    """A delta has its name once it is complete: whoever is killed before leaves hidden folders."""
    half = shutil.copytree(chain.deltas / "d2", chain.deltas / ".d4.0123abcd.part")
    renumber(half, number=4)
    (chain.deltas / "empty").mkdir()
    export = LiveExport(chain.base, print, deltas=chain.deltas)
    assert export.retriever.delta == 3 and not export.refused


def test_a_server_applies_deltas(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is said, and goes when it is mended."""
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.02)
    kept = chain.deltas.rename(tmp_path / "kept")
    chain.deltas.mkdir()
    body = {"history": ["id 7", "id 21", "id 35"], "k": 5}
    with running(chain.base, deltas=chain.deltas) as server:
        for number, name in ((1, "d1"), (1, "d3"), (3, "d2")):
            (kept / name).rename(chain.deltas / name)
            until(lambda number=number: server.metric("logitmix_export_delta") == number)
            until(lambda name=name: server.metric("logitmix_deltas_refused") == (name == "d3"))
            health = server.ask(b"", "GET", "/healthz")[1]
            assert health["digest"] == reader.read(chain.wholes[number]).digest
            assert (health["refused"] is None) == (name != "d3")
            assert_alike(server.ask(body)[1]["items"], Retriever.load(chain.wholes[number]).rows(body["history"], 5))
        assert [line.partition(":")[0] for line in server.said] == [
            "delta 1 is applied",
            "not all deltas are applied",
            "delta 3 is applied",
        ]


def test_the_command_folds(
    chain: Chain, tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Callable[..., str]
) -> None:
    cli.main(["fold", str(chain.base), "--deltas", str(chain.deltas), "--out", str(tmp_path / "out"), "--json"])
    assert json.loads(capsys.readouterr().out)["sha256"] == reader.read(chain.wholes[3]).digest
    said = refusal("fold", str(chain.base), "--deltas", str(tmp_path), "--out", str(tmp_path / "other"))
    assert f"no delta in {tmp_path} is to be applied to {chain.base}" in said
