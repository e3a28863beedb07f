"""Folders of tables: every file is read or named, in the order of the numbers in the names."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reading import decoded, prepared

from logitmix.trainer.prepare.files import find_parts

HEADER = "user,item,timestamp\n"


def row(name: str) -> str:
    return f"{HEADER}u,{name},1\n"


def write(folder: Path, **texts: str | bytes) -> Path:
    """Files by name, with __ for a dot and / for a slash."""
    for name, text in texts.items():
        path = folder / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def test_every_file_is_read_or_named(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "in",
        a__csv=row("a"),
        B__CSV=row("b"),
        c__csv__bz2=bz2.compress(row("c").encode()),
        d__csv__xz=lzma.compress(row("d").encode()),
        E__Tsv__GZ=gzip.compress(row("e").replace(",", "\t").encode()),
        empty__csv="",
        h__jsonl__gz=gzip.compress(b'{"user": "u", "item": "h", "timestamp": 1}\n'),
        f__txt=row("f"),
        README="about",
        **{"deep/er/g__csv": row("g"), "_temporary/h__csv": row("h"), "deep/.h__csv": row("h"), "_SUCCESS": ""},
    )
    pq.write_table(pa.table({"user": ["u"], "item": ["i"], "timestamp": [1]}), folder / "part-00000")
    (folder / "gone.csv").symlink_to(tmp_path / "nowhere")
    dataset, said = prepared(folder)
    assert dataset.raw_ids() == ["a", "b", "c", "d", "e", "g", "h", "i"]
    assert said == (
        f"{folder}: not read, as the names end in none of .parquet, .csv, .tsv, .jsonl, .ndjson, .json, .inter: "
        "3 files, such as README\n"
        f"{folder}: not read, as there is nothing in them: 1 file, such as empty.csv\n"
    )
    assert find_parts(folder)[1] == ["README", "f.txt", "gone.csv"]
    read = json.loads(dataset.description())["source"]["sha256"]
    packed = {"c.csv.bz2", "d.csv.xz", "E.Tsv.GZ", "h.jsonl.gz"}
    assert set(read) == {"a.csv", "B.CSV", "deep/er/g.csv", "part-00000"} | packed


def test_what_some_files_lack_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a__csv="user,item,timestamp,price\nu,a,1,2.5\n", b__csv=row("b"), c__csv=row("c"))
    items = write(tmp_path / "items", a__csv="item,size\na,1\n", b__csv="item\nb\n")
    said = prepared(folder, items=items)[1]
    of = "its values are missing in {} files, such as b.csv, which have no such column\n"
    assert "column price: " + of.format("2 of 3") in said and "column size: " + of.format("1 of 2") in said
    assert "missing" not in prepared(write(tmp_path / "all", a__csv=row("a"), b__csv=row("b")))[1]


def test_types_that_are_no_one_column_are_named_with_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, tags in (("a", ["x"]), ("b", [["x"]])):
        table = pa.table({"user": ["u"], "item": [name], "timestamp": [1], "tags": tags})
        pq.write_table(table, folder / f"{name}.parquet")
    said = r"^column tags is of type varchar in a\.parquet and varchar\[\] in b\.parquet; write it in one type$"
    with pytest.raises(ValueError, match=said):
        prepared(folder)


def test_side_tables_are_read_likewise(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a__csv=row("x"))
    sides = write(tmp_path / "sides", **{"lang=no/A__CSV": "item,size\nx,2\n", "lang=ch/a__csv": "item,size\ny,3\n"})
    write(sides, note__txt="?")
    dataset, said = prepared(folder, items=sides)
    assert f"{sides}: not read" in said and "1 file, such as note.txt" in said
    assert set(json.loads(dataset.description())["source"]["items"]["sha256"]) == {"lang=no/A.CSV", "lang=ch/a.csv"}


@pytest.mark.parametrize("name", ["day-{}", "date=2026-01-01/day-{}", "deep/hour=1/day-{}", "day={}/part-0"])
def test_parts_are_in_the_order_of_their_numbers(name: str, tmp_path: Path) -> None:
    days = {f"{name.format(day)}__csv": f"user,item\nu,i{day:02}\n" for day in range(1, 13)}
    dataset, _ = prepared(write(tmp_path / "in", **days), timestamp_column="")
    assert [dataset.raw_ids()[item] for item in dataset.items_flat] == [f"i{day:02}" for day in range(1, 13)]


@pytest.fixture
def partitioned(tmp_path: Path) -> Path:
    """Two days of two shops, one of them unknown."""
    folder = tmp_path / "in"
    for day in (1, 2):
        for shop in ("a%2Fb", "__HIVE_DEFAULT_PARTITION__"):
            path = folder / f"date=2026-01-0{day}" / f"shop={shop}" / "part-0.parquet"
            path.parent.mkdir(parents=True)
            rows = {"user": ["u", "u", "v"], "item": [day, day + 2, day + len(shop)], "timestamp": [day, day, day]}
            pq.write_table(pa.table(rows), path)
    return folder


def test_names_of_subfolders_are_columns(partitioned: Path) -> None:
    """Of the actions, dates are no feature."""
    dataset, said = prepared(partitioned)
    assert decoded(dataset, "event")["shop"].count("a/b") == 6
    assert decoded(dataset, "event")["shop"].count("") == 6
    assert "states a kind: date (dates, but not of items" in said


def test_names_of_subfolders_can_be_the_time_and_in_conditions(partitioned: Path) -> None:
    dataset, _ = prepared(partitioned, timestamp_column="date", where=("shop = a/b", "date >= 2026-01-02"))
    assert set(dataset.timestamps_flat.tolist()) == {1767312000}
    assert len(dataset.items_flat) == 3


def test_a_file_s_own_column_counts_before_the_folder_s(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", **{"item=z/a__csv": row("a"), "item=z/b__csv": "user,timestamp\nu,2\n"})
    assert prepared(folder)[0].raw_ids() == ["a", "z"]


def test_messages_name_the_subfolder(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", **{"day=1/a__csv": row("a"), "day=2/a__csv": f"{HEADER}u,b\n"})
    _, said = prepared(folder, max_rejects=0.5)
    assert said.startswith("day=2/a.csv:2: has 2 fields, not 3\n")


@pytest.mark.parametrize(
    ("mark", "program"),
    [("_delta_log/0__json", "Delta Lake"), ("metadata/v1__metadata__json", "Iceberg"), (".hoodie/x", "Hudi")],
)
def test_tables_with_removed_rows_are_refused(mark: str, program: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", **{"data/a__csv": row("a"), mark: "{}"})
    with pytest.raises(ValueError, match=rf"^{folder}: is a table of {program}.* export it to Parquet and give that$"):
        prepared(folder)


def test_a_folder_of_other_files_names_one(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a__txt=row("a"), b__csv__zip=b"PK")
    with pytest.raises(ValueError, match=r"in: no \.parquet, .* in this folder \(but 2 files, such as a\.txt\); give"):
        prepared(folder)
    write(folder, c__csv__zst=b"\x28\xb5\x2f\xfd...")
    with pytest.raises(ValueError, match=r"c\.csv\.zst: is compressed by zstd; decompress it first \(zstd -d\)$"):
        prepared(folder)


def test_a_link_in_a_circle_is_one_line(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a__csv=row("a"))
    (folder / "again").symlink_to(folder)
    with pytest.raises(ValueError, match=r"again: is a link to a folder that it lies in; remove it$"):
        prepared(folder)
