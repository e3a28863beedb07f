"""MovieLens: the original zip, its folder, or the file of the ratings.

ml-1m has `ratings.dat` (`user::item::rating::timestamp`), ml-100k `u.data` (the same, tab-separated), ml-20m and
ml-latest `ratings.csv`. Titles, genres and what is known about users are read where their files are there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from rich.progress import Progress

from logitmix.trainer.data.config import PrepareOptions
from logitmix.trainer.data.delimited import Layout, read_delimited, read_rows
from logitmix.trainer.data.download import Download, find_source
from logitmix.trainer.data.files import InputFile, find_files, magic
from logitmix.trainer.data.raw import RawDataset, SideTable, gather
from logitmix.trainer.data.rejects import Rejects

RATINGS_DAT = Layout("::", fields=4, timestamp=3)
U_DATA = Layout("\t", fields=4, timestamp=3)
RATINGS_CSV = Layout(",", fields=4, timestamp=3, header="userId,movieId,rating,timestamp")

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

Fields = list[str]


@dataclass(frozen=True)
class SideFile:
    """A file about users or items, and what of its rows is kept."""

    name: str
    delimiter: str
    fields: int
    columns: dict[str, tuple[pa.DataType, Callable[[Fields], object]]]
    """Name -> type, and value of a row."""
    encoding: str = "latin-1"
    header: bool = False


def _field(place: int) -> tuple[pa.DataType, Callable[[Fields], object]]:
    return pa.string(), lambda row: row[place]


def _genres(of: Callable[[Fields], list[str]]) -> tuple[pa.DataType, Callable[[Fields], object]]:
    return pa.list_(pa.string()), of


def _flagged(row: Fields) -> list[str]:
    flags = zip(row[-len(GENRES_100K) :], GENRES_100K, strict=True)
    return [genre for flag, genre in flags if flag == "1"]


def _listed(row: Fields) -> list[str]:
    return [] if row[2] == "(no genres listed)" else row[2].split("|")


@dataclass(frozen=True)
class Files:
    """What a release consists of."""

    ratings: str
    layout: Layout
    items: SideFile
    users: SideFile | None = None


_ML_100K = Files(
    "u.data",
    U_DATA,
    SideFile("u.item", "|", 24, {"title": _field(1), "genres": _genres(_flagged)}),
    SideFile("u.user", "|", 5, {"gender": _field(2), "age": _field(1), "occupation": _field(3), "zip": _field(4)}),
)
_ML_1M = Files(
    "ratings.dat",
    RATINGS_DAT,
    SideFile("movies.dat", "::", 3, {"title": _field(1), "genres": _genres(_listed)}),
    SideFile("users.dat", "::", 5, {"gender": _field(1), "age": _field(2), "occupation": _field(3), "zip": _field(4)}),
)
_CSV = Files(
    "ratings.csv",
    RATINGS_CSV,
    SideFile("movies.csv", ",", 3, {"title": _field(1), "genres": _genres(_listed)}, "utf-8-sig", header=True),
)
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
    return RawDataset(actions, source, list(found.values()), items=tables[0], users=tables[1])


def _find(name: str, source: Path, release: Files) -> dict[str, InputFile]:
    """By name: the ratings, and the side files that are there."""
    if source.is_file() and magic(source)[:2] != b"PK":
        return {release.ratings: InputFile(source)}
    found = find_files(source, (release.ratings, *(side.name for side in (release.items, release.users) if side)))
    if release.ratings not in found:
        raise ValueError(
            f"{source}: there is no {release.ratings} in it; {name} needs the original zip, its folder or that file"
        )
    return found


def _read_side(file: InputFile, side: SideFile, rejects: Rejects, progress: Progress) -> SideTable:
    rows: Sequence[Fields] = list(
        read_rows(file, side.delimiter, side.fields, side.encoding, rejects, progress, side.header)
    )
    columns = {name: pa.array([of(row) for row in rows], kind) for name, (kind, of) in side.columns.items()}
    return SideTable(pa.array([row[0] for row in rows], pa.string()), columns)
