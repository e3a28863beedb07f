from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from logitmix.trainer.checkpoint import Progress
from logitmix.trainer.config import Config
from logitmix.trainer.telemetry import PHASES, Clock, Telemetry


def test_the_clock_counts_phases_and_the_whole_run() -> None:
    clock = Clock(torch.device("cpu"), total=100.0)
    for _ in range(2):
        with clock("forward"):
            sum(range(20_000))
    seconds = clock.take()
    assert set(seconds) == set(PHASES)
    assert 0 < seconds["forward"] < 10
    assert seconds["backward"] == 0
    assert clock.total == 100.0 + seconds["forward"]
    assert set(clock.take().values()) == {0.0}


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_run_says_that_it_computes_in_fp32_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_bf16: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    model = SimpleNamespace(config=Config(), ranks=SimpleNamespace(rank=0, device=torch.device("cpu")))
    with Telemetry(tmp_path, model, Progress(), 1):
        pass
    assert ("no BF16 arithmetic" in capsys.readouterr().err) is not has_bf16
