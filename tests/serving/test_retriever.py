import ctypes
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import ranked_rows
from hypothesis import given
from hypothesis import strategies as st
from sampling import one_of_each
from small_models import (
    LENGTH,
    SmallModel,
    brute_force,
    every_feature,
    export_small,
    in_order,
    random_histories,
    raw_ids,
    small_model,
)
from torch import Tensor

from logitmix.modules.config import HSTUConfig
from logitmix.modules.schema import (
    ITEM_FEATURE,
    RECENCY,
    RECENCY_FEATURE,
    RECENCY_VALUES,
    Schema,
    Table,
)
from logitmix.modules.similarity.base import NUMBERS
from logitmix.serving import items as items_module
from logitmix.serving import mapped, ranking, request_file, topk
from logitmix.serving.directory.reader import read
from logitmix.serving.model import Precision
from logitmix.serving.request import Options, Request
from logitmix.serving.retriever import Retrieved, Retriever
from logitmix.serving.topk import NOTHING, best_keys, merge, rank_keys, split_keys
from logitmix.trainer.export import export as export_module

X = 300
KINDS = ("dot", "mlp", "neumf", "deepfm", "mol")
LENGTHS = [1, 2, LENGTH - 1, LENGTH, LENGTH + 1, 40, *[3, 5] * 20]
"""More histories than are ranked at once, some longer than the model sees."""


def load(model: SmallModel, folder: Path) -> Retriever:
    return Retriever.load(export_small(model, folder / "served"))


def assert_is_top(found: Retrieved, score_BX: Tensor, k: int) -> None:
    """The k best of the scores; neighbors within rounding may change places."""
    expected = score_BX.topk(min(k, score_BX.shape[1])).values
    torch.testing.assert_close(found.scores[:, : expected.shape[1]], expected, rtol=1e-5, atol=1e-5)
    for row, (items, scores) in enumerate(zip(found.items, found.scores, strict=True)):
        real = items[items >= 0]
        assert len(set(real.tolist())) == len(real) == min(k, int(score_BX[row].isfinite().sum()))
        torch.testing.assert_close(score_BX[row, real], scores[items >= 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "hindexer", "exclude_history"),
    one_of_each(
        product([*KINDS, "mol, linear", "mol, no hidden", "mol, joint"], [True, False], [True, False]),
        *map(itemgetter, range(3)),
    ),
)
def test_top_k_is_the_trained_models(tmp_path: Path, kind: str, hindexer: bool, exclude_history: bool) -> None:
    model = small_model(kind, X, hindexer)
    histories = random_histories(X, LENGTHS)
    found = load(model, tmp_path).retrieve(histories, 10, exclude_history)
    assert found.items.shape == found.scores.shape == (len(LENGTHS), 10)
    assert_is_top(found, brute_force(model, histories, exclude_history).similarity_BX, 10)


@pytest.mark.parametrize(
    ("kind", "numbers"), one_of_each(product(KINDS, [1, 100, 10_000]), itemgetter(0), itemgetter(1))
)
def test_chunks_do_not_change_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, numbers: int
) -> None:
    model = small_model(kind, X)
    histories = random_histories(X, [3, 9])
    monkeypatch.setitem(NUMBERS, "cpu", numbers)
    retriever, scores = load(model, tmp_path), brute_force(model, histories)
    assert_is_top(retriever.retrieve(histories, 10), scores.similarity_BX, 10)
    assert_is_top(retriever.retrieve(histories, 10, stage1=40), scores.two_stages(40), 10)


@pytest.mark.parametrize(("kind", "stage1"), one_of_each(product(KINDS, [10, 40, X - 1]), itemgetter(0), itemgetter(1)))
def test_stage_1_gives_the_similarity_its_candidates(tmp_path: Path, kind: str, stage1: int) -> None:
    model = small_model(kind, X)
    histories = random_histories(X, LENGTHS)
    found = load(model, tmp_path).retrieve(histories, 10, stage1=stage1)
    assert_is_top(found, brute_force(model, histories).two_stages(stage1), 10)


