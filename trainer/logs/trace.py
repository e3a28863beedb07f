"""`--train.profile STEPS`: a torch profiler's trace of some steps of rank 0."""

from collections.abc import Callable
from pathlib import Path

from torch.profiler import profile, schedule

WARM_UP = 10
"""Steps of this process before the trace: the first ones compile, connect and allocate."""


class StepTrace:
    """Traces steps WARM_UP + 1 to WARM_UP + `steps` of this process into the run's `profile/`."""

    def __init__(self, run: Path, steps: int, done: int, say: Callable[[str], None]) -> None:
        """`done` steps of the run came before this process; `say` takes the line that names the file."""
        self.folder, self.steps, self.done, self.say = run / "profile", steps, done, say
        self.seen, self.written = 0, False
        phases = schedule(skip_first=WARM_UP - 1, wait=0, warmup=1, active=steps, repeat=1)
        self.profiler = profile(schedule=phases, on_trace_ready=self._write)

    def start(self) -> None:
        self.profiler.start()

    def step(self) -> None:
        """Call after each step."""
        self.seen += 1
        self.profiler.step()

    def stop(self) -> None:
        self.profiler.stop()
        if not self.written:
            self.say(f"no profile: it begins after {WARM_UP} steps, and there were {self.seen}")

    def _write(self, profiler: profile) -> None:
        if self.seen <= WARM_UP:
            return
        first, last = self.done + WARM_UP + 1, self.done + min(self.seen, WARM_UP + self.steps)
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"steps-{first}-{last}.json"
        profiler.export_chrome_trace(str(file))
        self.written = True
        self.say(f"profile of steps {first} to {last}: {file} (ui.perfetto.dev or chrome://tracing shows it)")
