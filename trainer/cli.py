"""The command line: its usage, its commands, its errors and exit statuses."""

import contextlib
import faulthandler
import importlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from logitmix.common.driver import has_driver, why_it_does_not_load
from logitmix.common.mappings import nearest
from logitmix.common.messages import naming_urls, say, say_of_disk
from logitmix.common.plugins import load_given, load_installed, trust_plugins
from logitmix.common.versions import versions
from logitmix.launch.processes import (
    STOPPED,
    USER_ERROR,
    Stopped,
    end_lost,
    ended_by_a_mistake,
    is_main,
    launched,
    note_mistake,
)
from logitmix.trainer.commands.flags import take_imports
from logitmix.trainer.config import recipe_names
from logitmix.trainer.prepare.registry import SOURCES
from logitmix.trainer.quiet import quietly

OPTIONS = ("-h", "--help", "--version")
"""Instead of a command."""
WITHOUT_PLUGINS = (*OPTIONS, "doctor")
"""These work, too, where an installed plugin cannot be imported; doctor lists it."""

USAGE = """\
usage: logitmix COMMAND ...   (logitmix COMMAND --help tells more)

  prepare NAME [--source PATH] [--out DIR]          raw files -> dataset directory
  check DIR                                         what a dataset directory of another program lacks
  train RECIPE [--section.field VALUE ...] [--run DIR]
                                                    alone, on N ranks of this host with --processes N, or under
                                                    torchrun or torchx with the same words
  plan RECIPE [--world-size 8] [--device cuda]      where a job's tables would be placed, and the memory of its ranks
  evaluate RUN                                      metrics of the best checkpoint over the whole corpus
  compare DATASET --minutes M                       simple and learned methods in equal time, with intervals
  report RUN [RUN ...] [--out FILE]                 which run is best, curves and settings as one HTML page
  export RUN --out DIR                              best checkpoint -> serving directory
  fold DIR --deltas FOLDER --out DIR                a serving directory and its deltas -> serving directory
  retrieve DIR --history 1,2,3 [-k 10]              the top items for a history
  recommend DIR --data.path DATASET --out FILE      the top items for all users of a dataset
  serve DIR [--port 8080]                           answers over HTTP, with a page to try it out
  update-items DIR --items FILE [--remove FILE]     items of a serving directory added, changed and removed
  rollback DIR [--to N]                             the export that was there before, in place of the one that is
  doctor                                            what this machine has, and what is missing or does not work

  --version                                         of logitmix and the libraries that must match
  --import FILE.py | --import MODULE                with every command: a plugin (docs/extending.md)
  --trust-plugins                                   with every command: import the plugins that runs and recipes name

datasets: {names}
recipes:  {recipes}"""
COMMANDS = tuple(re.findall(r"^  ([a-z]\S*) ", USAGE, re.MULTILINE))
"""Each is a module of `commands` with its `Arguments` and `run(words)`, loaded when it is called."""

MAPPING = ("export", "fold", "retrieve", "recommend", "serve", "update-items")
"""Commands that map an export's files: who truncates one ends them by SIGBUS, of which at least a line shall tell."""


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in (*COMMANDS, *OPTIONS):
        _load_plugins("--help")
        print(_usage(), file=sys.stderr)
        if words:
            print(f"\nlogitmix: no command {words[0]!r}{nearest(words[0], list(COMMANDS))}", file=sys.stderr)
        raise SystemExit(USER_ERROR)
    if words[0] in MAPPING and not faulthandler.is_enabled():
        faulthandler.enable()
    if ended_by_a_mistake():
        raise SystemExit(USER_ERROR)
    try:
        try:
            with quietly(), naming_urls():
                others, given, trusting = take_imports(words[1:])
                if trusting:
                    trust_plugins()
                _load_plugins(words[0], given)
                run(words[0], others)
        finally:
            sys.stdout.flush()
    except ValueError as error:
        if note_mistake(str(error)):
            _tell_others(str(error), USER_ERROR)
            raise SystemExit(USER_ERROR) from None
        _fail(str(error), USER_ERROR)
    except BrokenPipeError:
        end_unread()
    except OSError as error:
        said = why_it_does_not_load(error) or str(error)
        _fail(f"{error.filename}: {error.strerror}" if error.filename else said, 1)
    except ModuleNotFoundError as error:
        _fail(_what_to_install(words[0], error), 1)
    except Stopped as stop:
        if not is_main():
            raise SystemExit(STOPPED) from None
        _fail(f"{stop}; go on with: {shlex.join(['logitmix', *words])}", STOPPED)
    except KeyboardInterrupt:
        _fail("stopped", 130)
    except Exception as error:
        name = type(error).__name__  # the modules of these classes take seconds to load
        if name == "LostRank":
            end_lost(str(error))
        if isinstance(error, MemoryError) or name == "OutOfMemoryError" or "allocate memory" in str(error):
            settings = (
                "train.batch_size, model.loss.negatives, model.encoder.max_length, model.dim, evaluate.batch_size"
            )
            _fail(f"there is not enough memory; lower what takes it: {settings}", 1)
        _tell_others(f"{name}: {error}", 1)
        raise


def run(command: str, words: list[str]) -> None:
    """Runs one of COMMANDS or OPTIONS with the words that follow it."""
    if command in ("-h", "--help"):
        print(_usage())
    elif command == "--version":
        print(", ".join(f"{name} {number}" for name, number in versions().items()))
    else:
        if command != "train":
            # Before torch is loaded. OpenMP's threads spin while they wait for work, which made ranking take three
            # times as long on shared cores.
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        has_driver()
        importlib.import_module(f"logitmix.trainer.commands.{command.replace('-', '_')}").run(words)


def _load_plugins(command: str, given: Sequence[str] = ()) -> None:
    """Imports the installed plugins and those given. ValueError for one that cannot be imported, unless it is an
    installed one that the command can do without."""
    for line in load_installed():
        if command not in WITHOUT_PLUGINS:
            raise ValueError(line)
        if command != "doctor":
            say(f"logitmix: {line}")
    load_given(given)


def _usage() -> str:
    return USAGE.format(names=", ".join(SOURCES), recipes=", ".join(recipe_names()))


def _what_to_install(command: str, error: ModuleNotFoundError) -> str:
    """The missing module and the command that installs it; a missing module of logitmix is our own bug."""
    module = (error.name or "").partition(".")[0]
    if module in ("", "logitmix"):
        raise error
    return f"{command} needs {module}: pip install 'logitmix[{'serve' if command == 'serve' else 'train'}]'"


def end_unread() -> NoReturn:
    """Ends a process whose output nobody reads any more, such as head that has seen enough, without a word."""
    # Python itself would say so, too, when it flushes the output at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(128 + signal.SIGPIPE)


def _fail(message: str, status: int) -> NoReturn:
    message = " ".join(message.splitlines())
    say_of_disk(f"logitmix: {message}")
    _tell_others(message, status)
    raise SystemExit(status)


def _tell_others(message: str, status: int) -> None:
    """Tells ranks on other hosts of a failure before they have met, for they would wait in vain."""
    if launched() and status in (1, USER_ERROR):
        with contextlib.suppress(ImportError):
            from logitmix.comm.process_group import tell_failure

            tell_failure(message, status == USER_ERROR)


if __name__ == "__main__":
    main()
