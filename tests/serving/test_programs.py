"""The query tower, the item tower and the cascade as programs, which run where logitmix is not installed."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from sampling import one_of_each
from small_data import WEIGHTED, catalog_of
from small_models import LENGTH, BruteForce, SmallModel, export_small, random_histories, small_model
from torch import Tensor

from logitmix.modules.batch import Packing
from logitmix.modules.config import (
    EncoderConfig,
    FuXiConfig,
    HSTUConfig,
    LiGRConfig,
    PooledConfig,
    SASRecConfig,
    sees_times,
)
from logitmix.modules.features import Embedded, Features
from logitmix.modules.schema import ITEM, RECENCY, RECENCY_FEATURE, Feature, Schema, Table
from logitmix.modules.towers import Sides
from logitmix.modules.values import Values
from logitmix.serving import programs as loaded_programs
from logitmix.serving.directory.reader import read_manifest
from logitmix.serving.model import Precision, named
from logitmix.serving.programs import load_program
from logitmix.serving.request import Options
from logitmix.serving.retriever import Retriever
from logitmix.serving.stored_table import StoredTable
from logitmix.trainer.export.programs import CascadeProgram, ItemProgram, QueryProgram
from logitmix.trainer.export.update import update_items

ROOT = Path(__file__).resolve().parents[2]
X = 30
EVERY_KIND = replace(
    WEIGHTED,
    features=(*WEIGHTED.features, RECENCY_FEATURE),
    tables=(Table(ITEM, X + 1), *WEIGHTED.tables[1:], Table(RECENCY, 66)),
)
TORCH_ALONE = """
import sys
import torch
from safetensors.torch import load_file, save_file
for path, given, found in zip(*[iter(sys.argv[1:])] * 3):
    aoti = path.endswith(".aoti.pt2")
    program = torch._inductor.aoti_load_package(path) if aoti else torch.export.load(path).module()
    save_file({name: of.contiguous() for name, of in program(**load_file(given)).items()}, found)
assert not [name for name in sys.modules if name.partition(".")[0] == "logitmix"]
"""
ONNX_ALONE = """
import sys
import onnxruntime
from safetensors.numpy import load_file, save_file
for path, given, found in zip(*[iter(sys.argv[1:])] * 3):
    session = onnxruntime.InferenceSession(path)
    names = [of.name for of in session.get_outputs()]
    save_file(dict(zip(names, session.run(None, load_file(given)), strict=True)), found)
assert not [name for name in sys.modules if name.partition(".")[0] in ("logitmix", "torch")]
"""


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def tables_of(model: SmallModel) -> dict[str, StoredTable]:
    """In several parts, as in an export."""
    return {name: StoredTable([table[:2], table[2:]]) for name, table in model.others.items()}


def given_to(feature: Feature, schema: Schema, rows: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Random values as a program takes them, by its inputs."""
    name = f"{feature.owner}_{feature.name}"
    match feature.kind:
        case "id":
            return {name: torch.randint(schema.table(feature.table).rows, rows, generator=generator)}
        case "ids" | "weighted_ids":
            ids = torch.randint(schema.table(feature.table).rows, (*rows, 3), generator=generator)
            absent = torch.arange(3) >= torch.randint(4, (*rows, 1), generator=generator)
            weights = torch.randint(3, ids.shape, generator=generator).float().masked_fill(absent, 0)
            beside = {f"{name}_weights": weights} if feature.form.parallel else {}
            return {name: ids.masked_fill(absent, -1), **beside}
        case "number":
            return {name: torch.randn(rows, generator=generator)}
        case "date":
            return {name: 10_000 + 5_000 * torch.randn(rows, generator=generator)}
        case _:
            return {name: torch.randn(*rows, feature.width, generator=generator)}


def packed(feature: Feature, given: Mapping[str, Tensor]) -> Values:
    """The values of a feature as the towers take them in training."""
    value, *beside = given.values()
    if not feature.form.bag:
        return Values(value)
    there = value >= 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), there.sum(1).cumsum(0)])
    return Values(value[there], offsets, dict(zip(feature.form.parallel, (of[there] for of in beside), strict=True)))


