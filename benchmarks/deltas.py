"""From a trained model to answers: a delta of an export compared with the whole export, in bytes and in time.

    python -m benchmarks.deltas [--items 100000] [--changed 100,1000,10000]

The model is MoL of 8 x 8 components of width 32 over vectors of width 64, with an h-indexer, at random weights. Of a
second one, some rows of the item table are others, and where the towers are new, all weights of the towers. `export` is
what the whole export of the second one takes; `delta` comes on top of that: it is compared with the first one, and
applied once. `apply` is from a delta in the folder that a server watches to the first answer with it, and `reload` the
same for the whole export; a server looks every second. Times are CPU seconds of the process. That the answers are those
of the whole export is checked, bit for bit.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import tyro

from benchmarks.measure import cpu_seconds, machine, print_table
from logitmix.comm.process_group import process_group
from logitmix.common.files import publish
from logitmix.modules.config import HIndexerConfig, ModelConfig, MoLConfig, SASRecConfig
from logitmix.modules.schema import Schema
from logitmix.modules.towers import Tower
from logitmix.serving.directory import reader
from logitmix.serving.directory.format import About, Source
from logitmix.serving.live import LiveExport
from logitmix.serving.retriever import Retriever
from logitmix.trainer.config import Config
from logitmix.trainer.export.delta import write_delta
from logitmix.trainer.export.export import DatasetItems, export_model
from logitmix.trainer.run.checkpoint import SavedModel

MODEL = ModelConfig(
    dim=64,
    encoder=SASRecConfig(blocks=2, max_length=50),
    similarity=MoLConfig(query_components=8, item_components=8, component_dim=32),
    hindexer=HIndexerConfig(dim=64, weight=0.2),
)
HISTORIES, K = [[3, 1, 4, 1, 5], [9, 2, 6]], 20


@dataclass(frozen=True)
class Options:
    items: int = 100_000
    changed: str = "100,1000,10000"
    """Rows of the item table that differ."""
    seed: int = 0


def main(options: Options) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for cached in (True, False):
            for new_towers in (False, True):
                for changed in map(int, options.changed.split(",")):
                    folder = Path(scratch, "now")
                    rows.append(_measured(folder, options, changed, new_towers, cached))
                    shutil.rmtree(folder)
    cells = ([f"{of:,.2f}" if isinstance(of, float) else of for of in row.values()] for row in rows)
    print_table(rows[0], cells, f"{options.items:,} items; {machine()}", 140)


def _measured(folder: Path, options: Options, changed: int, new_towers: bool, cached: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(options.seed)
    item_XD = torch.randn(options.items + 1, MODEL.dim, generator=generator)
    other_XD = item_XD.clone()
    other_XD[torch.randperm(options.items, generator=generator)[:changed]] += 0.01
    base, whole, deltas = folder / "base", folder / "whole", folder / "deltas"
    deltas.mkdir(parents=True)
    _export(base, _model(item_XD, options.seed), cached)
    seconds: dict[str, float] = {}
    seconds["export"] = cpu_seconds(lambda: _export(whole, _model(other_XD, options.seed + new_towers), cached))
    before = reader.read(base)
    made: list[dict[str, Any]] = []
    seconds["delta"] = cpu_seconds(lambda: made.append(write_delta(before, whole, folder / "made", 1)))
    live = LiveExport(base, lambda line: None, deltas=deltas)
    publish(folder / "made", deltas / "1")
    found = []

    def answered() -> None:
        assert live.refresh()
        found.append(live.retriever.retrieve(HISTORIES, K))

    seconds["apply"] = cpu_seconds(answered)
    expected = Retriever.load(whole).retrieve(HISTORIES, K)
    assert torch.equal(found[0].items, expected.items) and torch.equal(found[0].scores, expected.scores)
    replaced = LiveExport(base, lambda line: None)
    publish(whole, base)

    def reloaded() -> None:
        assert replaced.refresh()
        replaced.retriever.retrieve(HISTORIES, K)

    seconds["reload"] = cpu_seconds(reloaded)
    all_files = made[0]["files"], made[0]["manifest"]["files"]
    of_delta, of_whole = (sum(of["bytes"] for of in files.values()) / 1e6 for files in all_files)
    return {
        "item cache": "yes" if cached else "no",
        "towers": "new" if new_towers else "same",
        "changed": changed,
        "delta MB": of_delta,
        "export MB": of_whole,
        **{f"{name} s": of for name, of in seconds.items()},
    }


def _model(item_XD: torch.Tensor, seed: int) -> SavedModel:
    tower = Tower(MODEL, Schema.of_ids(len(item_XD) - 1))
    tower.reset_parameters(torch.Generator().manual_seed(seed))
    return SavedModel(Config(model=MODEL), 1, tower.eval(), lambda table, start, stop: item_XD[start:stop])


def _export(out: Path, model: SavedModel, cached: bool) -> None:
    ids = pa.chunked_array([[f"item {index}" for index in range(model.num_items)]])
    about = About(MODEL, Source("run", model.step, "made"), model.num_items, True, model.tower.schema, cached)
    with process_group("cpu", 60) as ranks:
        export_model(model, about, DatasetItems(lambda: ids, lambda: None), out, False, ranks)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
