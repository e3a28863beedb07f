"""MovieLens: the original zip, its folder, or the file of the ratings.

ml-1m has `ratings.dat` (`user::item::rating::timestamp`), ml-100k `u.data` (the same, tab-separated), ml-20m and
ml-latest `ratings.csv`. Titles, genres and features of users are read if their files exist.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
from rich.progress import Progress

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.delimited import Layout, read_delimited, read_rows
from logitmix.trainer.data.download import Download, find_source
from logitmix.trainer.data.files import InputFile, find_files, is_zip
from logitmix.trainer.data.raw import RawDataset, SideTable, gather
from logitmix.trainer.data.rejects import Rejects

RATING = {"rating": 2}
RATINGS_DAT = Layout("::", fields=4, timestamp=3, numbers=RATING)
U_DATA = Layout("\t", fields=4, timestamp=3, numbers=RATING)
RATINGS_CSV = Layout(",", fields=4, timestamp=3, header="userId,movieId,rating,timestamp", numbers=RATING)

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


def read(options: PrepareOptions, rejects: Rejects, progress: Progress) -> RawDataset:
    page = "https://grouplens.org/datasets/movielens/latest/"
    source = find_source(options, progress, DOWNLOADS, "changes over time and so has no fixed digest", page)
    release = RELEASES[options.name]
    found = _find(options.name, source, release)
    tables = [
        _read_side(found[side.name], side, rejects, progress) if side and side.name in found else SideTable()
        for side in (release.items, release.users)
    ]
    actions = gather(read_delimited(found[release.ratings], release.layout, rejects, progress))
    return RawDataset(actions, source, list(found.values()), items=tables[0], users=tables[1], kinds=FEATURE_KINDS)


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


def _read_side(file: InputFile, side: SideFile, rejects: Rejects, progress: Progress) -> SideTable:
    rows = list(read_rows(file, side.delimiter, side.fields, side.encoding, rejects, progress, side.header))
    types = {"genres": pa.list_(pa.string())}
    columns = {
        name: pa.array([value(row) for row in rows], types.get(name, pa.string()))
        for name, value in side.columns.items()
    }
    return SideTable(pa.array([row[0] for row in rows], pa.string()), columns)
