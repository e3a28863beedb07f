"""Plugins: registries of what settings choose by name, and the files and modules that add to them.

A plugin adds entries, such as `SCHEDULES["sqrt"] = sqrt`, when it is imported. Users name it by `--import FILE.py` or
`--import MODULE`, or import it in Python. An installed package names its module in an entry point of the group
logitmix.plugins. A TOML file names plugins in its list `plugins`; these are imported only if the command line names
them too, or has the flag `--trust-plugins`. docs/extending.md has the registries.
"""

import functools
import operator
import shlex
import sys
import traceback
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoints, PackageNotFoundError, entry_points, version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, TypeVar

from logitmix.common.files import file_digest, file_stamp
from logitmix.common.mappings import first_line
from logitmix.common.messages import say

T = TypeVar("T")

GROUP = "logitmix.plugins"


@dataclass(frozen=True)
class Plugin:
    """A plugin that this process has."""

    name: str
    """Of the installed package, of the module, or of the file."""
    version: str
    """Of the package, or the first digits of the file's SHA-256."""
    reference: str
    """What `--import` finds it by, the file's absolute path or the module; empty for an installed package, which needs
    none, and for a script, which would run again."""
    place: Path | None = None
    """The file that its code is in, or the folder of its package; None if it has no file."""


class Registry(UserDict[str, T]):
    """What settings choose by name, such as schedules: `REGISTRY[name] = entry` adds one. Instead of the entry it may
    be "module:attribute", which is imported when it is first needed.

    Raises ValueError for a name that is taken, and for an entry without one of the attributes `needs`.
    """

    def __init__(
        self, what: str, ours: Mapping[str, Any], needs: Sequence[str] = ("__call__",), instances: bool = False
    ) -> None:
        """`what`: the word for an entry. `ours`: the entries of logitmix. `instances`: an entry is no class."""
        super().__init__()
        self.what, self.needs, self.instances = what, needs, instances
        self.plugins: dict[str, Plugin] = {}
        """Where the others come from."""
        self._offers: list[tuple[type, str]] = []
        self.data.update(ours)

    def __setitem__(self, name: str, entry: T) -> None:
        if self.get(name, entry) is not entry:
            by = f"the plugin {self.plugins[name].name}" if name in self.plugins else "logitmix"
            raise ValueError(f"there is a {self.what} {name!r} already, of {by}; choose another name")
        if not isinstance(entry, str):
            self.check(name, entry)
        self.plugins[name] = _registering(sys._getframe(1).f_globals)
        super().__setitem__(name, entry)
        self._offer()

    def find(self, name: str) -> T:
        """The entry of that name. ValueError if its module cannot be imported, or it lacks something."""
        entry = self[name]
        if not isinstance(entry, str):
            return entry
        found = named(entry)
        self.check(name, found)
        return found

    def offer(self, settings: type, field: str) -> None:
        """Makes the names the possible values of a field of settings, in TOML and on the command line."""
        self._offers.append((settings, field))
        self._offer()

    def _offer(self) -> None:
        for settings, field in self._offers:
            settings.__annotations__[field] = self._type()

    def _type(self) -> Any:
        return Literal[tuple(self)]

    def check(self, name: str, entry: Any) -> None:
        """ValueError for an entry that lacks something."""
        if self.instances and isinstance(entry, type):
            raise ValueError(f"the {self.what} {name!r} is a class; give an instance, {entry.__name__}()")
        for needed in self.needs:
            if not hasattr(entry, needed):
                raise ValueError(f"the {self.what} {name!r} has no {needed}; see docs/extending.md")


class Kinds(Registry[Any]):
    """Classes of settings: `REGISTRY["mol"] = MoLConfig`, a frozen dataclass whose field `kind` is "mol". Its attribute
    `module` is the class or function that works by these settings, or "module:attribute", so that settings are read
    without importing it."""

    def check(self, name: str, entry: Any) -> None:
        super().check(name, entry)
        if not is_dataclass(entry) or name not in [of.default for of in fields(entry) if of.name == "kind"]:
            raise ValueError(f"the {self.what} {name!r} is not a dataclass of settings with kind: str = {name!r}")

    def _type(self) -> Any:
        for settings in self.values():
            settings.__annotations__["kind"] = super()._type()
        return functools.reduce(operator.or_, self.values())