def histories_for(model: SmallModel, lengths: list[int], longest: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The query tower's inputs, and what the trained one makes of the same histories, packed."""
    generator, schema, tower = torch.Generator().manual_seed(len(lengths)), model.tower.schema, model.tower
    B, lengths_B = len(lengths), torch.tensor(lengths)
    valid_BL = torch.arange(longest) < lengths_B[:, None]
    vectors_BLD = torch.randn(B, longest, 16, generator=generator) * valid_BL[:, :, None]
    given, values = {"vectors": vectors_BLD, "lengths": lengths_B}, {}
    for feature in schema.of("user"):
        of = given_to(feature, schema, (B,), generator)
        values[feature.name] = packed(feature, of)
        given |= of
    for feature in schema.of("event"):
        of = given_to(feature, schema, (B, longest), generator)
        values[feature.name] = packed(feature, {name: each[valid_BL] for name, each in of.items()})
        for each in of.values():
            each[~valid_BL] = 0 if each.is_floating_point() else -1
        given |= of
    packing = Packing(lengths_B)
    if sees_times(model.config.encoder, model.tower.schema):
        gaps = 2 ** torch.randint(30, (B, longest + 1), generator=generator)
        given["times"], given["time"] = times_BL, time_B = (gaps.cumsum(1)[:, :-1], gaps.sum(1))
        asked_BL = torch.cat([times_BL[:, 1:], time_B[:, None]], dim=1)
        asked_BL[torch.arange(B), lengths_B - 1] = time_B
        packing = Packing(lengths_B, 0, times_BL[valid_BL], asked_BL[valid_BL])
        given["times"] = times_BL.masked_fill(~valid_BL, 0)
    query = tower.queries(vectors_BLD[valid_BL], packing, model.others, Features(values=values))
    return given, sides_of("query", tower.query_sides(query))


def items_for(model: SmallModel, count: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The item tower's inputs, and what the trained one makes of the same items."""
    generator, schema, tower = torch.Generator().manual_seed(count), model.tower.schema, model.tower
    given, values = {"own_row": torch.randn(count, 16, generator=generator)}, {}
    for feature in schema.of("item"):
        of = given_to(feature, schema, (count,), generator)
        values[feature.name] = packed(feature, of)
        given |= of
    item = tower.item_tower({**model.others, ITEM: given["own_row"]}, Features(values=values))
    return given, {"item_vector": item.vector_RD} | sides_of("item", tower.item_sides(item))


def sides_of(owner: str, sides: Sides) -> dict[str, Tensor]:
    return {f"{owner}_{name.replace('.', '_')}": part for name, part in named(sides).items()}


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, of in expected.items():
        assert found[name].shape == of.shape and found[name].dtype == of.dtype
        assert float((found[name] - of).abs().max()) <= 1e-5 * float(of.abs().max()), name


SHAPES = (([1], 1), ([3, 1, 2], 3), ([LENGTH, 2, 1, LENGTH, 5], LENGTH), ([2, 1], 6))
"""Lengths, and the longest: of one history of one item, and of histories that are all shorter than the rows."""


SASREC = SASRecConfig(blocks=1, heads=2, max_length=LENGTH)
POOLED = PooledConfig(hidden=8, max_length=LENGTH)
WITH_TIMES = "mol", HSTUConfig(blocks=1, max_length=LENGTH, times=True)
TOWERS = [
    ("mol", SASREC),
    ("dot", POOLED),
    ("dot", HSTUConfig(blocks=2, max_length=LENGTH)),
    WITH_TIMES,
    ("dot", FuXiConfig(blocks=1, max_length=LENGTH, times=True)),
    ("dot", LiGRConfig(blocks=2, heads=2, max_length=LENGTH)),
    *((of, POOLED) for of in ("mlp", "neumf", "mol, linear", "mol, no hidden", "mol, joint", "deepfm")),
]
SAMPLE = [("dot", POOLED), EVERY_KIND], *((of, None) for of in (*TOWERS[:1], *TOWERS[2:7], TOWERS[-1]))


@pytest.mark.parametrize(
    ("of", "schema"),
    [
        pytest.param(of, schema, marks=[] if (of, schema) in SAMPLE else [pytest.mark.slow])
        for of, schema in product(TOWERS, [None, EVERY_KIND])
    ],
)
def test_the_exported_towers_are_the_trained_ones(of: tuple[str, EncoderConfig], schema: Schema | None) -> None:
    model = small_model(of[0], X, schema=schema, encoder=of[1])
    query = QueryProgram(model.tower, tables_of(model)).export().module()
    item = ItemProgram(model.tower, tables_of(model)).export().module()
    for lengths, longest in SHAPES:
        given, expected = histories_for(model, lengths, longest)
        assert_close(query(**given), expected)
        given, expected = items_for(model, len(lengths))
        assert_close(item(**given), expected)


def asked_of(model: SmallModel, histories: list[list[int]]) -> dict[str, Tensor]:
    """The cascade's inputs, from the trained tower."""
    tower, seen = model.tower, [history[-LENGTH:] for history in histories]
    packing = Packing(torch.tensor([len(history) for history in seen]))
    query = tower.queries(model.item_XD[[item for history in seen for item in history]], packing)
    longest = max(map(len, histories))
    excluded = torch.tensor([of + [-1] * (longest - len(of)) for of in histories])
    items = sides_of("item", tower.item_sides(Embedded(model.item_XD)))
    return sides_of("query", tower.query_sides(query)) | items | {"excluded": excluded}


def scores_of(model: SmallModel, given: Mapping[str, Tensor]) -> BruteForce:
    """Of all items, by the trained modules from the cascade's inputs."""

    def score(stage: str) -> Tensor:
        query, item = (
            tuple(part for name, part in given.items() if name.startswith(f"{owner}_{stage}"))
            for owner in ("query", "item")
        )
        score_BX: Tensor = getattr(model.tower, stage).all_pairs(query, item)
        for row, items in enumerate(given["excluded"].tolist()):
            score_BX[row, [item for item in items if item >= 0]] = -torch.inf
        return score_BX

    return BruteForce(score("similarity"), score("hindexer") if model.tower.hindexer else None)


def assert_ranked(found: Mapping[str, Tensor], score_BX: Tensor) -> None:
    """By the trained modules' scores, with -1 where no item is left."""
    score_BK, item_BK = score_BX.topk(found["items"].shape[1])
    assert torch.equal(found["items"], item_BK.masked_fill(score_BK == -torch.inf, -1))
    # A score that is nearly zero is a sum of terms that are not.
    largest = float(score_BK[score_BK.isfinite()].abs().max())
    torch.testing.assert_close(found["scores"], score_BK, rtol=1e-5, atol=1e-5 * largest)


KINDS = ["mol", "dot", "mlp", "neumf", "deepfm"]


@pytest.mark.parametrize(("kind", "stage1"), one_of_each(product(KINDS, [12, X, None]), itemgetter(0), itemgetter(1)))
def test_the_exported_cascade_ranks_as_the_trained_model(kind: str, stage1: int | None) -> None:
    """Without an h-indexer for None. It was exported for fewer items, and for one query only 5 items are left."""
    model = small_model(kind, X, hindexer=stage1 is not None)
    query, item = QueryProgram(model.tower, {}), ItemProgram(model.tower, {})
    cascade = CascadeProgram(query, item, 20, 10, stage1 or X)
    assert CascadeProgram(query, item, X, X, 12).k == (X if stage1 is None else 12)
    assert cascade.two_stages == (stage1 == 12)
    program = cascade.export().module()
    for histories in ([*random_histories(X, [3, 1]), list(range(25))], random_histories(X, [2])):
        given = asked_of(model, histories)
        found, expected = program(**given), scores_of(model, given)
        assert_ranked(found, expected.of(12 if cascade.two_stages else None))
        assert int((found["items"] == -1).sum()) == (5 if len(histories) == 3 else 0)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_files_hold_the_items_for_the_cascade(tmp_path: Path, precision: Precision) -> None:
    """By the lines of docs/export.md."""
    model = small_model("mol", X)
    served = export_small(model, tmp_path / "served", precision=precision)
    (lines,) = re.findall(r"```python\n(files = .*?)```", (ROOT / "docs" / "export.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(
        "import glob, json, torch, safetensors.torch\nfrom pathlib import Path\n" + lines.replace('"DIR', f'"{served}'),
        names,
    )
    expected = sides_of("item", model.tower.item_sides(Embedded(model.item_XD)))
    if precision == "fp32":
        assert_close(names["items"], expected)
    for name, of in expected.items():
        torch.testing.assert_close(names["items"][name], of, rtol=2e-2, atol=2e-2)


def in_a_clean_process(
    script: str, programs: list[tuple[Path, Mapping[str, Tensor]]], folder: Path
) -> list[dict[str, Tensor]]:
    """The outputs of programs, each of inputs, that run without logitmix."""
    words, outputs = [], []
    for number, (program, given) in enumerate(programs):
        save_file({name: of.contiguous() for name, of in given.items()}, folder / f"given {number}")
        outputs.append(folder / f"found {number}")
        words += [program, folder / f"given {number}", outputs[-1]]
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, *map(str, words)], check=True)
    return [load_file(of) for of in outputs]


@pytest.mark.parametrize(
    ("kind", "encoder", "schema"),
    [
        ("mol", SASREC, None),
        pytest.param("dot", HSTUConfig(blocks=1, max_length=LENGTH), None, marks=pytest.mark.slow),
        pytest.param("dot", POOLED, EVERY_KIND, marks=pytest.mark.slow),
        pytest.param("mol", SASREC, EVERY_KIND, marks=pytest.mark.slow),
    ],
    ids=["ids", "hstu", "features", "mol, features"],
)
def test_onnxruntime_alone_runs_the_query_tower(
    kind: str, encoder: EncoderConfig, schema: Schema | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without logitmix and torch; it is made without a word of torch to its developers."""
    model = small_model(kind, X, schema=schema, encoder=encoder)
    served = export_small(model, tmp_path / "served", extras=["onnx"])
    assert not caplog.records
    onnx.checker.check_model(served / "query_tower.onnx", full_check=True)
    given, expected = zip(*(histories_for(model, *shape) for shape in SHAPES), strict=True)
    programs = [(served / "query_tower.onnx", of) for of in given]
    for found, of in zip(in_a_clean_process(ONNX_ALONE, programs, tmp_path), expected, strict=True):
        assert_close(found, of)


def compile_nothing(exported: object, package_path: BytesIO) -> None:
    package_path.write(b"native code")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTInductor takes minutes: here it writes a few bytes."""
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_nothing)


def test_torch_alone_runs_the_programs(original: Path, tmp_path: Path) -> None:
    assert_programs_run(small_model("dot", X, encoder=POOLED), original, "", tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_torch_alone_runs_those_with_times_and_features_of_every_kind(tmp_path: Path) -> None:
    model = small_model(WITH_TIMES[0], X, schema=EVERY_KIND, encoder=WITH_TIMES[1])
    assert_programs_run(model, export_small(model, tmp_path / "served", extras=["programs"]), "", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage1", [12, X])
def test_torch_alone_runs_what_the_compiler_made(tmp_path: Path, stage1: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Options, "kept", lambda *_: stage1)
    model = small_model("mol", X, schema=EVERY_KIND)
    served = export_small(model, tmp_path / "served", extras=["programs"])
    for kind in ("", ".aoti"):
        assert_programs_run(model, served, kind, tmp_path, stage1)


def assert_programs_run(model: SmallModel, served: Path, kind: str, folder: Path, stage1: int = X) -> None:
    histories, queries = histories_for(model, *SHAPES[2])
    rows, items = items_for(model, X)
    sides = {name: of for name, of in items.items() if name != "item_vector"}
    given = queries | sides | {"excluded": torch.full((len(SHAPES[2][0]), 1), -1)}
    of = {"query_tower": histories, "item_tower": rows, "cascade": given}
    programs = [(served / "programs" / f"{name}{kind}.pt2", inputs) for name, inputs in of.items()]
    found = in_a_clean_process(TORCH_ALONE, programs, folder)
    assert_close(found[0], queries)
    assert_close(found[1], items)
    assert_ranked(found[2], scores_of(model, given).two_stages(stage1))
    # In this process, if trusted, and of a tensor that is not contiguous.
    program = load_program(served, f"query_tower{kind}", trust=True)
    for shape in SHAPES:
        given, expected = histories_for(model, *shape)
        given["vectors"] = given["vectors"].transpose(0, 1).contiguous().transpose(0, 1)
        assert_close(program(**given), expected)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "aoti_compile_and_package", compile_nothing)
        folder = tmp_path_factory.mktemp("export")
        return export_small(small_model("dot", X, encoder=POOLED), folder / "served", extras=["programs", "onnx"])


@pytest.fixture
def served(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "served"))


def _remove(file: Path) -> None:
    file.unlink()


def _change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "trust", "change", "said"),
    [
        ("item_tower", False, None, "item_tower is native code or unpickled, so to load it is to run what its author"),
        ("item_tower.aoti", False, None, "item_tower.aoti is native code or unpickled, so to load it is to run what"),
        ("item_tower", True, _change, r"programs/item_tower\.pt2 is damaged \(its SHA-256 is not that in manifest"),
        ("cascade.aoti", True, _change, r"programs/cascade\.aoti\.pt2 is damaged \(its SHA-256 is not"),
        ("item_tower", True, _remove, r"programs/item_tower\.pt2 is missing"),
        (
            "tower",
            True,
            None,
            r"served has no programs/tower\.pt2; extras that are there: programs/cascade\.aoti\.pt2, ",
        ),
        ("../tower", True, None, r"served has no programs/\.\./tower\.pt2; extras that are there: "),
    ],
)
def test_what_is_not_trusted_or_not_whole_is_not_loaded(
    served: Path,
    name: str,
    trust: bool,
    change: Callable[[Path], None] | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if change:
        change(served / "programs" / f"{name}.pt2")
    monkeypatch.setattr(torch.export, "load", lambda file: pytest.fail("it was loaded"))
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda file: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match=said) as caught:
        load_program(served, name, trust)
    assert "\n" not in str(caught.value)


