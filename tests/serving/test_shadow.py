"""`logitmix serve --shadow`: another export answers too, for the metrics, and who asks it."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from small_models import every_feature, export_small, small_model
from test_server import Running, running
from waiting import until

from logitmix.serving import server as server_module
from logitmix.serving.live import LiveExport
from logitmix.serving.request import Options, Question, Request
from logitmix.serving.settings import ServerSettings
from logitmix.serving.shadow import MOST, Shadow

X = 60


def agreement(server: Running, at: int) -> tuple[float, float]:
    """Number and mean."""
    count, total = (server.metric(f'logitmix_shadow_agreement_{of}{{at="{at}"}}') for of in ("count", "sum"))
    return count, total / (count or 1)


def test_the_shadow_is_compared_and_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.02)
    served = export_small(small_model("dot", X), tmp_path / "served")
    other = export_small(small_model("dot", X, seed=1), tmp_path / "other")
    questions = [{"history": [f"id {item}"], "k": 10} for item in (7, 14, 21)]
    shadow = LiveExport(other, print)
    with running(served, shadow=shadow) as server:
        expected = [[row["id"] for row in server.export.retriever.rows(of["history"], 10)] for of in questions]
        others = [[row["id"] for row in shadow.retriever.rows(of["history"], 10)] for of in questions]
        for question, ids in zip(questions, expected, strict=True):
            status, found = server.ask(question)
            assert status == 200 and [row["id"] for row in found["items"]] == ids
        until(lambda: agreement(server, 10)[0] == 3)
        for at in (1, 10):
            shares = [len({*ids[:at]} & {*of[:at]}) / at for ids, of in zip(expected, others, strict=True)]
            assert agreement(server, at) == (3, pytest.approx(sum(shares) / 3))
        assert 0 < agreement(server, 10)[1] < 1 and agreement(server, 100)[0] == 0
        for of in ("served", "shadow"):
            assert server.metric(f'logitmix_answer_seconds_count{{export="{of}"}}') == 3
        # The same export agrees wholly, once it takes over.
        export_small(small_model("dot", X), other, overwrite=True)
        until(lambda: shadow.retriever.digest == server.export.retriever.digest)
        server.ask(questions[0])
        until(lambda: agreement(server, 10)[0] == 4)
        assert agreement(server, 10)[1] == pytest.approx((sum(shares) + 1) / 4)


def test_the_shadow_can_be_asked(tmp_path: Path) -> None:
    served = export_small(small_model("dot", X), tmp_path / "served")
    shadow = LiveExport(export_small(small_model("dot", X, seed=1), tmp_path / "other"), print)
    with running(served, shadow=shadow) as server:
        status, found = server.ask({"history": ["id 7"], "k": 5}, path="/shadow")
        expected = shadow.retriever.rows(["id 7"], 5)
        assert status == 200 and [row["id"] for row in found["items"]] == [row["id"] for row in expected]
        assert found["digest"] == shadow.retriever.digest
        assert server.ask(b"", "GET", "/healthz")[1]["shadow"]["digest"] == shadow.retriever.digest
        assert server.ask({"history": 5}, path="/shadow")[0] == 400
        assert agreement(server, 1)[0] == 0
    with running(served) as server:
        assert server.ask({"history": ["id 7"]}, path="/shadow") == (
            404,
            {"error": "there is no shadow; logitmix serve --shadow DIR adds one"},
        )
    with pytest.raises(ValueError, match=r"^--shadow: no serving directory at .*nowhere"):
        server_module.load_app(served, ServerSettings(shadow=str(tmp_path / "nowhere")), print)


def test_what_the_shadow_cannot_answer_is_counted(tmp_path: Path) -> None:
    schema = every_feature(X)
    served = export_small(small_model("dot", X, schema=schema), tmp_path / "served")
    shadow = LiveExport(export_small(small_model("dot", X), tmp_path / "other"), print)
    with running(served, shadow=shadow) as server:
        assert server.ask({"user": {schema.of("user")[0].name: None}})[0] == 200
        until(lambda: server.metric("logitmix_shadow_failures_total") == 1)


@pytest.mark.parametrize(("share", "left_out", "compared"), [(1.0, 2, MOST), (1e-12, 0, 0)])
def test_a_shadow_that_is_behind_leaves_requests_out(
    tmp_path: Path, share: float, left_out: int, compared: int
) -> None:
    registry = CollectorRegistry()
    export = LiveExport(export_small(small_model("dot", X), tmp_path / "served"), print)

    async def ask() -> None:
        shadow = Shadow(export, share, 0.0, registry)
        question = Question(Request(history=["id 7"]), Options(k=3))
        for _ in range(MOST + 2):
            shadow.compare(question, {"items": export.retriever.rows(["id 7"], 3)}, 0.01)
        work = asyncio.create_task(shadow.batcher.run())
        while shadow._tasks:
            await asyncio.sleep(0.01)
        work.cancel()

    asyncio.run(ask())
    assert registry.get_sample_value("logitmix_shadow_left_out_total") == left_out
    of_shadow = registry.get_sample_value("logitmix_answer_seconds_count", {"export": "shadow"})
    assert (of_shadow or 0) == compared
