import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from logitmix.common import plugins
from logitmix.common.mappings import from_mapping
from logitmix.common.plugins import (
    TRUST,
    Kinds,
    Registry,
    flags,
    load_installed,
    load_named,
    load_plugins,
    require_plugins,
    trust_plugins,
)
from logitmix.trainer.schedule import SCHEDULES


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing stays registered."""
    for name, empty in (("_loaded", {}), ("_broken", {}), ("_trusting", [])):
        monkeypatch.setattr(plugins, name, empty)
    before = dict(SCHEDULES.data)
    yield
    SCHEDULES.data = before
    SCHEDULES._offer()
    for name in [name for name in sys.modules if name.startswith("logitmix_plugin_")]:
        del sys.modules[name]


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


HALF = "from logitmix.trainer.schedule import SCHEDULES\nSCHEDULES['half'] = lambda passed: 0.5\n"


def test_a_file_is_loaded_once_and_is_known_by_its_digest(tmp_path: Path) -> None:
    file = written(tmp_path / "half.py", HALF)
    for _ in range(2):
        load_plugins([file])
    assert SCHEDULES.find("half")(0.1) == 0.5
    (plugin,) = plugins.plugins()
    assert (plugin.name, plugin.reference, len(plugin.version)) == ("half.py", file, 12)
    assert SCHEDULES.plugins["half"] is plugin and "cosine" not in SCHEDULES.plugins
    # On another host, where it is elsewhere, another copy was given.
    load_plugins([str(tmp_path / "elsewhere/half.py")])
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"other/half\.py is another plugin than the half\.py that is loaded; rename"):
        load_plugins([written(tmp_path / "other/half.py", HALF.replace("0.5", "0.25"))])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HALF.replace("half", "cosine"), r"half\.py:2: there is a schedule 'cosine' already, of logitmix; choose"),
        (HALF + HALF, r"half\.py:4: there is a schedule 'half' already, of the plugin half\.py; choose another name"),
        (HALF.replace("lambda passed: 0.5", "0.5"), r"half\.py:2: the schedule 'half' has no __call__; see docs/ext"),
        ("\n1 / 0", r"half\.py:2: ZeroDivisionError: division by zero"),
        ("\nhalf = (", r"half\.py:2: SyntaxError: '\(' was never closed"),
        ("import sys\nsys.exit('no')", r"half\.py:2: SystemExit: no"),
    ],
)
def test_a_mistake_in_a_plugin_is_a_line_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^--import: .*{message}"):
        load_plugins([written(tmp_path / "half.py", text)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("there/is/none.py", r"^run/config\.toml: the plugin there/is/none\.py is not there; give the place: --im"),
        ("of_nobody.at_all", r"^run/config\.toml: there is no module of_nobody\.at_all; pip install it, or give a"),
    ],
)
def test_a_plugin_that_is_not_there_is_named(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_plugins([given], "run/config.toml")


def test_what_an_export_needs_is_refused_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^x needs the plugin half\.py \(123\): --import PLACE/half\.py; in Py"):
        require_plugins({"half.py": "123"}, "x")
    with pytest.raises(ValueError, match=r"^x needs the plugin own \(1\.2\): pip install own, or --import MODULE"):
        require_plugins({"own": "1.2"}, "x")
    load_plugins([written(tmp_path / "half.py", HALF)])
    (plugin,) = plugins.plugins()
    require_plugins({"half.py": plugin.version}, "x")
    assert capsys.readouterr().err == ""
    require_plugins({"half.py": "123"}, "x")
    assert capsys.readouterr().err == f"x was made with the plugin half.py 123, and here is {plugin.version}\n"


def test_a_module_that_a_program_imports_is_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "own_half.py", HALF)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("own_half")
    assert [plugin.reference for plugin in plugins.plugins()] == plugins.references() == [file]
    # A run names it by its file; it is not loaded anew.
    load_plugins([file])
    del sys.modules["own_half"]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = HALF) -> None:
    """A package that is a plugin, in a folder where modules are looked for; without its module if there is no text."""
    info = folder / "own-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[logitmix.plugins]\nany = own_half\n")
    if text:
        written(folder / "own_half.py", text)
    monkeypatch.syspath_prepend(folder)


def test_a_package_that_is_installed_needs_no_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    program = """
import sys; sys.path.insert(0, sys.argv[1])
from logitmix.common import plugins
plugins.load_plugins()
from logitmix.trainer.schedule import SCHEDULES
(own,) = plugins.plugins()
print(own.name, own.version, own.place, own.reference, plugins.references(), SCHEDULES.find("half")(1))
"""
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == f"own 1.2 {tmp_path}/own_half.py  [] 0.5"


BREAKS = [
    (HALF + "1 / 0", r"own_half\.py:3: ZeroDivisionError: division by zero"),
    ("", "there is no module own_half"),
]


@pytest.mark.parametrize(("text", "why"), BREAKS)
def test_an_installed_package_that_is_broken_is_named_once(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, text)
    (line,) = load_installed()
    assert re.fullmatch(
        rf"the installed plugin own is broken: .*{why}; install one that works, or go on without it: pip uninstall own",
        line,
    )
    # What it registered before its error is not refused as registered twice.
    assert load_installed() == [line] and plugins.plugins() == []
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        load_plugins()


def test_what_a_file_names_is_imported_if_the_command_line_trusts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, gone = written(tmp_path / "half of it.py", HALF), str(tmp_path / "gone.py")
    written(tmp_path / "own_module.py", HALF.replace("half", "other"))
    monkeypatch.syspath_prepend(tmp_path)
    message = (
        "run/config.toml names a plugin, which is code, and the command line does not: add "
        f"--import '{file}' --import {gone} --import own_module to run it, or --trust-plugins to run all that "
        "is named there; in Python, import it before"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_named([file, gone, "own_module"], "run/config.toml")
    # Not even the package around a module is imported.
    with pytest.raises(ValueError, match=r"add --import own_module\.within to run it"):
        load_named(["own_module.within"], "run/config.toml")
    assert not {"half", "other"} & {*SCHEDULES} and "own_module" not in sys.modules
    load_plugins([file, "own_module"])
    load_named([file, "own_module"], "run/config.toml")
    assert capsys.readouterr().err == "" and flags() == ["--import", file, "--import", str(tmp_path / "own_module.py")]
    del sys.modules["own_module"]

    other = written(tmp_path / "third.py", HALF.replace("half", "third"))
    trust_plugins()
    for _ in range(2):
        load_named([other], "run/config.toml")
    assert "third" in SCHEDULES and flags()[-1] == TRUST
    assert capsys.readouterr().err == f"--trust-plugins: importing the plugin {other}, which run/config.toml names\n"


def test_an_entry_may_be_imported_when_it_is_needed() -> None:
    registry = Registry[object]("thing", {"path": "pathlib:Path", "none": "pathlib:Nothing", "no": "pathlib:__doc__"})
    assert registry.find("path") is Path
    with pytest.raises(
        ValueError, match=r"^pathlib:Nothing: AttributeError: module 'pathlib' has no attribute 'Nothing'$"
    ):
        registry.find("none")
    with pytest.raises(ValueError, match=r"^the thing 'no' has no __call__"):
        registry.find("no")
    made = Registry[object]("thing", {}, needs=(), instances=True)
    with pytest.raises(ValueError, match=r"^the thing 'path' is a class; give an instance, Path\(\)$"):
        made["path"] = Path


@dataclass(frozen=True)
class Round:
    kind: str = "round"
    radius: int = 1


@dataclass(frozen=True)
class Square:
    kind: str = "square"
    side: int = 1


@dataclass(frozen=True)
class Drawing:
    shape: Round = Round()
    color: str = "red"


def test_what_is_registered_later_can_be_chosen() -> None:
    shapes, colors = Kinds("shape", {"round": Round}, needs=()), Registry[int]("color", {"red": 1}, needs=())
    shapes.offer(Drawing, "shape")
    colors.offer(Drawing, "color")
    tree = {"shape": {"kind": "square", "side": 2}, "color": "blue"}
    with pytest.raises(ValueError, match=r"^here: shape\.kind is 'square'"):
        from_mapping(Drawing, tree, "here")
    shapes["square"], colors["blue"] = Square, 2
    assert from_mapping(Drawing, tree, "here") == Drawing(Square(side=2), "blue")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^the shape 'circle' is not a dataclass of settings with kind: str"):
        shapes["circle"] = Round