def test_what_was_compiled_for_another_processor_is_not_loaded(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There it would end the process."""
    here = dict(loaded_programs.capabilities())
    needed = read_manifest(served)["files"]["programs/cascade.aoti.pt2"]["cpu"]
    assert needed[0] == here["architecture"] and all(here[name] is True for name in needed[1:])
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda file: pytest.fail("it was loaded"))
    monkeypatch.setattr(loaded_programs, "capabilities", lambda: here | {"architecture": "riscv"})
    with pytest.raises(ValueError, match=rf"cascade\.aoti\.pt2 was compiled for {needed[0]}, and this is riscv"):
        load_program(served, "cascade.aoti", trust=True)
    if needed[1:]:
        monkeypatch.setattr(loaded_programs, "capabilities", lambda: here | {needed[-1]: False})
        with pytest.raises(ValueError, match=f"for a processor with {needed[-1]}, which this one has not"):
            load_program(served, "cascade.aoti", trust=True)


def test_the_retriever_reads_no_program(served: Path) -> None:
    for file in (*(served / "programs").iterdir(), served / "query_tower.onnx"):
        file.unlink()
        os.mkfifo(file)  # whoever reads it waits forever
    assert Retriever.load(served).retrieve([[1, 2]], 3).items.shape == (1, 3)


def test_added_items_leave_the_programs(served: Path, tmp_path: Path) -> None:
    """They hold no item."""
    before = read_manifest(served)["files"]
    update_items(served, catalog_of(tmp_path, "item\nnew-1\nnew-2\n"))
    after = read_manifest(served)["files"]
    names = [name for name in before if name.startswith("programs/") or name == "query_tower.onnx"]
    assert len(names) == 7 and all(before[name] == after[name] for name in names)
    assert load_program(served, "item_tower", trust=True)(own_row=torch.ones(3, 16))["item_vector"].shape == (3, 16)
    shard = load_file(served / "items-00001-of-00002.safetensors")
    assert len(shard["table"]) == 2
