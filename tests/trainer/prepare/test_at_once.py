"""Two `prepare` into one directory at once: the second one is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from logitmix.common.files import only_writer
from logitmix.common.storage import path_of
from logitmix.trainer import api


@pytest.mark.parametrize("words", [[], ["--overwrite"], ["--append", "{out}"]])
@pytest.mark.parametrize("place", ["{folder}/out", "file://{folder}/out"])
def test_who_comes_second_is_refused(
    tmp_path: Path, refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: list[str], place: str
) -> None:
    """At a URL, by the processes of this host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, out = tmp_path / "a.csv", place.format(folder=tmp_path)
    source.write_text("user,item,timestamp\n" + "".join(f"u{n % 4},i{n % 3},{n}\n" for n in range(40)))
    if words:
        api.prepare("table", source=source, out=out)
    with only_writer(path_of(out)):
        command = ["prepare", "table", "--source", str(source), "--out", out, *(word.format(out=out) for word in words)]
        said = refusal(*command)
    assert said == f"logitmix: another process writes {out}; wait for it, or give another --out\n"
