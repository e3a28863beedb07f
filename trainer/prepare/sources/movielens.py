"""MovieLens: the original zip, its folder, or the file of the ratings.

ml-1m has `ratings.dat` (`user::item::rating::timestamp`), ml-100k `u.data` (the same, tab-separated), ml-20m and
ml-latest `ratings.csv`. Titles, genres and features of users are read if their files exist.
"""

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import pyarrow as pa

from logitmix.common.mappings import counted
from logitmix.trainer.data.times import Clock
from logitmix.trainer.prepare.download import Download, find_source
from logitmix.trainer.prepare.files import InputFile, find_files, is_zip
from logitmix.trainer.prepare.tables import Job, SideTable
from logitmix.trainer.prepare.text import Layout, as_number, fixed_keys, line_blocks, read_text

LARGEST = 32 << 20
"""Bytes of a file about users or items, decompressed: its rows are Python objects, 30 times as large. Those of
MovieLens have up to 4 MiB."""
COLUMNS = ("user", "item", "rating", "timestamp")
RATINGS_DAT = Layout("::", COLUMNS, quotes=False, fixed=True)
U_DATA = Layout("\t", COLUMNS, quotes=False, fixed=True)
RATINGS_CSV = Layout(",", COLUMNS, header="userId,movieId,rating,timestamp", fixed=True)

_URL = "https://files.grouplens.org/datasets/movielens"
DOWNLOADS = {
    "ml-100k": Download(f"{_URL}/ml-100k.zip", "md5:0e33842e24a9c977be4e0107933c0723"),
    "ml-1m": Download(f"{_URL}/ml-1m.zip", "md5:c4d9eecfca2ab87c1945afe126590906"),
    "ml-20m": Download(f"{_URL}/ml-20m.zip", "md5:cd245b17a1ae2cc31bb14903e1204af3"),
}
"""GroupLens publishes MD5 sums beside the archives, so these are MD5."""

GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
"""The 0/1 fields at the end of a line of u.item, in order."""

FEATURE_KINDS: dict[str, str] = {
    "genres": "ids", "year": "id", "gender": "id", "age": "id", "occupation": "id", "zip": "id", "rating": "number",
}  # fmt: skip

Row = list[str]
Columns = dict[str, Callable[[Row], object]]
"""By name: the value of a row, which is text, or texts for genres."""


def _genres(row: Row) -> list[str]:
    return [] if row[2] == "(no genres listed)" else row[2].split("|")


def _flagged_genres(row: Row) -> list[str]:
    flags = zip(row[-len(GENRES_100K) :], GENRES_100K, strict=True)
    return [genre for flag, genre in flags if flag == "1"]


def _year(row: Row) -> str | None:
    """The year in the title, "Name (1995)", or in ml-100k's release date, 01-Jan-1995."""
    found = re.search(r"\((\d{4})\)\s*$", row[1]) or re.fullmatch(r"\d\d-[A-Z][a-z]{2}-(\d{4})", row[2])
    return found[1] if found else None


@dataclass(frozen=True)
class SideFile:
    """A file about users or items, and the fields of its rows that are kept. The id is the first field."""

    name: str
    delimiter: str
    fields: int
    columns: Columns
    encoding: str = "latin-1"
    header: bool = False


@dataclass(frozen=True)
class Release:
    """The files of one."""

    ratings: str
    layout: Layout
    items: SideFile
    users: SideFile | None = None


_MOVIES: Columns = {"title": itemgetter(1), "genres": _genres, "year": _year}
_USERS: Columns = {"gender": itemgetter(1), "age": itemgetter(2), "occupation": itemgetter(3), "zip": itemgetter(4)}
_ML_100K = Release(
    "u.data",
    U_DATA,
    SideFile("u.item", "|", 24, _MOVIES | {"genres": _flagged_genres}),
    SideFile("u.user", "|", 5, _USERS | {"gender": itemgetter(2), "age": itemgetter(1)}),
)
_ML_1M = Release(
    "ratings.dat",
    RATINGS_DAT,
    SideFile("movies.dat", "::", 3, _MOVIES),
    SideFile("users.dat", "::", 5, _USERS),
)
_CSV = Release("ratings.csv", RATINGS_CSV, SideFile("movies.csv", ",", 3, _MOVIES, "utf-8", header=True))
RELEASES = {"ml-100k": _ML_100K, "ml-1m": _ML_1M, "ml-20m": _CSV, "ml-latest": _CSV}


def read(job: Job) -> None:
    page = "https://grouplens.org/datasets/movielens/latest/"
    reason = "changes over time and so has no fixed digest"
    job.source = find_source(job.options, job.progress, DOWNLOADS, reason, page)
    release = RELEASES[job.options.name]
    found = _find(job.options.name, job.source, release)
    job.files, job.kinds = list(found.values()), FEATURE_KINDS
    job.items, job.users = (
        _read_side(found[side.name], side, job) if side and side.name in found else SideTable()
        for side in (release.items, release.users)
    )
    keys = fixed_keys("user", "item", "timestamp")
    raw = read_text(found[release.ratings], keys, job.rejects, job.progress, job.duck, release.layout)
    raw.columns["rating"] = as_number(raw.columns["rating"])
    job.read_actions([raw], Clock(dates=False))


def _find(name: str, source: Path, release: Release) -> dict[str, InputFile]:
    """By name: the ratings, and the side files that are there."""
    if source.is_file() and not is_zip(source):
        return {release.ratings: InputFile(source)}
    found = find_files(source, (release.ratings, *(side.name for side in (release.items, release.users) if side)))
    if release.ratings not in found:
        raise ValueError(
            f"{source}: there is no {release.ratings} in it; {name} needs the original zip, its folder or that file"
        )
    return found


def _read_side(file: InputFile, side: SideFile, job: Job) -> SideTable:
    rows = list(_rows(file, side, job))
    types = {"genres": pa.list_(pa.string())}
    columns = {
        name: pa.array([value(row) for row in rows], types.get(name, pa.string()))
        for name, value in side.columns.items()
    }
    return SideTable(pa.array([row[0] for row in rows], pa.string()), columns)


def _rows(file: InputFile, side: SideFile, job: Job) -> Iterator[Row]:
    """The rows of a small file, one a line, with CSV quoting if the delimiter is a comma. ValueError if it has more
    than LARGEST bytes."""
    read, rejects = 0, job.rejects
    for first, block in line_blocks(file, job.progress):
        read += len(block)
        if read > LARGEST:
            raise ValueError(f"{file.label}: is larger than {LARGEST >> 20} MiB; is it the right file?")
        for number, raw in enumerate(block.split(b"\n"), start=first):
            line = raw.rstrip(b"\r")
            if not line or (side.header and number == 1):
                continue
            rejects.lines += 1
            try:
                text = line.decode(side.encoding)
                row = next(csv.reader([text], strict=True)) if side.delimiter == "," else text.split(side.delimiter)
            except UnicodeDecodeError as error:
                rejects.add(file.label, number, f"not {side.encoding} ({error.reason})", line)
            except csv.Error as error:
                carriage = "\r" in text and "new-line" in str(error)
                rejects.add(file.label, number, f"not CSV ({'a carriage return' if carriage else error})", line)
            else:
                if len(row) == side.fields:
                    yield row
                else:
                    rejects.add(file.label, number, f"has {counted(len(row), 'field')}, not {side.fields}", text)
