import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Waits for what other threads or processes do."""
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "it takes too long"
        time.sleep(0.01)
