"""The process of the command `logitmix`, also as `python -m logitmix.trainer`: however early or late Ctrl-C comes, it
prints no traceback. Nor does it where nobody reads the rest of its output.

Python's own handler prints one where no code of the command runs: while modules load, and while the interpreter ends.
"""

import signal
import sys
from typing import NoReturn

STATUS = 128 + signal.SIGINT


def main() -> None:
    # A shell's background jobs are started to ignore it.
    heeded = signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from logitmix.trainer import cli

    try:
        if heeded:
            signal.signal(signal.SIGINT, _interrupt)
        cli.main()
    except KeyboardInterrupt:
        raise SystemExit(STATUS) from None
    finally:
        if heeded:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt(number: int, frame: object) -> NoReturn:
    """Ends the command; a second signal then ends the process, whatever it does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.modules["logitmix.launch.processes"].INTERRUPTS.append(number)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
