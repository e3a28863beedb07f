import csv
import hashlib
import io
import json
import tempfile
import zipfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from reading import decoded
from rich.console import Console

from logitmix.common.checked import entry_of, json_digest
from logitmix.modules.schema import Schema
from logitmix.trainer.cli import main
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.data.description import UNITS
from logitmix.trainer.data.times import window
from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.number import STEPS
from logitmix.trainer.prepare.prepare import prepare
from logitmix.trainer.prepare.summary import summarize

QUIET = Console(quiet=True)
NOTHING = {"users": 0, "items": 0, "actions": 0}


def run(name: str, source: Path | str, out: Path, **options: Any) -> dict[str, Any]:
    return prepare(PrepareOptions(name, str(source), str(out), **{"min_user_actions": 1} | options), QUIET)


def sequences(out: Path) -> dict[str, list[tuple[str, int]]]:
    """Raw user id -> the raw items and times, as another program would read them."""
    items = pq.read_table(out / "items.parquet").to_pylist()
    assert [row["item_index"] for row in items] == list(range(len(items)))
    users = pq.read_table(out / "sequences").to_pylist()
    assert [row["user_index"] for row in users] == list(range(len(users)))
    return {
        row["raw_user_id"]: [
            (items[item]["raw_id"], time) for item, time in zip(row["item_indices"], row["timestamps"], strict=True)
        ]
        for row in users
    }


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Users 2, 10 and 9 with 3, 2 and 1 actions; items x, y and z with 3, 2 and 1."""
    path = tmp_path / "in" / "table.csv"
    path.parent.mkdir()
    path.write_text("user,item,timestamp\n10,x,5\n2,y,9\n2,x,3\n9,x,1\n10,y,4\n2,z,1\n")
    return path


def zip_of(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_users_and_items_are_numbered_and_sorted(table: Path, tmp_path: Path) -> None:
    made = run("table", table, tmp_path / "out")
    assert list(sequences(tmp_path / "out").items()) == [
        ("2", [("z", 1), ("x", 3), ("y", 9)]),
        ("9", [("x", 1)]),
        ("10", [("y", 4), ("x", 5)]),
    ]
    assert load_dataset(tmp_path / "out").raw_ids() == ["x", "y", "z"]
    assert made == json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert made == {
        "kind": "logitmix dataset",
        "format_version": 3,
        "name": "table",
        "users": 3,
        "items": 3,
        "actions": 6,
        "schema": Schema.of_ids(3).to_mapping(),
        "repeated_targets": {"validation": 0.0, "test": 0.0},
        "last_actions": {"51": {"actions": 6, "items": 3}, "201": {"actions": 6, "items": 3}},
        "filters": {
            "where": [],
            "keep_duplicates": False,
            "shown": [],
            "min_item_actions": 0,
            "min_user_actions": 1,
            "removed": dict.fromkeys(STEPS, NOTHING),
        },
        "read": {"users": 3, "items": 3, "actions": 6},
        "times": {"unit": None, "first": 1, "last": 9, "tied_actions": 0, "users_that_end_tied": 0},
        "titles": 0,
        "side_tables": {},
        "rejected_lines": 0,
        "source": {"name": "table.csv", "sha256": {"table.csv": hashlib.sha256(table.read_bytes()).hexdigest()}},
        "generator": None,
        "files": {
            name: entry_of(tmp_path / "out" / name) for name in ("items.parquet", "sequences/part-00000.parquet")
        },
        "sha256": json_digest({name: of for name, of in made.items() if name != "sha256"}),
    }
    assert entries(tmp_path / "out") == {"dataset.json", "items.parquet", "sequences"}
    assert entries(tmp_path) == {"in", "out"}


def test_the_command_shows_counts_and_features(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prepare", "table", "--source", str(table), "--out", str(tmp_path / "out"), "--min-user-actions", "1"]
    main(words)
    assert capsys.readouterr().out.splitlines() == [
        "read      3 users, 3 items, 6 actions",
        f"written   3 users, 3 items, 6 actions to {tmp_path}/out",
        "users     2.00 actions each",
        "times     1 to 9: an order, but no dates",
        "titles    none: answers will show ids",
        "features  none but the item ids",
        f"next      logitmix train auto --data.path {tmp_path}/out --run runs/out",
    ]
    main([*words, "--overwrite", "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "out" / "dataset.json").read_text())


def test_the_summary_names_what_was_removed_and_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"u{n % 4},i{n},{n},{'cart' if n % 3 else 'view'},{n % 2},T{n if n < 40 else ''},same" for n in range(60)]
    content = "\n".join(["user,item,timestamp,event,rating,title,shop", *rows, "x,i1,1,view,1,t,same", "bad"])
    (tmp_path / "in.csv").write_text(content.replace(",T,", ",,"))
    words = ["prepare", "table", "--source", str(tmp_path / "in.csv"), "--out", str(tmp_path / "my out")]
    main([*words, "--where", "rating = 1", "--where", 'event != "view"', "--max-rejects", "0.1"])
    shown = capsys.readouterr()
    assert shown.err.splitlines() == [
        "in.csv:63: has 1 field, not 7",
        "not used, unless --schema FILE states a kind: event, rating, shop (all values are the same)",
    ]
    assert shown.out.splitlines() == [
        "read      5 users, 60 items, 61 actions",
        f"rejected  1 malformed line, listed in {tmp_path}/my out/rejects.tsv",
        "removed   3 users, 40 items, 41 actions by --where 'rating = 1' --where 'event != \"view\"'",
        f"written   2 users, 20 items, 20 actions to {tmp_path}/my out",
        "users     10.00 actions each",
        "times     1 to 59: an order, but no dates",
        "titles    of 13 of 20 items",
        "features  none but the item ids (--embed makes vectors of texts, such as titles)",
        f"next      logitmix train auto --data.path '{tmp_path}/my out' --run 'runs/my out'",
    ]


def test_the_summary_knows_the_recipes_of_a_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = prepare(PrepareOptions("demo"), QUIET)
    lines = summarize(made, PrepareOptions("demo").directory).splitlines()
    assert lines[4] == "titles    of 3,000 of 3,000 items"
    assert lines[-1] == "next      logitmix train demo-mol"
    assert lines[2] == "users     39.60 actions each"


def test_ids_sort_as_text_as_soon_as_one_is_no_number(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("10 1\n9 1\n010 1\n")
    (tmp_path / "b.txt").write_text("10 1\n9 1\nx 1\n")
    for name in "ab":
        run("sequences", tmp_path / f"{name}.txt", tmp_path / name)
    assert list(sequences(tmp_path / "a")) == ["9", "010", "10"]
    assert list(sequences(tmp_path / "b")) == ["10", "9", "x"]


@pytest.mark.parametrize(
    ("least", "expected", "removed"),
    [
        ((2, 0), {"2": "zxy", "10": "yx"}, ((0, 0, 0), (1, 0, 1))),
        ((3, 0), {"2": "zxy"}, ((0, 0, 0), (2, 0, 3))),
        ((1, 2), {"2": "xy", "9": "x", "10": "yx"}, ((0, 1, 1), (0, 0, 0))),
        ((3, 1), {"2": "zxy"}, ((0, 0, 0), (2, 0, 3))),
        # Users are counted after the item filter, and items not again after the user filter: y keeps one action.
        ((2, 2), {"2": "xy", "10": "yx"}, ((0, 1, 1), (1, 0, 1))),
        ((0, 3), {"2": "x", "9": "x", "10": "x"}, ((0, 2, 3), (0, 0, 0))),
    ],
)
def test_filters(
    least: tuple[int, int], expected: dict[str, str], removed: tuple[tuple[int, ...], ...], table: Path, tmp_path: Path
) -> None:
    """`least`: actions of a user, and of an item."""
    out = tmp_path / "out"
    made = run("table", table, out, min_user_actions=least[0], min_item_actions=least[1])
    assert {user: "".join(item for item, _ in actions) for user, actions in sequences(out).items()} == expected
    assert load_dataset(out).raw_ids() == sorted(set("".join(expected.values())))
    filters = made["filters"]
    assert (filters["min_user_actions"], filters["min_item_actions"]) == least
    by_items, by_users = (dict(zip(NOTHING, counts, strict=True)) for counts in removed)
    of_counts = {"min_item_actions": by_items, "min_user_actions": by_users}
    assert filters["removed"] == dict.fromkeys(STEPS, NOTHING) | of_counts
    assert made["read"] == {"users": 3, "items": 3, "actions": 6}


def test_five_actions_and_any_item_by_default(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"{user} {user}-{n}\n" for user in (4, 5) for n in range(user)))
    made = prepare(PrepareOptions("sequences", str(tmp_path / "in.txt"), str(tmp_path / "out")), QUIET)
    assert (made["users"], made["items"], made["actions"]) == (1, 5, 5)


ML_1M = {
    "ml-1m/ratings.dat": b"1::20::5::30\n1::3::4::10\n2::3::1::1000000007\n",
    "ml-1m/movies.dat": "3::Café, Le (1801)::Drama|Musical\n20::Éva::Drama\n9::Unseen::War\n".encode("latin-1"),
    "ml-1m/users.dat": b"1::F::33::3::01234-5\n2::M::44::4::06789\n",
}
ML_100K = {
    "ml-100k/u.data": b"1\t20\t5\t30\n1\t3\t4\t10\n2\t3\t1\t1000000007\n",
    "ml-100k/u.item": "".join(
        f"{item}|{title}|01-Jan-1995||http://a|0|0|{flags}\n"
        for item, title, flags in [
            (3, "Café, Le (1801)", "0|0|0|0|0|0|1|0|0|0|1|0|0|0|0|0|0"),
            (20, "Éva", "0|0|0|0|0|0|1|0|0|0|0|0|0|0|0|0|0"),
        ]
    ).encode("latin-1"),
    "ml-100k/u.user": b"1|33|F|3|01234-5\n2|44|M|4|06789\n",
}
ML_20M = {
    "ml-20m/ratings.csv": b"userId,movieId,rating,timestamp\r\n1,20,5,30\r\n1,3,4.5,10\r\n2,3,1,1000000007\r\n",
    "ml-20m/movies.csv": 'movieId,title,genres\r\n3,"Café, Le (1801)",Drama|Musical\r\n20,Éva,Drama\r\n'.encode(),
}


@pytest.mark.parametrize("form", ["zip", "folder", "outer folder"])
@pytest.mark.parametrize(
    ("name", "files"), [("ml-1m", ML_1M), ("ml-100k", ML_100K), ("ml-20m", ML_20M), ("ml-latest", ML_20M)]
)
def test_movielens(name: str, files: dict[str, bytes], form: str, tmp_path: Path) -> None:
    source = zip_of(tmp_path / "in.zip", files)
    if form != "zip":
        with zipfile.ZipFile(source) as archive:
            archive.extractall(tmp_path / "in")
        inner = next((tmp_path / "in").iterdir())
        source = inner if form == "folder" else inner.parent
    made = run(name, source, tmp_path / "out")
    assert sequences(tmp_path / "out") == {"1": [("3", 10), ("20", 30)], "2": [("3", 1000000007)]}
    assert pq.read_table(tmp_path / "out" / "items.parquet").to_pylist() == [
        {"item_index": 0, "raw_id": "3", "title": "Café, Le (1801)", "genres": [1, 2], "year": 1},
        {"item_index": 1, "raw_id": "20", "title": "Éva", "genres": [1], "year": 2 if name == "ml-100k" else 0},
    ]
    loaded = load_dataset(tmp_path / "out")
    assert loaded.vocabulary("genres") == ["", "Drama", "Musical"]
    assert loaded.vocabulary("year") == (["", "1801", "1995"] if name == "ml-100k" else ["", "1801"])
    assert loaded.event_features["rating"].values.tolist() == [4.5 if name in ("ml-20m", "ml-latest") else 4, 5, 1]
    if name in ("ml-1m", "ml-100k"):
        users = {"gender": ["F", "M"], "age": ["33", "44"], "occupation": ["3", "4"], "zip": ["01234-5", "06789"]}
        assert decoded(loaded, "user") == users
    inside = {Path(member).name for member in files}
    assert {Path(read).name for read in made["source"]["sha256"]} == ({"in.zip"} if form == "zip" else inside)
    assert made["rejected_lines"] == 0


def test_ratings_alone_make_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_bytes(ML_1M["ml-1m/ratings.dat"])
    run("ml-1m", tmp_path / "ratings.dat", tmp_path / "out")
    assert sequences(tmp_path / "out")["1"] == [("3", 10), ("20", 30)]
    assert pq.read_schema(tmp_path / "out" / "items.parquet").names == ["item_index", "raw_id"]
    schema = load_dataset(tmp_path / "out").schema
    assert [feature.name for feature in schema.features] == ["item", "rating"]


def test_malformed_lines_are_shown_and_kept(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(f"a {item}\n" for item in range(71)) + "only\n" * 29)
    shown = io.StringIO()
    options = PrepareOptions("sequences", str(tmp_path / "in.txt"), str(tmp_path / "out"), max_rejects=0.29)
    made = prepare(options, Console(file=shown))
    assert (made["actions"], made["rejected_lines"]) == (71, 29)
    expected = [f"in.txt:{line}: has 1 field, not 2" for line in range(72, 77)] + ["… and 24 more malformed lines"]
    assert shown.getvalue().splitlines() == expected
    rows = (tmp_path / "out" / "rejects.tsv").read_text().splitlines()
    assert rows[0] == "file\tline\treason\ttext" and rows[29] == "in.txt\t100\thas 1 field, not 2\tonly"
    load_dataset(tmp_path / "out")


def test_too_many_malformed_lines_stop_the_job(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a x\n" * 98 + "b\tad y z\n" * 2)
    with pytest.raises(ValueError) as caught:
        prepare(PrepareOptions("sequences", str(tmp_path / "in.txt"), str(tmp_path / "out")), QUIET)
    kept = tmp_path / "out.rejects.tsv"
    assert str(caught.value) == (
        "2 of 100 lines are malformed, above --max-rejects 0.01; the first is in.txt:99: has 4 fields, not 2; "
        f"they are listed in {kept}"
    )
    assert kept.read_text().splitlines()[1] == "in.txt\t99\thas 4 fields, not 2\tb\\tad y z"
    assert entries(tmp_path) == {"in.txt", "out.rejects.tsv"}


def test_an_existing_dataset_is_replaced_only_when_asked_and_by_a_whole_one(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    run("table", table, out)
    with pytest.raises(ValueError, match=r"there is a dataset at .*/out already; replace it with --overwrite"):
        run("table", table, out, min_user_actions=3)
    with pytest.raises(ValueError, match=r"no user has 4 or more actions .there were 3 users with 6 actions, .* lower"):
        run("table", table, out, min_user_actions=4, overwrite=True)
    assert load_dataset(out).num_users == 3
    run("table", table, out, min_user_actions=3, overwrite=True)
    assert load_dataset(out).num_users == 1
    assert entries(tmp_path) == {"in", "out"}


def test_a_full_disk_is_named_by_the_output(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(28, "Error writing bytes to file. Detail: [errno 28] No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        main(["prepare", "table", "--source", str(table), "--out", str(out), "--min-user-actions", "1"])
    assert capsys.readouterr().err == (f"logitmix: {out}: No space left on device\n")
    assert entries(tmp_path) == {"in"}


@pytest.mark.parametrize("kind", ["folder", "dataset with more", "file", "link"])
def test_what_is_no_dataset_is_never_replaced(kind: str, table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "folder":
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    else:
        run("table", table, tmp_path / "real" if kind == "link" else out)
        (out.symlink_to(tmp_path / "real") if kind == "link" else (out / "mine.txt").write_text("mine"))
    before = entries(tmp_path), out.stat().st_ino
    with pytest.raises(ValueError, match="choose another --out"):
        run("table", table, out, overwrite=True)
    assert (entries(tmp_path), out.stat().st_ino) == before


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file or folder at .*/nothing; --source must name one"):
        run("table", tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no \.parquet, \.csv, .*, \.inter, or compressed ones, in this folder"):
        run("table", tmp_path / "empty", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "ml1m"}, r"no data format named 'ml1m' \(did you mean ml-1m\?\); there are: demo, demo-features, "),
        ({"name": "demo", "source": "x"}, "demo is generated and takes no --source"),
        ({"name": "table", "max_rejects": 1.5}, "--max-rejects is 1.5; it must be a share from 0 to 1"),
        ({"name": "table", "min_user_actions": -1}, "--min-user-actions is -1; it must be 0 or more"),
        ({"name": "table", "item_column": ""}, "--user-column 'user', --item-column '' and .* must be different"),
        ({"name": "table", "timestamp_column": "user"}, "--user-column 'user', .* must be different columns"),
        ({"name": "demo", "max_rejects": 0.5}, r"demo takes no --max-rejects; leave it out \(it is for ml-100k, "),
        ({"name": "ml-100k", "seed": 3}, r"ml-100k takes no --seed; leave it out \(it is for demo, demo-features, "),
        ({"name": "ml-1m", "items": "i.csv"}, r"ml-1m takes no --items; leave it out \(it is for .*, table\)$"),
        ({"name": "amazon-toys", "delimiter": ";"}, r"amazon-toys takes no --delimiter; leave it out \(.* table\)$"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        PrepareOptions(**options)


ids = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), min_size=1, max_size=6
) | st.integers(0, 30).map(str)
triples = st.tuples(ids, ids, st.integers(-5, 5) | st.integers(1 - 2**62, 2**62 - 1))


@given(st.lists(triples, min_size=1, max_size=40))
def test_any_table_comes_back_without_its_duplicates(actions: list[tuple[str, str, int]]) -> None:
    # Dates in several units are refused.
    windows = [range(*window(unit)) for unit in UNITS]
    assume(sum(any(time in dates for _, _, time in actions) for dates in windows) < 2)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "in.csv"), Path(folder, "out")
        with source.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("user", "item", "timestamp"), *actions])
        run("table", source, out)
        distinct = list(dict.fromkeys(actions))
        expected = defaultdict(list)
        for user, item, time in sorted(distinct, key=lambda action: action[2]):
            expected[user].append((item, time))
        assert sequences(out) == expected
        loaded = load_dataset(out)
        raw = loaded.raw_ids()
        assert Counter(raw[item] for item in loaded.items_flat) == Counter(item for _, item, _ in distinct)
        assert (loaded.num_users, loaded.offsets[-1]) == (len(expected), len(distinct))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "file", "counts", "last", "of_a_user"),
    [
        # The paper's table of datasets: 109.70 actions of a user of ML-1M, which lacks 292 ratings here, and 8.62 of a
        # user of Beauty.
        ("ml-1m", "ml-1m.zip", (6_040, 3_615, 999_917), "201", 109.68),
        ("ml-100k", "ml-100k.zip", (943, 1_682, 100_000), "201", 91.01),
        ("sequences", "amazon-beauty/beauty.txt.gz", (40_226, 54_542, 353_962), "51", 8.62),
    ],
)
def test_real_data(
    name: str, file: str, counts: tuple[int, ...], last: str, of_a_user: float, real_data: Path, tmp_path: Path
) -> None:
    made = prepare(PrepareOptions(name, str(real_data / file), str(tmp_path / "out")), QUIET)
    assert (made["users"], made["items"], made["actions"]) == counts
    assert round(made["last_actions"][last]["actions"] / made["users"], 2) == of_a_user
    assert made["rejected_lines"] == 0
    loaded = load_dataset(tmp_path / "out")
    assert (loaded.num_users, loaded.num_items, len(loaded.items_flat)) == counts