def module_of(settings: Any) -> Any:
    """The class or function that works by these settings of a kind. ValueError where there is none, and for a class
    that lacks methods."""
    # Of the class, because a function would be bound to the instance.
    module = named(type(settings).module)
    if missing := getattr(module, "__abstractmethods__", ()):
        raise ValueError(f"{module.__name__} of kind {settings.kind} lacks {', '.join(sorted(missing))}")
    return module


def named(reference: Any) -> Any:
    """What "module:attribute" names; anything else is itself. ValueError for an exception in a plugin's module."""
    if not isinstance(reference, str):
        return reference
    try:
        return resolve_name(reference)
    except (Exception, SystemExit) as error:
        if reference.startswith("logitmix."):  # needs something that is not installed
            raise
        raise ValueError(f"{reference}: {_said(error)}") from None


_loaded: dict[str, Plugin] = {}
"""By name."""
_importing: list[Plugin] = []
"""What is being imported: all that its modules register is its own."""
_broken: dict[str, str] = {}
"""By the entry point of an installed plugin that could not be imported: a line that says why. It is not tried again,
because what it had registered before its error would be refused as registered twice."""
TRUST = "--trust-plugins"
_trusting: list[str] = []
"""Not empty once the command line has said TRUST."""


def plugins() -> list[Plugin]:
    """Those that this process has, in the order of their names."""
    return [_loaded[name] for name in sorted(_loaded)]


def flags() -> list[str]:
    """Returns the words by which another process gets the plugins of this one, and trusts as this one does."""
    return [*(word for reference in references() for word in ("--import", reference)), *_trusting]


def references() -> list[str]:
    """By which `--import` finds them, where they need it."""
    return [plugin.reference for plugin in plugins() if plugin.reference]


def trust_plugins() -> None:
    """From now on, `load_named` imports whatever files of settings name."""
    _trusting[:] = [TRUST]


def load_plugins(given: Iterable[str] = (), source: str = "--import") -> None:
    """Imports the installed plugins, and those given (`load_given`). ValueError for one that cannot be imported."""
    for line in load_installed():
        raise ValueError(line)
    load_given(given, source)


def load_given(given: Iterable[str], source: str = "--import") -> None:
    """Imports the plugins that are given as files or modules, unless this process has them. A file that is not there
    may be another of its name that was loaded, as on another host.

    Raises ValueError, which begins with `source`, for a plugin that is not there, and for an exception in one, with
    file and line.
    """
    for name in given:
        if not name.endswith(".py"):
            _import_module(name, source, "; pip install it, or give a file: --import FILE.py")
        elif Path(name).is_file() or Path(name).name not in _loaded:
            _import_file(Path(name), source)


def load_installed() -> list[str]:
    """Imports the installed plugins, unless this process has them. Returns a line for each one that cannot be imported,
    which says why and how to go on."""
    lines = []
    for entry in _installed(tuple((place, file_stamp(Path(place or "."))) for place in sys.path)):
        name = entry.dist.name if entry.dist else entry.name
        if entry.value not in _broken:
            try:
                _import_module(entry.module, f"the installed plugin {name} is broken", "")
            except ValueError as error:
                _broken[entry.value] = f"{error}; install one that works, or go on without it: pip uninstall {name}"
        if entry.value in _broken:
            lines.append(_broken[entry.value])
    return lines


def load_named(names: Sequence[str], source: str) -> None:
    """Loads the plugins that a file of settings names. To import a plugin is to run its code, and the file may be a
    stranger's, so one that this process lacks is imported only after `trust_plugins`, and a line names it.

    Args:
        names: Files and modules, as `--import` takes them.
        source: The file of settings, for messages.

    Raises:
        ValueError: A plugin is lacking and not trusted, or `load_plugins` refuses it.
    """
    load_plugins()
    missing = lacking(names)
    if missing and not _trusting:
        imports = " ".join(f"--import {shlex.quote(name)}" for name in missing)
        raise ValueError(
            f"{source} names a plugin, which is code, and the command line does not: add {imports} to run it, or "
            f"{TRUST} to run all that is named there; in Python, import it before"
        )
    for name in missing:
        say(f"{TRUST}: importing the plugin {name}, which {source} names")
    load_plugins(names, source)


