"""What a server is told. Imports no torch, so that the process that starts the workers is small."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from logitmix.common.mappings import require
from logitmix.serving.guards import Allowed
from logitmix.serving.tls import Tls

MAX_STAGE_1 = 1_000_000
MOST_DRAIN = 3600
MOST_THREADS = 1024


@dataclass(frozen=True)
class Settings:
    """How a server answers, whatever the export is. ValueError for what is impossible."""

    wait_ms: float = 10.0
    """Milliseconds that a request waits for others, at most."""
    stage1: int | None = None
    """For requests that do not say."""
    boost_new: float = 0.0
    """For requests that do not say."""
    where: str = ""
    """A condition on the items of all answers."""
    attributes: Path | None = None
    """A file with values of filterable columns that differ from the export's."""
    deltas: Path | None = None
    """Folder to which deltas of the export come; they are applied in order."""
    shadow: Path | None = None
    """Another serving directory, whose answers are compared."""
    shadow_share: float = 1.0
    """Share of the requests that the shadow answers too, if there is one."""
    threads: int = 0
    """CPU threads of torch in each process; 0 for its default."""
    drain: float = 0.0
    """Seconds between SIGTERM and the last new connection; meanwhile /readyz answers 503."""
    allowed: Allowed = field(default_factory=Allowed)
    tls: Tls | None = None
    """For HTTPS."""

    def __post_init__(self) -> None:
        require(0 <= self.wait_ms <= 1000, "--wait-ms", self.wait_ms, "from 0 to 1000")
        require(
            self.stage1 is None or 1 <= self.stage1 <= MAX_STAGE_1, "--stage1", self.stage1, f"from 1 to {MAX_STAGE_1}"
        )
        require(math.isfinite(self.boost_new), "--boost-new", self.boost_new, "a finite number")
        require(0 < self.shadow_share <= 1, "--shadow-share", self.shadow_share, "above 0 and at most 1")
        require(0 <= self.threads <= MOST_THREADS, "--threads", self.threads, f"from 0 to {MOST_THREADS}")
        require(0 <= self.drain <= MOST_DRAIN, "--drain-seconds", self.drain, f"from 0 to {MOST_DRAIN}")
