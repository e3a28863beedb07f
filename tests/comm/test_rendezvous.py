"""Who meets in a store, and what is said where not all agree. Each rank is a thread here."""

import dataclasses
import json
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from logitmix.comm import rendezvous
from logitmix.comm.rendezvous import LostRank, Member, meet, unconnected

FACTS = {"the command": "train", "train.seed": "1"}
Outcome = tuple[str, dict[int, Member]] | Exception


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(rendezvous, "TELLS", 1.0)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def member(facts: Mapping[str, str] = FACTS, **changes: Any) -> Member:
    of = Member.here(facts, changes.pop("failed", ""), changes.pop("mistake", False))
    return replace(of, **changes)


def met(
    store: dist.Store, ranks: Mapping[int, tuple[Member, Mapping[str, str]]], of: int, seconds: float = 20.0
) -> list[Outcome]:
    """What becomes of these ranks of so many."""

    def one(rank: int) -> Outcome:
        own, facts = ranks[rank]
        try:
            return meet(store, rank, of, own, facts, seconds)
        except (ValueError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def refused(outcomes: list[Outcome], kind: type[Exception] = ValueError) -> str:
    """What all ranks say, the same."""
    assert all(type(outcome) is kind for outcome in outcomes), outcomes
    (said,) = {str(outcome) for outcome in outcomes}
    assert "\n" not in said
    return said


def test_ranks_that_agree_are_a_group(store: dist.Store) -> None:
    # Of one host, so its loopback will do.
    first = met(store, {rank: (member(address="127.0.1.1"), FACTS) for rank in range(3)}, 3)
    again = met(store, {rank: (member(), FACTS) for rank in range(3)}, 3)
    names = [{outcome[0] for outcome in outcomes} for outcomes in (first, again)]  # type: ignore[index]
    assert [len(each) for each in names] == [1, 1] and names[0] != names[1]
    assert first[2][1][1].host == Member.here(FACTS).host  # type: ignore[index]


def test_what_differs_is_named_with_rank_host_and_both_values(store: dist.Store) -> None:
    other = FACTS | {"train.seed": "77"}
    ranks = {
        0: (member(host="a"), FACTS),
        1: (member(other, host="b"), other),
        2: (member(host="a"), FACTS),
        3: (member(other, host="b"), other),
    }
    assert refused(met(store, ranks, 4)) == (
        "the ranks differ: train.seed is 1 on rank 0 (on a) and 77 on ranks 1, 3 (on b); start all of them with the "
        "same settings, dataset and code"
    )


def test_many_differences_are_counted_and_the_first_shown(store: dist.Store) -> None:
    one = {f"setting{number}": "x" * 100 for number in range(9)}
    other = {f"setting{number}": "y" for number in range(1, 9)}
    said = refused(met(store, {0: (member(one), one), 1: (member(other), other)}, 2))
    assert said.count(" is ") == 3 and "absent on rank 1" in said and "x" * 81 not in said
    assert "; and 6 more; start" in said


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("mistake", "kind"), [(True, ValueError), (False, LostRank)])
def test_all_ranks_learn_why_one_has_failed(
    failing: int, mistake: bool, kind: type[Exception], store: dist.Store
) -> None:
    failed = member({}, failed="no dataset at data/x", mistake=mistake, host="b")
    ranks = {rank: (failed, {}) if rank == failing else (member(), FACTS) for rank in range(3)}
    assert refused(met(store, ranks, 3), kind) == f"rank {failing} (on b) failed: no dataset at data/x"


def test_a_rank_that_never_came_is_named_by_all(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    look = rendezvous._Lead._look_for

    def until_rank_2_is_here(lead: Any, rank: int) -> None:
        look(lead, rank)
        if 2 in lead.here:
            monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: math.inf, sleep=time.sleep))

    monkeypatch.setattr(rendezvous._Lead, "_look_for", until_rank_2_is_here)
    ranks = {rank: (member(), FACTS) for rank in (0, 2)}
    said = refused(met(store, ranks, 4), LostRank)
    assert said == "rank 0 waited 20 s for the others: ranks 1, 3 never came"


def test_without_rank_0_the_others_say_so(store: dist.Store) -> None:
    said = refused(met(store, {1: (member(), FACTS)}, 2, seconds=0.3), LostRank)
    assert said == "rank 1 waited 0.3 s for rank 0, which never came"


@pytest.mark.parametrize("died", ["before the answer", "after it"])
def test_a_process_of_an_earlier_start_does_not_count(died: str, store: dist.Store) -> None:
    """It has left its entry, of other facts at that, and perhaps read an answer of its own time."""
    dead = member({"train.seed": "5"})
    store.set("join/1", json.dumps(dataclasses.asdict(dead)))
    if died == "after it":
        store.set(f"answer/{dead.id}", "old")
        store.set("old/here/1", dead.id)
        store.set("old/verdict", '{"refused": "", "tell": [], "lost": false}')
    (group, _), (other, _) = met(store, {rank: (member(), FACTS) for rank in range(2)}, 2)  # type: ignore[misc]
    assert group == other != "old"


def test_the_process_that_came_last_as_a_rank_counts(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it had read the answer, and died before all had come."""
    early, look = member(), rendezvous._Lead._look_for

    def first_early(lead: Any, rank: int) -> None:
        look(lead, rank)
        if rank == 1 and lead.here == {0} and store.check([f"answer/{early.id}"]):
            lead.group.set("here/1", early.id)
            look(lead, 1)
            store.set("join/1", json.dumps(dataclasses.asdict(late)))
            monkeypatch.undo()

    late = member()
    store.set("join/1", json.dumps(dataclasses.asdict(early)))
    monkeypatch.setattr(rendezvous._Lead, "_look_for", first_early)
    (_, members), _ = met(store, {0: (member(), FACTS), 1: (late, FACTS)}, 2)  # type: ignore[misc]
    assert members[1] == late


@pytest.mark.parametrize("address", ["127.0.1.1", "lo", "::1"])
def test_a_host_that_would_announce_its_loopback_is_named(address: str, store: dist.Store) -> None:
    ranks = {
        0: (member(host="a", network="1", address="10.0.0.1"), FACTS),
        1: (member(host="b", network="2", address=address), FACTS),
    }
    said = f"rank 1 (on b) would be reached at {address}, the loopback of its host, and rank 0 (on a) at 10.0.0.1; "
    assert refused(met(store, ranks, 2)).startswith(said)


def test_ranks_that_cannot_connect_say_where_they_listen() -> None:
    members = {
        rank: member(host=host, network=host, address=address)
        for rank, (host, address) in enumerate([("a", "10.0.0.1"), ("b", "172.17.0.1")])
    }
    assert unconnected(1, members).startswith(
        "this rank listens at 172.17.0.1 (b); the others listen at 10.0.0.1 (a); on each host set GLOO_SOCKET_IFNAME"
    )


@pytest.mark.parametrize(("resolved", "address"), [("127.0.1.1", "127.0.1.1"), ("192.0.2.1", "127.0.0.1")])
def test_the_address_is_what_gloo_would_announce(resolved: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is no address of this host."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", (resolved, 0))])
    assert rendezvous.gloo_address() == address
