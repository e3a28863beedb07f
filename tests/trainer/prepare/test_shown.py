"""Rows that are no actions, but what was shown: against a loop over the rows."""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reading import decoded, prepared, summary

from logitmix.trainer.config import Config, model_schema, with_settings
from logitmix.trainer.data.dataset import Dataset

HEADER = "user,item,timestamp,event"
SHOWN = ("event = impression", "event = dislike")
Row = tuple[str, str, int, str]


def made(rows: int = 400) -> list[Row]:
    """Of ten users, in no order: half of them impressions, many of them at the time of an action."""
    random = np.random.default_rng(0)
    kinds = random.choice(["impression", "dislike", "view", "buy"], rows, p=[0.4, 0.1, 0.3, 0.2])
    # Some items and a user are only shown.
    items = [f"i{random.integers(20) + 10 * (kind == 'impression')}" for kind in kinds]
    users = [f"u{random.integers(9)}" if kind != "impression" else f"u{random.integers(10)}" for kind in kinds]
    return [(u, i, int(random.integers(60)), str(k)) for u, i, k in zip(users, items, kinds, strict=True)]


def written(folder: Path, rows: list[Row], name: str = "in.csv") -> Path:
    path = folder / name
    path.write_text("\n".join([HEADER, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def expected(rows: list[Row], of_items: int) -> dict[str, list[tuple[str, str, list[str]]]]:
    """Item, kind and what was shown of each action of each user; rows that occur again are there once."""
    rows = list(dict.fromkeys(rows))
    is_shown = [kind in ("impression", "dislike") for *_, kind in rows]
    often = Counter(item for (_, item, *_), of in zip(rows, is_shown, strict=True) if not of)
    found: dict[str, list[tuple[str, str, list[str]]]] = defaultdict(list)
    for user in sorted({row[0] for row in rows}):
        own = [(row, of) for row, of in zip(rows, is_shown, strict=True) if row[0] == user]
        waiting: list[str] = []
        # What is shown at the time of an action comes before it.
        for (_, item, _, kind), of in sorted(own, key=lambda each: (each[0][2], not each[1])):
            if of:
                waiting.append(item)
            elif often[item] >= of_items:
                found[user].append((item, kind, waiting))
                waiting = []
    return found


@pytest.mark.parametrize("memory", ["1GiB", "1KiB"])
@pytest.mark.parametrize("of_items", [0, 12])
def test_they_belong_to_the_next_action(memory: str, of_items: int, tmp_path: Path) -> None:
    rows = made()
    dataset, said = prepared(written(tmp_path, rows), shown=SHOWN, memory=memory, min_item_actions=of_items)
    wanted, raw, events = expected(rows, of_items), dataset.raw_ids(), decoded(dataset, "event")
    users = dataset.raw_user_ids(np.arange(dataset.num_users))
    items = [raw[item] for item in dataset.items_flat]
    ends = dataset.offsets[1:].tolist()
    together = list(zip(items, events["event"], events["shown"], strict=True))
    assert {user: together[start:end] for user, start, end in zip(users, [0, *ends], ends, strict=False)} == wanted
    kept = sum(len(shown) for actions in wanted.values() for *_, shown in actions)
    different = set(rows)
    count = sum(kind in ("impression", "dislike") for *_, kind in different)
    assert kept and f"--shown: {count - kept} rows wait for an action of their user" in said
    # They are no items or users either.
    assert not {f"i{of}" for of in range(20, 30)} & {*raw} and "u9" not in users
    assert f"{count} actions by --shown 'event = impression' --shown 'event = dislike'" in summary(dataset)
    # As negatives, "all" features are without them.
    config = with_settings(Config(), {"model.features": ["all"], "data.negatives": ["shown"]})
    assert [of.name for of in model_schema(dataset.schema, config).features] == ["item", "event"]


def test_actions_alone_make_a_user(tmp_path: Path) -> None:
    rows: list[Row] = [("few", "a", of, "impression" if of % 2 else "buy") for of in range(8)]
    with pytest.raises(ValueError, match=r"no user has 5 or more actions .there were 1 users with 4 actions, "):
        prepared(written(tmp_path, rows), shown=SHOWN[:1], min_user_actions=5)


def test_the_next_day_has_the_same_condition(tmp_path: Path) -> None:
    first: list[Row] = [("u", "a", 1, "buy"), ("u", "b", 2, "impression"), ("u", "b", 3, "buy")]
    later: list[Row] = [("u", "a", 5, "impression"), ("u", "c", 6, "impression"), ("u", "b", 7, "buy")]
    dataset, _ = prepared(written(tmp_path, first), shown=SHOWN[:1])
    day, path = written(tmp_path, later, "day.csv"), str(dataset.path)
    with pytest.raises(ValueError, match="out was prepared with --shown 'event = impression'; append by the same"):
        prepared(day, append=path, min_user_actions=5)
    dataset, _ = prepared(day, append=path, shown=SHOWN[:1], min_user_actions=5)
    assert decoded(dataset, "event")["shown"] == [[], ["b"], ["a", "c"]]


@pytest.mark.parametrize("memory", ["1GiB", "1KiB"])
def test_what_is_shown_at_the_end_of_a_day_belongs_to_an_action_of_a_later_one(memory: str, tmp_path: Path) -> None:
    rows = [*dict.fromkeys(made()), ("u9", "i7", 50, "view"), ("late", "only-shown", 5, "impression")]
    rows += [("late", "i1", time, "buy") for time in (41, 42)]
    whole, said = prepared(written(tmp_path, rows), out=tmp_path / "whole", shown=SHOWN, memory=memory)
    assert "rows wait for an action of their user" in said
    later: dict[str, Any] = {}
    for day, start in enumerate((0, 20, 40)):
        path = written(tmp_path, [row for row in rows if start <= row[2] < start + 20], f"day-{day}.csv")
        parts, _ = prepared(path, out=tmp_path / "parts", shown=SHOWN, memory=memory, **later)
        later = {"append": str(tmp_path / "parts"), "min_user_actions": 5}

    def seen(dataset: Dataset) -> dict[str, list[tuple[int, str, str, list[str]]]]:
        raw, events = dataset.raw_ids(), decoded(dataset, "event")
        items = [raw[item] for item in dataset.items_flat]
        actions = list(zip(dataset.timestamps_flat, items, events["event"], events["shown"], strict=True))
        users, ends = dataset.raw_user_ids(np.arange(dataset.num_users)), [0, *dataset.offsets[1:].tolist()]
        return {user: actions[start:end] for user, start, end in zip(users, ends, ends[1:], strict=False)}

    assert seen(parts) == seen(whole) and seen(whole)["late"][0][3] == ["only-shown"]


@pytest.mark.parametrize(
    ("shown", "header", "problem"),
    [
        ("event = impresion", HEADER, "--shown event = impresion: no row fulfills this; correct it, or leave it out"),
        ("evnt = buy", HEADER, "--shown 'evnt = buy'.*evnt"),
        ("timestamp > 0", HEADER, "^no user has 1 or more actions .there were 0 users with 0 actions, "),
        ("shown = buy", HEADER.replace("event", "shown"), "--shown makes a column shown, and the actions have one"),
    ],
)
def test_mistakes_are_named(shown: str, header: str, problem: str, tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text(f"{header}\nu,a,1,buy\nu,b,2,view\n")
    with pytest.raises(ValueError, match=problem):
        prepared(source, shown=(shown,))