def test_a_query_is_asked_at_its_time_and_each_earlier_one_at_the_next_action(tmp_path: Path) -> None:
    model = small_model("dot", X, encoder=HSTUConfig(blocks=2, heads=2, max_length=LENGTH, times=True))
    retriever, histories = load(model, tmp_path), random_histories(X, [1, 3, LENGTH + 2])
    acted = [[10 * (1 + at) ** 3 for at in range(len(history))] for history in histories]
    for later in (0, 7, 40_000):
        asked = [[*times[1:], times[-1] + later] for times in acted]
        requests: list[Request] = [
            {"history": [retriever.raw_ids[item] for item in history], "timestamps": times, "time": times[-1] + later}
            for history, times in zip(histories, acted, strict=True)
        ]
        rows = ranked_rows(retriever.recommend(requests, 10))
        found = [[(retriever.raw_ids.find(row["id"]), row["score"]) for row in of_request] for of_request in rows]
        best = brute_force(model, histories, times=(acted, asked)).similarity_BX.topk(10)
        assert [[item for item, _ in of_request] for of_request in found] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([[score for _, score in of] for of in found]), best.values)


def test_a_recency_that_an_event_states_counts_before_that_of_its_timestamps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(RECENCY, len(RECENCY_VALUES))
    schema = Schema((ITEM_FEATURE, RECENCY_FEATURE), (Table("item", X + 1), table))
    retriever, ids = load(small_model("dot", X, schema=schema), tmp_path), raw_ids(3)
    # The second and the third action come 2 and 9 seconds after the ones before: of 2 and 4 bits.
    timed: Request = {"history": ids, "timestamps": [1, 3, 12], "time": 12}
    requests: list[Request] = [
        timed,
        {**timed, "events": [{}, {RECENCY: "30"}, {}]},
        {"history": ids, "time": 12, "events": [{}, {RECENCY: "2"}, {RECENCY: "4"}]},
        {"history": ids, "time": 12, "events": [{}, {RECENCY: "30"}, {RECENCY: "4"}]},
    ]
    derived, stated, of_two, of_thirty = ranked_rows(retriever.recommend(requests, 9))
    assert derived == of_two != stated == of_thirty


def test_stage_1_leaves_good_items_out(tmp_path: Path) -> None:
    """Without it the test above would not tell two stages from one."""
    model = small_model("mol", X)
    retriever, histories = load(model, tmp_path), random_histories(X, LENGTHS)
    exact, two_stages = retriever.retrieve(histories, 10), retriever.retrieve(histories, 10, stage1=40)
    assert (exact.scores.sum(1) > two_stages.scores.sum(1) + 0.1).any()


@pytest.mark.parametrize("stage1", [None, 20])
def test_what_is_not_left_is_minus_one(tmp_path: Path, stage1: int | None) -> None:
    model = small_model("mol", 30)
    everything, all_but_two = list(range(30)), list(range(28))
    found = load(model, tmp_path).retrieve([everything, all_but_two, [3]], 20, stage1=stage1)
    assert found.items[0].tolist() == [-1] * 20
    assert set(found.items[1].tolist()) == {28, 29, -1} and found.items[1, 2:].tolist() == [-1] * 18
    assert found.items[2].min() >= 0
    assert (found.scores.isinf() == (found.items == -1)).all()


def test_k_above_the_corpus_gives_all_items(tmp_path: Path) -> None:
    found = load(small_model("dot", 30), tmp_path).retrieve([[3]], 50, exclude_history=False)
    assert sorted(found.items[0].tolist()) == [-1] * 20 + list(range(30))


