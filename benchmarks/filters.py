"""What a condition on a column costs a request, and whether its answer is that of brute force.

    python -m benchmarks.filters [--items 1000000] [--kept 1000,100000] [--requests 10]

MoL of 4 x 4 components of width 16 and an h-indexer of width 32, untrained, over random items, with a column of which a
condition lets a share of the items through, at random. The times are CPU milliseconds of a request on one thread, in
turn with those of the same request without a condition: medians of the requests, with a condition that was seen before.
`first` is what the condition costs when it is new. Recall is the least share, of three requests, of brute force's best
10 items that are among the answer's: all INT8 products of the items that are allowed, their k' best, and the similarity
of these.
"""

import statistics
from dataclasses import dataclass
from functools import partial

import torch
import tyro
from rich.console import Console
from rich.progress import track

from benchmarks.measure import cpu_seconds, machine, print_table
from logitmix.modules.config import HIndexerConfig, ModelConfig, MoLConfig
from logitmix.modules.schema import ITEM, Schema
from logitmix.modules.towers import Tower
from logitmix.serving.columns import Column, ordered
from logitmix.serving.directory.format import About, Contents, Source
from logitmix.serving.items import ItemInputs, items_of
from logitmix.serving.model import estimated
from logitmix.serving.request import Options as Asked
from logitmix.serving.request import Question, Request
from logitmix.serving.retriever import Retriever
from logitmix.serving.stored_table import StoredTable
from logitmix.serving.texts import Texts

SHARES = (0.0001, 0.001, 0.01, 0.1, 0.5, 1.0)
SAMPLE, HISTORY, K = 2**13, 20, 10
RECALLED = 3
"""Requests of which the recall is measured."""


@dataclass(frozen=True)
class Options:
    items: int = 1_000_000
    kept: str = "1000,100000"
    """k', separated by commas."""
    requests: int = 10


@torch.inference_mode()
def random_export(X: int) -> Retriever:
    generator = torch.Generator().manual_seed(0)
    mol = MoLConfig(query_components=4, item_components=4, component_dim=16)
    config = ModelConfig(dim=64, similarity=mol, hindexer=HIndexerConfig(dim=32, weight=0.1))
    tower = Tower(config, Schema.of_ids(X)).eval()
    tower.reset_parameters(generator)
    inputs = ItemInputs(torch.randn(X, config.dim, generator=generator), {})
    tables = {ITEM: StoredTable([torch.zeros(1, config.dim)])}
    precision, scales = estimated(tower, "fp32", inputs.take(torch.arange(min(X, SAMPLE))).embed(tower, tables))
    shard = items_of(tower, inputs, tables, precision, True, scales)
    place = Column("number", torch.randperm(X, generator=generator).double())
    about = About(config, Source("random", 0, "random"), X, True, tower.schema, filterable={"place": "number"})
    ids = ordered(Texts.of([str(item) for item in range(X)]))
    return Retriever(Contents(about, tower.state_dict(), tables, {}, [shard], ids, None, {"place": place}))


def main(options: Options) -> None:
    torch.set_num_threads(1)
    retriever, X = random_export(options.items), options.items
    random = torch.Generator().manual_seed(1)
    histories = torch.randint(X, (options.requests, HISTORY), generator=random).tolist()
    rows = []
    shares = [share for share in SHARES if round(share * X)]
    for share in track(shares, "measuring", console=Console(stderr=True)):
        where = f"place < {round(share * X)}"
        row = {"share": share, "first": 1000 * cpu_seconds(partial(retriever.filters.allowed, where))}
        for kept in map(int, options.kept.split(",")):
            answers = Asked(K, stage1=kept)
            times: dict[str, list[float]] = {"filtered": [], "unfiltered": []}
            recalls = []
            for history in [histories[0], *histories]:
                plain: Request = {"history": [str(item) for item in history]}
                of = {"filtered": {**plain, "where": where}, "unfiltered": plain}
                for name, request in of.items():
                    times[name].append(1000 * cpu_seconds(partial(retriever.answer, [Question(request, answers)])))
            for history in histories[:RECALLED]:
                asked: Request = {"history": [str(item) for item in history], "where": where}
                found = {int(row["id"]) for row in retriever.answer([Question(asked, answers)])[0]["items"]}
                expected = brute_force(retriever, history, where, kept)
                recalls.append(len(found & expected) / len(expected))
            # The first does not count.
            filtered, unfiltered = (statistics.median(of[1:]) for of in times.values())
            row |= {f"{kept} ms": filtered, f"{kept} ratio": filtered / unfiltered, f"{kept} recall": min(recalls)}
        rows.append(row)
    cells = ([f"{row['share']:.2%}", *(f"{value:.2f}" for value in [*row.values()][1:])] for row in rows)
    print_table(rows[0], cells, f"{X:,} items; {machine()}")


@torch.inference_mode()
def brute_force(retriever: Retriever, history: list[int], where: str, kept: int) -> set[int]:
    """In plain torch."""
    asked = retriever._reader.read({"history": [str(item) for item in history]}, 0, "refuse")
    query, ((_, corpus),) = retriever._encoder.queries([asked]), retriever._ranker.corpora
    assert query.hindexer is not None
    out = torch.from_numpy(~retriever.filters.allowed(where).mask)
    out[history] = True
    (query_H,) = query.hindexer[0]
    values_H = (query_H / (query_H.abs().max() / 127)).round()
    score_X = corpus.values(0, corpus.num_items)[:, : len(query_H)] @ values_H
    order = score_X.masked_fill(out, -torch.inf).sort(descending=True, stable=True).indices
    candidates = order[: min(kept, int((~out).sum()))].sort().values
    (score_K,) = retriever._ranker.items.scores(query.similarity, candidates[None])
    return set(candidates[score_K.topk(min(K, len(candidates))).indices].tolist())


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
