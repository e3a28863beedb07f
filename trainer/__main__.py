"""The process of the command `logitmix`, also as `python -m logitmix.trainer`: however early or late Ctrl-C comes, it
prints no traceback. Nor does it where nobody reads the rest of its output.

Python's own handler prints one where no code of the command runs: while modules load, in destructors, and while the
interpreter ends.
"""

import atexit
import os
import signal
import sys
import threading
from typing import NoReturn

STATUS = 128 + signal.SIGINT


def main() -> None:
    # A shell's background jobs are started to ignore it.
    heeded = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from logitmix.trainer import cli

    sys.unraisablehook = _in_a_destructor
    try:
        if heeded:
            signal.signal(signal.SIGINT, _interrupt)
        cli.main()
    except KeyboardInterrupt:
        raise SystemExit(STATUS) from None
    finally:
        if heeded:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end()


def _end() -> None:
    """Ends the process, if none of its threads works any more, without freeing all that torch holds, which takes a
    tenth of a second."""
    if threading.active_count() == 1:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def _interrupt(number: int, frame: object) -> NoReturn:
    """Ends the command; a second signal then ends the process, whatever it does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.modules["logitmix.launch.processes"].INTERRUPTS.append(number)
    raise KeyboardInterrupt


def _in_a_destructor(error: "sys.UnraisableHookArgs") -> None:
    """An error there goes no further, so an interrupt would be lost."""
    if issubclass(error.exc_type, KeyboardInterrupt):
        os._exit(STATUS)
    sys.__unraisablehook__(error)


if __name__ == "__main__":
    main()
