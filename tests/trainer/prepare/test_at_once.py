"""Two `prepare` into one directory at once: one of them is refused, and nothing that was written is lost."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from logitmix.common.files import only_writer
from logitmix.common.storage import path_of
from logitmix.trainer import api


def write_clicks(file: Path, item: str) -> Path:
    rows = [f"u{n % 4},{item}{n % 3},{n}" for n in range(40)]
    file.write_text("\n".join(["user,item,timestamp", *rows]) + "\n")
    return file


def test_of_two_into_a_new_directory_one_is_refused(tmp_path: Path) -> None:
    """The one that ends later finds the other at work, or its dataset."""
    sources = {name: write_clicks(tmp_path / f"{name}.csv", name) for name in ("a", "b")}
    out = tmp_path / "out"

    def prepare(name: str) -> str:
        try:
            api.prepare("table", source=sources[name], out=out)
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = dict(zip(sources, pool.map(prepare, sources), strict=True))
    (winner,) = (name for name, message in said.items() if not message)
    (message,) = filter(None, said.values())
    assert message in (
        f"another process writes {out}; wait for it, or give another --out",
        f"there is a dataset at {out} already; replace it with --overwrite, or choose another --out",
    )
    assert api.prepare("table", source=sources[winner], out=tmp_path / "again") == _description(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "again", "b.csv", "out"]


def _description(path: Path) -> object:
    from logitmix.trainer.data.description import read_description

    return read_description(path)


@pytest.mark.parametrize("words", [[], ["--overwrite"], ["--append", "{out}"]])
@pytest.mark.parametrize("place", ["{folder}/out", "file://{folder}/out"])
def test_who_comes_second_is_refused(
    tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: list[str], place: str
) -> None:
    """At a URL, by the processes of this host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, out = write_clicks(tmp_path / "a.csv", "a"), place.format(folder=tmp_path)
    if words:
        api.prepare("table", source=source, out=out)
    with only_writer(path_of(out)):
        command = ["prepare", "table", "--source", str(source), "--out", out, *(word.format(out=out) for word in words)]
        said = refusal(*command)
    assert said == f"logitmix: another process writes {out}; wait for it, or give another --out\n"