def test_equal_scores_come_by_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("dot", X)
    model.item_XD[:] = model.item_XD[:1]
    monkeypatch.setitem(NUMBERS, "cpu", 64)
    retriever = load(model, tmp_path)
    # The best k of 300 equal items; 5 is excluded.
    assert retriever.retrieve([[5]], 8).items.tolist() == [[0, 1, 2, 3, 4, 6, 7, 8]]
    assert retriever.retrieve([[5]], 8, stage1=100).items.tolist() == [[0, 1, 2, 3, 4, 6, 7, 8]]


@pytest.mark.parametrize("stage1", [None, 40])
@torch.inference_mode()
def test_requests_together_are_ranked_as_each_alone(tmp_path: Path, stage1: int | None) -> None:
    """To the last bit, each with its own filters."""
    retriever = load(small_model("mol", X), tmp_path)
    ids, histories = [retriever.raw_ids[item] for item in range(X)], random_histories(X, [3, 1, 5, 4, 2, 6])
    filters: list[Request] = [
        {},
        {"blocked": ids[::2]},
        {"allowed": ids[1::3]},
        {"allowed": ids[:20]},
        {},
        {"allowed": []},
    ]
    requests = [
        Request(history=[ids[item] for item in of], **more) for of, more in zip(histories, filters, strict=True)
    ]
    task = retriever._task(retriever._all_asked(requests, "skip"), Options(10, stage1=stage1), None, 10)
    found = retriever._ranker.rank(task)
    for row in range(len(requests)):
        query = ranking.each(task.query, lambda part, row=row: part[row : row + 1])
        alone = {name: getattr(task, name)[row : row + 1] for name in ("allowed", "excluded", "may", "few")}
        alone = dataclasses.replace(task, query=query, **alone)
        assert retriever._ranker.rank(alone).equal(found[row : row + 1])
    assert [int((keys != NOTHING).sum()) for keys in found] == [10] * 5 + [0]


scores = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, -1.5]) | scores, min_size=1, max_size=40), st.integers(1, 50))
def test_keys_order_as_scores_then_indices(values: list[float], k: int) -> None:
    expected = sorted(enumerate(values), key=lambda pair: (-pair[1], pair[0]))[:k]
    keys = rank_keys(torch.tensor([values]), torch.arange(len(values)))
    indices, found = split_keys(merge(keys[:, :3], keys[:, 3:], k))
    assert indices[0].tolist() == [index for index, _ in expected]
    assert found[0].tolist() == [value for _, value in expected]


@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, -torch.inf, torch.nan]) | scores, min_size=2, max_size=80), st.data())
def test_best_keys_are_the_best_of_all_keys(values: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(values)))
    # All of the last row are candidates, and few of the others.
    score = torch.tensor([values, [of + 1 for of in reversed(values)], [1.0] * len(values)])
    index = data.draw(
        st.sampled_from([torch.arange(len(values))[None], torch.arange(3 * len(values)).flip(0).view(3, -1)])
    )
    keys = rank_keys(score, index.expand_as(score)).masked_fill(score == -torch.inf, NOTHING)
    best = keys.topk(k).values
    assert merge(keys[:, :0], best_keys(score, index, k), k).equal(best)
    # As on CUDA.
    assert topk._best_by_topk(score, index.expand_as(score), k).sort(descending=True).values.equal(best)


