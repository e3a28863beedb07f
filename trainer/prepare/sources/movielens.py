"""MovieLens: the original zip, its folder, or the file of the ratings.

ml-1m has `ratings.dat` (`user::item::rating::timestamp`), ml-100k `u.data` (the same, tab-separated), ml-20m and
ml-latest `ratings.csv`. Titles, genres and features of users are read if their files exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from logitmix.trainer.data.engine import scratch
from logitmix.trainer.data.times import Clock
from logitmix.trainer.prepare.download import Download, find_source
from logitmix.trainer.prepare.files import InputFile, find_files, is_zip
from logitmix.trainer.prepare.scan import literal
from logitmix.trainer.prepare.tables import Job, SideTable, side_table
from logitmix.trainer.prepare.text import Layout, as_number, fixed_keys, read_text

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


@dataclass(frozen=True)
class SideFile:
    """A file about users or items, and what is kept of it."""

    name: str
    layout: Layout
    """The first column is the id."""
    columns: dict[str, str]
    """Expressions in SQL by the features' names, in terms of the file's columns."""
    encoding: str = "latin-1"


@dataclass(frozen=True)
class Release:
    """The files of one."""

    ratings: str
    layout: Layout
    items: SideFile
    users: SideFile | None = None


YEAR = r"nullif(regexp_extract({title}, '\((\d{{4}})\)\s*$', 1), '')"
"""That of the title, Name (1995)."""
RELEASED = r"nullif(regexp_extract({date}, '^\d\d-[A-Z][a-z]{{2}}-(\d{{4}})$', 1), '')"
"""That of the release date in ml-100k, 01-Jan-1995."""
_FLAGGED = ", ".join(f"case when {{g{at}}} = '1' then {literal(name)} end" for at, name in enumerate(GENRES_100K))
_MOVIES = {
    "title": "{title}",
    "genres": "case when {genres} = '(no genres listed)' then [] else string_split({genres}, '|') end",
    "year": YEAR,
}
_MOVIES_100K = {
    "title": "{title}",
    "genres": f"list_filter([{_FLAGGED}], lambda genre: genre is not null)",
    "year": f"coalesce({YEAR}, {RELEASED})",
}
_USERS = {name: f"{{{name}}}" for name in ("gender", "age", "occupation", "zip")}


def _lines(delimiter: str, columns: Sequence[str], header: str = "") -> Layout:
    return Layout(delimiter, columns, quotes=bool(header), header=header, fixed=True)


_FLAGS = [f"g{place}" for place in range(len(GENRES_100K))]
_ML_100K = Release(
    "u.data",
    U_DATA,
    SideFile("u.item", _lines("|", ["id", "title", "date", "_", "_", *_FLAGS]), _MOVIES_100K),
    SideFile("u.user", _lines("|", ["id", "age", "gender", "occupation", "zip"]), _USERS),
)
_ML_1M = Release(
    "ratings.dat",
    RATINGS_DAT,
    SideFile("movies.dat", _lines("::", ["id", "title", "genres"]), _MOVIES),
    SideFile("users.dat", _lines("::", ["id", *_USERS]), _USERS),
)
_TITLES = _lines(",", ["id", "title", "genres"], "movieId,title,genres")
_CSV = Release("ratings.csv", RATINGS_CSV, SideFile("movies.csv", _TITLES, _MOVIES, ""))
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
    file = replace(file, encoding=side.encoding)
    raw = read_text(file, fixed_keys("id"), job.rejects, job.progress, scratch(), side.layout)
    columns = {name: expression.format(**raw.columns) for name, expression in side.columns.items()}
    return side_table([replace(raw, columns={"id": raw.columns["id"]} | columns)], job.rejects)