def lacking(names: Iterable[str]) -> list[str]:
    """Returns those of the plugins that this process does not have, by files and modules as `--import` takes them."""
    return [
        name for name in names if (Path(name).name not in _loaded if name.endswith(".py") else name not in sys.modules)
    ]


@functools.lru_cache(maxsize=1)
def _installed(places: tuple[tuple[str, tuple[int, int, int] | None], ...]) -> EntryPoints:
    """Looked up anew where a folder of modules has changed: settings are read often, and this reads many files."""
    return entry_points(group=GROUP)


def require_plugins(needed: Mapping[str, str], source: str) -> None:
    """ValueError that names the first plugin, by name and version, that this process does not have. One of another
    version is said."""
    if needed:
        load_plugins()
    for name, version_of in needed.items():
        if name not in _loaded:
            how = f"--import PLACE/{name}" if name.endswith(".py") else f"pip install {name}, or --import MODULE"
            raise ValueError(f"{source} needs the plugin {name} ({version_of}): {how}; in Python, import it before")
        if (own := _loaded[name].version) != version_of:
            say(f"{source} was made with the plugin {name} {version_of}, and here is {own}")


def _import_module(name: str, source: str, remedy: str) -> None:
    """`remedy`: what to do where there is no such module."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # of a package around it
        spec = None
    except (Exception, SystemExit) as error:
        raise ValueError(f"{source}: {_said(error)}") from None
    if spec is None:
        raise ValueError(f"{source}: there is no module {name}{remedy}")
    file = spec.origin or ""
    _import(_plugin(name, file), file, source, lambda: import_module(name))


def _import_file(path: Path, source: str) -> None:
    if not path.is_file():
        raise ValueError(f"{source}: the plugin {path} is not there; give the place: --import PLACE/{path.name}")
    path = path.resolve()
    name, plugin = f"logitmix_plugin_{path.stem}", _of_file(path)
    if (other := _loaded.get(plugin.name)) and other.version == plugin.version:
        return
    if other:
        raise ValueError(f"{source}: {path} is another plugin than the {path.name} that is loaded; rename one of them")
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    # Dataclasses look up their module there.
    module = sys.modules[name] = module_from_spec(spec)
    _import(plugin, str(path), source, partial(spec.loader.exec_module, module))


def _import(plugin: Plugin, file: str, source: str, run: Callable[[], object]) -> None:
    _importing.append(plugin)
    try:
        run()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{source}: {_said(error, file)}") from None
    finally:
        _importing.pop()
    _loaded[plugin.name] = plugin


def _said(error: BaseException, file: str = "") -> str:
    """Returns the last line in `file` that led to an error, if there is one, and the error's message."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    places = [(file, line) for line in lines[-1:]]
    if isinstance(error, SyntaxError) and error.filename:
        places = [(error.filename, error.lineno)]
    message, kind = first_line(error), type(error).__name__
    named = message if kind in ("ValueError", message) else f"{kind}: {message}"
    return "".join(f"{name}:{line}: " for name, line in places) + named


def _registering(caller: Mapping[str, Any]) -> Plugin:
    """The plugin that registers something: the one that is being imported, or else the calling module."""
    if _importing:
        return _importing[-1]
    plugin = _plugin(caller["__name__"], caller.get("__file__") or "")
    return _loaded.setdefault(plugin.name, plugin)


def _plugin(module: str, file: str) -> Plugin:
    """What is known of a module, from where it was installed, or else from its file."""
    package, path = module.partition(".")[0], Path(file)
    if not path.is_file():
        place = None
    else:
        levels = module.count(".") + (path.name == "__init__.py")
        place = path.resolve().parents[levels - 1] if levels else path.resolve()
    for entry in entry_points(group=GROUP):
        if entry.module.partition(".")[0] == package and entry.dist is not None:
            return Plugin(entry.dist.name, entry.dist.version, "", place)
    with suppress(PackageNotFoundError):
        return Plugin(package, version(package), module, place)
    if place is None:
        return Plugin(module, "", "")
    plugin = _of_file(path)
    if module == "__main__":
        return replace(plugin, reference="")
    # A file within a package needs the package.
    if place.is_dir():
        return replace(plugin, name=module, reference=module, place=place)
    return plugin


def _of_file(path: Path) -> Plugin:
    return Plugin(path.name, file_digest(path)[:12], str(path.resolve()), path.resolve())
