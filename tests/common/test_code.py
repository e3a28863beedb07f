"""What two hosts compare of the code that they run."""

import shutil
import tomllib
from pathlib import Path

import pytest

from logitmix.common import code as module
from logitmix.common import plugins
from logitmix.common.code import PACKAGES, code, source_digests
from logitmix.common.plugins import Plugin

ROOT = Path(__file__).parents[2]


def test_sources_are_digested_by_their_paths(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number) / "own"
        (folder / "within").mkdir(parents=True)
        for name in ("a.py", "b.c", "c.h", "within/d.toml", "e.txt", ".#a.py", "within/f.so"):
            (folder / name).write_text(name)
    (tmp_path / "1/own/b.c").write_text("other")
    (tmp_path / "2/own/within/g.py").write_text("")
    (tmp_path / "2/own/e.txt").write_text("other")
    first, edited, added = (source_digests(tmp_path / str(number)) for number in range(3))
    assert [*first] == ["own/a.py", "own/b.c", "own/c.h", "own/within/d.toml"]
    assert {name for name in first if first[name] != edited[name]} == {"own/b.c"}
    assert added == first | {"own/within/g.py": "e3b0c44298fc"}


def test_code_has_each_package_and_each_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {name.split(".")[1] for name in packed} == {*PACKAGES}
    found = code()
    for name in ("modules/losses/blockwise.py", "modules/losses/mol.c", "modules/tiles.h", "trainer/recipes/auto.toml"):
        assert len(found[f"{name} of logitmix"]) == 12
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in found)
    assert found["the version of torch"]
    monkeypatch.setattr(module, "compiled_library", lambda name: None)
    without = code()
    assert {without[name] for name in found if found[name] != without[name]} <= {"not there"}
    assert without["the compiled part for dropout"] == "not there" and without.keys() == found.keys()


def test_a_package_of_plugins_is_compared_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its version, nor by the module alone that is imported."""
    monkeypatch.setattr(plugins, "_loaded", {})
    for name in ("one", "other"):
        folder = tmp_path / name / "own"
        folder.mkdir(parents=True)
        for file in ("__init__.py", "kinds.py", "modules.py"):
            (folder / file).write_text(f"# {name}" if file == "modules.py" else "")
    found = []
    for name in ("one", "other"):
        plugin = plugins._plugin("own.kinds", str(tmp_path / name / "own/kinds.py"))
        assert plugin.place == tmp_path / name / "own"
        plugins._loaded["own"] = Plugin("own", "1.2", "", plugin.place)
        found.append(code())
    differ = {name for name in found[0] if found[0][name] != found[1][name]}
    assert differ == {"modules.py of the plugin own"}
    # A single file has its digest as its version.
    shutil.copy(tmp_path / "one/own/modules.py", tmp_path / "half.py")
    plugins._loaded = {"half.py": plugins._of_file(tmp_path / "half.py")}
    assert [name for name in code() if "half.py" in name] == ["the plugin half.py"]