def test_the_largest_index_fits_a_key() -> None:
    indices, scores = split_keys(rank_keys(torch.tensor([[-2.0, 3.0]]), torch.tensor([2**32 - 2, 2**32 - 1])))
    assert (indices.tolist(), scores.tolist()) == ([[2**32 - 2, 2**32 - 1]], [[-2.0, 3.0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: r.retrieve([[1], []], 3), "history 1 is empty"),
        (lambda r: r.retrieve([[1, 30]], 3), "history 0 holds 30; item indices go from 0 to 29"),
        (lambda r: r.retrieve([[1], [-1]], 3), "history 1 holds -1"),
        (lambda r: r.retrieve([[1.5]], 3), "history 0 is no list of item indices"),
        (lambda r: r.retrieve([3], 3), "history 0 is no list of item indices"),
        (lambda r: r.retrieve([[1]], 0), "k is 0; it must be at least 1"),
        (lambda r: r.retrieve([[1]], 10, stage1=9), r"stage1 is 9; it must be at least k \(10\)"),
        (lambda r: r.indices_of(["id 7", "seven", 8]), "no item of demo has the id 'seven', '8'; .*such as 'id 0'"),
        (lambda r: r.rows("id 7", 3), "the list of ids is 'id 7'; it must be a list"),
    ],
)
def test_what_a_user_gets_wrong(tmp_path: Path, call: Callable[[Retriever], object], message: str) -> None:
    retriever = load(small_model("dot", 30), tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        call(retriever)
    assert "\n" not in str(caught.value)


NOT_IDS: list[Any] = [294.0, 0.5, float("nan"), None, True, b"id 7", 2**64, ["id 7"], np.float64(7), np.bool_(True)]
NOT_IDS += [torch.tensor(7.0), torch.tensor(True)]


def test_what_is_no_id_is_refused_and_not_dropped(tmp_path: Path) -> None:
    """In Python as over HTTP."""
    retriever = load(small_model("dot", 30), tmp_path)
    for entry in ("history", "allowed", "blocked"):
        for wrong in NOT_IDS:
            with pytest.raises(ValueError, match=f"request 0: {entry} has an id that is .*; it must be text or"):
                ranked_rows(retriever.recommend([{"history": ["id 7"], entry: ["id 0", wrong]}], 3))  # type: ignore[misc]
        for wrong in ("id 7", 7):
            with pytest.raises(ValueError, match=f"request 0: {entry} is .*; it must be a list"):
                ranked_rows(retriever.recommend([{"history": ["id 7"], entry: wrong}], 3))  # type: ignore[misc]
    calls: list[Callable[[], object]] = [
        lambda: ranked_rows(retriever.recommend([{"history": ["id 7"], "timestamps": [1.0]}], 3)),  # type: ignore[list-item]
        lambda: retriever.recommend([{"history": ["id 7"]}], 3.0),  # type: ignore[arg-type]
        lambda: retriever.recommend([{"history": ["id 7"]}], 3, "sikp"),  # type: ignore[arg-type]
        lambda: retriever.recommend([{"history": ["id 7"]}], 3, exclude_history="no"),  # type: ignore[arg-type]
        lambda: retriever.recommend(None, 3),  # type: ignore[arg-type]
        lambda: retriever.retrieve([[True]], 3),
        lambda: Retriever.load(7),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_numbers_of_numpy_and_torch_are_ids(tmp_path: Path) -> None:
    ids = [str(item) for item in range(30)]
    contents = read(export_small(small_model("dot", 30), tmp_path / "served"))
    retriever = Retriever(dataclasses.replace(contents, raw_ids=in_order(ids)))
    expected = ranked_rows(retriever.recommend([{"history": ["3", "1"], "blocked": ["7"]}], 30))
    lists: list[Any] = [[3, 1], (3, "1"), np.array([3, 1]), np.array(["3", "1"]), torch.tensor([3, 1])]
    lists.append([torch.tensor(3), np.uint8(1)])
    for history in lists:
        for blocked in ([7], {"7"}, np.array([7], np.uint64), torch.tensor([7])):
            request: Any = {"history": history, "blocked": blocked, "allowed": None, "user": None}
            assert ranked_rows(retriever.recommend([request], np.int64(30))) == expected  # type: ignore[arg-type]


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    served = export_small(small_model("dot", 30), tmp_path / "served")
    for name in ("tpu", "cpu:first", "cuda:99"):
        with pytest.raises(ValueError, match=f"no device {name}"):
            Retriever.load(served, name)


def test_rows_are_for_reading(tmp_path: Path) -> None:
    retriever, ids = load(small_model("mol", 30), tmp_path), raw_ids(30)
    history = [3, 1, 4]
    found = retriever.retrieve([history], 28)
    rows = retriever.rows([ids[item] for item in history], 28)
    assert rows == [
        {"rank": rank + 1, "id": ids[item], "title": f"«{ids[item]}»", "score": found.scores[0, rank].item()}
        for rank, item in enumerate(found.items[0, :27].tolist())
    ]
    assert json.loads(json.dumps(rows)) == rows


def test_a_file_of_requests_is_answered_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retriever, ids = load(small_model("mol", 30), tmp_path), raw_ids(30)
    monkeypatch.setattr(request_file, "TOGETHER", 2)
    asked = [{"history": [ids[3]]}, [ids[1], ids[2]], {"history": [ids[5]], "blocked": [ids[6]]}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    done: list[int] = []
    requests = request_file.read_requests(tmp_path / "asked.jsonl")
    assert not request_file.answer_file(retriever, requests, tmp_path / "out.jsonl", {"k": 4}, advance=done.append)
    assert done == [2, 1]
    assert [*request_file.answer_file(retriever, [*requests, {"history": ["new"]}], tmp_path / "out.jsonl", {})] == [3]
    file = tmp_path / "asked.jsonl"
    file.write_text('\n["a"]\n\n["b"]\n')
    assert [request_file.line_of(number, file) for number in (0, 1)] == [2, 4]

    def ends(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        request_file.answer_file(retriever, requests, tmp_path / "none.jsonl", {}, advance=ends)
    assert {path.name for path in tmp_path.iterdir()} == {"asked.jsonl", "out.jsonl", "served"}
    for line, said in (("[1", "not JSON"), ("[" * 100_000, "not JSON"), ("3", "it must be a list of ids")):
        (tmp_path / "wrong.jsonl").write_text("[]\n" + line)
        with pytest.raises(ValueError, match=f"line 2: {said}"):
            request_file.read_requests(tmp_path / "wrong.jsonl")


def anonymous_memory() -> int:
    """Bytes of this process that are not mapped from files."""
    # Without what glibc keeps of memory that was freed.
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (int(line.split()[1]) for line in status if line.startswith("RssAnon"))
    return kib * 1024


@pytest.mark.parametrize(
    ("kind", "precision"),
    one_of_each(
        product([*KINDS, "mol, joint"], ["bf16", "fp16", "int8"]),
        itemgetter(0),
        lambda of: (of[1], of[0][:3] == "mol"),
    ),
)
def test_the_cache_may_be_less_precise(tmp_path: Path, kind: str, precision: Precision) -> None:
    model = small_model(kind, X)
    if precision == "int8" and not kind.startswith("mol"):
        with pytest.raises(
            ValueError, match=f"precision int8 is for the components of mol, and the similarity is {kind}"
        ):
            export_small(model, tmp_path / "served", precision=precision)
        assert not (tmp_path / "served").exists()
        return
    path, whole = (export_small(model, tmp_path / of, precision=of) for of in (precision, "fp32"))
    stored = [sum(of.nbytes for name, of in read(at).shards[0].items() if "similarity" in name) for at in (path, whole)]
    assert stored[0] * 2 <= stored[1] + 4
    histories = random_histories(X, LENGTHS)
    expected = brute_force(model, histories)
    for stage1, scores in ((None, expected.similarity_BX), (40, expected.two_stages(40))):
        found = Retriever.load(path).retrieve(histories, 10, stage1=stage1)
        exact_BX = scores.gather(1, found.items)
        # BF16 has 8 bits, FP16 11, and scores are up to 20.
        torch.testing.assert_close(found.scores, exact_BX, rtol=0, atol=0.02 if precision == "fp16" else 0.3)
        assert (exact_BX.sum(1) > scores.topk(10).values.sum(1) - 2).all()


def test_fp16_that_is_too_small_gives_way_to_bf16(tmp_path: Path) -> None:
    model = small_model("mol", X)
    with torch.no_grad():
        model.tower.similarity.item_gate[2].weight *= 1e6
    contents = read(export_small(model, tmp_path / "served", precision="fp16"))
    assert contents.about.precision == "bf16" and contents.shards[0]["similarity.1"].dtype == torch.bfloat16


@pytest.mark.parametrize("item_cache", [True, False])
def test_what_is_served_stays_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, item_cache: bool) -> None:
    monkeypatch.setitem(NUMBERS, "cpu", 2**14)
    items = 400_000
    path = export_small(small_model("dot", items, hindexer=False), tmp_path / "served", item_cache=item_cache)
    before = anonymous_memory()
    retriever = Retriever.load(path)
    found = retriever.retrieve([[1, 2, 3]], 10)
    # Rows and sides are 16 numbers wide each.
    assert anonymous_memory() - before < items * 2 * 16 * 4 / 8
    assert len(set(found.items[0].tolist())) == 10


@pytest.mark.parametrize(
    ("kind", "features"),
    one_of_each(product(KINDS, [True, False]), itemgetter(0)),
)
def test_items_may_be_computed_when_they_are_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, features: bool
) -> None:
    """From shards and chunks of a few items; without features, fewer bytes hold them."""
    monkeypatch.setattr(export_module, "SHARD_BYTES", 5000)
    monkeypatch.setattr(items_module, "COMPUTED_CHUNK", 70)
    model = small_model(kind, X, schema=every_feature(X) if features else None)
    cached, computed = (
        export_small(model, tmp_path / name, item_cache=name == "cached") for name in ("cached", "computed")
    )
    histories = random_histories(X, LENGTHS[:8])
    for stage1 in (None, 40):
        expected, found = (Retriever.load(path).retrieve(histories, 10, stage1=stage1) for path in (cached, computed))
        assert torch.equal(found.items, expected.items)
        # Sums of logits of up to 20, from sides that were computed in chunks of other sizes.
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-4)
    held = [sum(file.stat().st_size for file in path.glob("items-*")) for path in (cached, computed)]
    assert (features or held[1] < held[0]) and len(list(computed.glob("items-*"))) > 1


FORK = """
import os, signal, sys, torch
from logitmix.serving.retriever import Retriever

def compute():
    return torch.ones(2**22).add(1).sum().item()  # in OpenMP's threads

torch.set_num_threads(2)
retriever = Retriever.load(sys.argv[1])
asked = [{"history": ["id 7", "id 14"]}]
expected, total = retriever.recommend(asked, 5), compute()
if not os.fork():
    signal.alarm(30)
    os._exit(not (retriever.recommend(asked, 5) == expected and compute() == total))
sys.exit(os.wait()[1])
"""


def test_a_forked_process_answers(tmp_path: Path) -> None:
    """As after gunicorn's preload: OpenMP's threads are the parent's alone."""
    served = export_small(small_model("mol", 30), tmp_path / "served")
    subprocess.run([sys.executable, "-c", FORK, served], timeout=120, check=True)


def test_processes_share_a_joined_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "SHARD_BYTES", 5000)
    path, folder = export_small(small_model("mol", X), tmp_path / "served"), tmp_path / "shared"
    folder.mkdir()
    (folder / "of another export.npy").touch()
    alone, *sharing = Retriever.load(path), *(Retriever(read(path), shared=folder) for _ in range(2))
    expected, *found = (of.retrieve([[7, 14]], 10, stage1=40) for of in (alone, *sharing))
    (file,) = folder.iterdir()
    assert Path("/proc/self/maps").read_text().count(str(file)) == len(sharing)
    # Where there is no room.
    file.unlink()
    monkeypatch.setattr(mapped.np, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    found.append(Retriever(read(path), shared=folder).retrieve([[7, 14]], 10, stage1=40))
    for of in found:
        assert torch.equal(of.items, expected.items) and torch.equal(of.scores, expected.scores)
    assert not [*folder.iterdir()]
