"""The ranks that --processes starts: one failure, one message, nothing left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import two_ranks
from small_data import small_config, write_dataset
from waiting import until

from logitmix.launch import processes
from logitmix.trainer import cli
from logitmix.trainer.config import dump_toml

RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
exec(sys.argv[1])
"""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs a script in place of the command: the first word is what a rank does."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    popen = subprocess.Popen

    def start(words: list[str], **options: object) -> object:
        assert words[:4] == [sys.executable, "-P", "-m", "logitmix.trainer"]
        return popen([sys.executable, str(script), *words[4:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(processes.subprocess, "Popen", start)


@pytest.mark.usefixtures("ranks")
def test_a_rank_that_is_stopped_last_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LAST", 0.3)
    assert processes.run_ranks(["rank or os.kill(os.getpid(), signal.SIGSTOP)"], 2) == 0


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("does", "status", "said"),
    [
        ("pass", 0, ""),
        # A user's mistake, which every rank finds: rank 0 says it.
        ("print('wrong', file=sys.stderr); sys.exit(2)", 2, "wrong"),
        ("time.sleep(60) if rank == 0 else sys.exit([print('no device'), 2][1])", 2, "rank 1 of 2\nno device"),
        # The cause is told, though rank 0 ends first and for another reason.
        ("sys.exit(3) if rank == 0 else (time.sleep(3), sys.exit('no memory'))", 1, "rank 1 of 2\nno memory"),
        ("time.sleep(60) if rank == 0 else sys.exit('no memory')", 1, "rank 1 of 2\nno memory"),
        ("time.sleep(60) if rank == 0 else os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was ended by SIGKILL"),
    ],
)
def test_what_is_told_of_ranks_that_fail(
    does: str, status: int, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE", 1.0)
    assert processes.run_ranks([does], 2) == status
    out, err = capfd.readouterr()
    assert out == "rank 0 of 2\n"
    assert err.count(said) == 1 and "Traceback" not in err if said else err == ""


def test_a_start_that_fails_says_one_line_and_leaves_no_run(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_toml(small_config(write_dataset(tmp_path / "data"))))
    words = ["train", str(recipe), "--run", str(tmp_path / "run"), "--model.features", "brand"]
    start, said = two_ranks.command(words, tmp_path, world_size=2, status=2).splitlines()
    assert start == f"training {recipe} on {tmp_path / 'data'} with 2 processes, run directory {tmp_path / 'run'}"
    assert said.startswith("logitmix: model.features names brand, which the dataset does not have")
    assert not (tmp_path / "run").exists()


def test_ranks_end_with_the_command_that_started_them(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from logitmix.launch import processes; start = subprocess.Popen\n"
        "words = [sys.executable, '-c', 'import os, time; line = str(os.getpid()) + chr(10); '\n"
        "    'os.write(1, line.encode()); time.sleep(60)']\n"
        "processes.subprocess.Popen = lambda _, **options: start(words, **(options | dict(stdout=None)))\n"
        "processes.run_ranks([], 2)"
    )
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    with command.stdout:
        found = [int(command.stdout.readline()) for _ in range(2)]
    command.kill()
    command.wait()
    until(lambda: not any(_runs(pid) for pid in found))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # What has ended stays in the list until whoever inherited it takes note.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_processes_that_a_launcher_did_not_start_are_refused(
    monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    said = "logitmix: --processes is 2, but a launcher has started 4 ranks; leave it out\n"
    assert refusal("evaluate", "runs/none", "--processes", "2") == said


ENDS = "signal.signal({0}, lambda *_: sys.exit(75)); "
DEAF = "signal.signal({0}, signal.SIG_IGN); "
READY = "open(os.path.join({1!r}, str(rank)), 'w').close(); time.sleep(60)"


def send_to_this_process(number: int, times: int, ranks: int, folder: Path) -> threading.Thread:
    """So often, once all ranks are ready."""

    def send() -> None:
        until(lambda: len(os.listdir(folder)) >= ranks)
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(("number", "does", "status"), [(signal.SIGTERM, ENDS, 75), (signal.SIGINT, "", 0)])
def test_signals_are_passed_on_to_the_ranks(
    number: signal.Signals, does: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each rank gets one, and ends as it will; without a word of the launcher."""
    (ready := tmp_path / "ready").mkdir()
    before, sender = signal.getsignal(number), send_to_this_process(number, 1, 2, ready)
    found = processes.run_ranks([(does + READY).format(int(number), str(ready))], 2)
    sender.join()
    assert found == (status or 128 + number)
    assert "was ended by" not in capfd.readouterr().err
    assert signal.getsignal(number) == before


@pytest.mark.usefixtures("ranks")
def test_a_second_signal_ends_the_ranks_at_once(tmp_path: Path) -> None:
    (ready := tmp_path / "ready").mkdir()
    sender, since = send_to_this_process(signal.SIGTERM, 2, 2, ready), time.monotonic()
    with pytest.raises(SystemExit) as stop:
        processes.run_ranks([(DEAF + READY).format(15, str(ready))], 2)
    sender.join()
    assert stop.value.code == 128 + signal.SIGTERM and time.monotonic() - since < 50


def as_restart(monkeypatch: pytest.MonkeyPatch, job: Path, rank: int, attempt: int) -> None:
    """This process as a rank under torchrun."""
    error_file = job / f"attempt_{attempt}" / str(rank) / "error.json"
    error_file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))


def test_a_users_mistake_under_torchrun_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By one of the ranks that find it, and by no restart, which ends before it loads anything."""
    job, said = tmp_path / "logs" / "job", []
    words = ["train", "demo-mol", "--data.path", str(tmp_path / "nowhere"), "--run", str(tmp_path / "run")]
    for attempt, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        as_restart(monkeypatch, job, rank, attempt)
        if attempt:
            monkeypatch.setattr(cli, "run", lambda command, words: pytest.fail("it was started again"))
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == processes.USER_ERROR
        said += [line for line in capsys.readouterr().err.splitlines() if line.startswith("logitmix: ")]
    assert len(said) == 1 and "no dataset at" in said[0]
    assert sorted(path.name for path in job.iterdir()) == ["attempt_0", "attempt_1", processes.MISTAKE]
