"""`prepare` as a program: prints the most memory that it had, in bytes, and on the next line what it says."""

import sys
from pathlib import Path

from rich.console import Console

from logitmix.trainer.prepare.config import PrepareOptions
from logitmix.trainer.prepare.prepare import prepare

if __name__ == "__main__":
    name, source, out = sys.argv[1:]
    said = ""
    try:
        prepare(PrepareOptions(name, source, out, min_user_actions=1, max_rejects=0.9), Console(quiet=True))
    except ValueError as error:
        said = str(error)
    # Not ru_maxrss: it counts what the process that started this one had.
    status = Path("/proc/self/status").read_text()
    print(1024 * int(status.partition("VmHWM:")[2].split()[0]), said, sep="\n")
