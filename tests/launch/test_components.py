"""The torchx components, as torchx itself reads and runs them."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from leftovers import listening, living
from torchx.specs.file_linter import validate
from torchx.specs.finder import ModuleComponentsFinder, get_component
from waiting import until

from logitmix.launch.components import PORTS, train
from logitmix.trainer.config import Config

COMPONENTS = Path(__file__).parents[2] / "launch/components.py"
# A stand-in for the trainer: says what it was given, and fails when told to.
ENTRY = """
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:])
sys.exit("planted failure" if "--fail" in sys.argv else 0)
"""


# Waits, says when it is told to end, and takes a second for it.
WAITING_ENTRY = """
import os, signal, sys, time
from pathlib import Path
def told(number, frame):
    Path("told-" + os.environ["RANK"]).write_text("told")
    time.sleep(1)
    sys.exit(75)
signal.signal(signal.SIGTERM, told)
Path("started-" + os.environ["RANK"]).write_text(f"{os.environ['MASTER_ADDR']} {os.getppid()}")
time.sleep(60)
"""
BIN = Path(sys.executable).parent


def as_the_trainer(folder: Path, entry: str) -> None:
    """Lets this program be logitmix.trainer.cli where the folder is in PYTHONPATH."""
    file = folder / "logitmix/trainer/cli.py"
    file.parent.mkdir(parents=True)
    (file.parent / "__init__.py").touch()
    file.write_text(entry)


def torchx(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "torchx", "run", *words],
        env={**os.environ, **env, "PATH": f"{BIN}:{os.environ['PATH']}"},
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def test_torchx_accepts_the_component() -> None:
    assert validate(str(COMPONENTS), "train") == []
    assert get_component(f"{COMPONENTS}:train").description
    result = torchx("-s", "local_cwd", f"{COMPONENTS}:train", "--help")
    assert result.returncode == 0
    # Where the docstring says nothing on an argument, torchx ends the line with a blank.
    assert [line for line in result.stdout.splitlines() if line != line.rstrip()] == []


def test_the_entry_points_name_ours_and_torchx_own() -> None:
    settings = tomllib.loads((COMPONENTS.parents[1] / "pyproject.toml").read_text())
    found = []
    for group, module in settings["project"]["entry-points"]["torchx.components"].items():
        # As torchx does: no group for a name that begins with an underscore.
        found += ModuleComponentsFinder(module, "" if group.startswith("_") else group).find()
    assert {"logitmix.train", "dist.ddp", "utils.echo"} <= {entry.name for entry in found}
    assert [entry.validation_errors for entry in found if entry.name.startswith("logitmix.")] == [[]]


def test_train_on_slurm() -> None:
    result = torchx(
        "-s", "slurm", "--dryrun", f"{COMPONENTS}:train", "-j", "2x4", "--gpu", "4", "--max_retries", "3",
        "--", "demo-mol", "--run", "runs/a b",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    script = result.stdout.partition("SBATCH_SCRIPT\n#-")[2]
    # One group for each node; memory and cores follow from the processes.
    for node in ("train-0", "train-1"):
        assert (
            f"#SBATCH --job-name={node} --requeue --ntasks-per-node=1 --cpus-per-task=8 --mem=65536 --gpus-per-task=4 "
            "--signal=TERM@660\n" in script
        )
    assert "export TORCHX_MAX_RETRIES=3" in script
    ports = re.findall(r"--rdzv_endpoint \$\{SLURM_JOB_NODELIST_HET_GROUP_0:=localhost\}:(\d+) ", script)
    assert len(ports) == 2 and ports[0] == ports[1] and int(ports[0]) in PORTS
    assert "--nnodes 2 --nproc_per_node 4" in script
    command = script.replace("'\"'\"'", "'")
    assert "-m -- logitmix.trainer.cli train demo-mol --run 'runs/a b' --train.stop-seconds 600" in command


def test_what_torchx_has_no_words_for_is_in_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Kubernetes's client only what becomes of the arguments is of interest here. Each waits longer than a save may
    take."""
    stand_in = SimpleNamespace(V1EnvFromSource=dict, V1SecretEnvSource=dict)
    for name in ("kubernetes", "kubernetes.client"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "kubernetes.client.models", stand_in)
    words = ("demo-mol", "--run", "s3://bucket/x")
    for given, save in ({}, Config().train.stop_seconds), ({"grace": 900}, 900):
        role = train(*words, **given, env_from_secret=["s3", "wandb"]).roles[0]
        assert f"{' '.join(words)} --train.stop-seconds {save}" in role.args[-1]
        container = SimpleNamespace(env_from=None)
        pod = SimpleNamespace(containers=[container])
        tasks = [{"template": SimpleNamespace(spec=pod)}]
        role.pre_proc("kubernetes", SimpleNamespace(request=SimpleNamespace(resource={"spec": {"tasks": tasks}})))
        torchrun = int(role.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
        assert save < torchrun < pod.termination_grace_period_seconds
        assert container.env_from == [{"secret_ref": {"name": name}} for name in ("s3", "wandb")]
    with pytest.raises(SystemExit, match="--grace 900 before the --"):
        train(*words, "--train.stop-seconds=900")
    with pytest.raises(SystemExit, match=r"--env would show the value of WANDB_API_KEY .* --env_from_secret NAME"):
        train(*words, env={"WANDB_API_KEY": "x"}).roles[0].pre_proc("kubernetes", None)
    with pytest.raises(SystemExit, match="--env_from_secret names secrets of Kubernetes"):
        train(*words, env_from_secret=["s3"]).roles[0].pre_proc("slurm", None)


@pytest.mark.parametrize(
    ("words", "run"),
    [
        (["demo-mol", "--train.epochs", "3"], "runs/demo-mol"),
        (["my/own.toml"], "runs/own"),
        (["demo-mol", "--run=there"], "there"),
        (["demo-mol", "--run", "there", "--json"], "there"),
        (["demo-mol", "--run"], "runs/demo-mol"),
        (["demo-mol", "--run", "s3://bucket/x"], None),
    ],
)
def test_logs_lie_in_the_run_directory(words: list[str], run: str | None) -> None:
    """Those of a run at a URL stay with the scheduler."""
    assert train(*words).roles[0].env.get("PET_LOG_DIR") == (run and f"{run}/logs")
    assert train(*words, env={"PET_LOG_DIR": "elsewhere"}).roles[0].env["PET_LOG_DIR"] == "elsewhere"
    assert "PET_LOG_DIR" not in train().roles[0].env


def test_jobs_that_share_a_host_meet_at_different_ports() -> None:
    def port(**options: Any) -> int:
        return next(iter(train("demo-mol", j="2x4", **options).roles[0].port_map.values()))

    assert len({port() for _ in range(8)}) > 4 and port(port=29400) == 29400


def test_a_run_in_a_container_that_keeps_nothing_is_refused() -> None:
    job = ("-s", "aws_batch", "--dryrun", "--workspace=", "-cfg", "queue=q", f"{COMPONENTS}:train", "-j", "1x2")
    mount = ("--image", "here/logitmix:1", "--mounts", "type=volume,src=claim,dst=/data")
    for words in ((*mount, "--", "demo-mol"), ("--", "demo-mol", "--run", "/data/runs/x")):
        result = torchx(*job, *words)
        said = result.stderr.splitlines()[-1]
        assert result.returncode == 1 and said.startswith("logitmix.train: the run directory ") and "--mounts" in said
    for run in ("/data/runs/x", "s3://bucket/runs/x"):
        result = torchx(*job, *mount, "--", "demo-mol", "--run", run)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("more", [(), pytest.param(("--fail",), marks=pytest.mark.slow)])
def test_train_runs_on_two_processes(tmp_path: Path, more: tuple[str, ...]) -> None:
    """`--run` reaches the trainer, though torchrun has a `--run-path`; a failed job fails torchx, with its words. What
    each rank says is shown, and is in the run directory."""
    as_the_trainer(tmp_path, ENTRY)
    words = ("-s", "local_cwd", f"{COMPONENTS}:train", "-j", "1x2", "--", "demo-mol", "--run", "a b", *more)
    result = torchx(*words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (result.returncode != 0) == ("planted failure" in result.stderr) == bool(more), result.stderr
    for rank in (0, 1):
        said = f"rank {rank} of 2 {['train', 'demo-mol', '--run', 'a b', *more, '--train.stop-seconds', '600']}"
        (log,) = tmp_path.glob(f"a b/logs/*/attempt_0/{rank}/stdout.log")
        assert said in result.stderr and log.read_text() == f"{said}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "twice"])
def test_a_job_on_one_host_listens_on_the_loopback_and_ends_with_torchx(tmp_path: Path, again: bool) -> None:
    """Though torchrun be told to end a second time, while it waits for its ranks."""
    as_the_trainer(tmp_path, WAITING_ENTRY)
    words = [f"{COMPONENTS}:train", "-j", "1x2", "--", "demo-mol"]
    mark = ("LOGITMIX_TEST", str(tmp_path))
    job = subprocess.Popen(
        [BIN / "torchx", "run", "-s", "local_cwd", *words],
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path), mark[0]: mark[1]},
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: written(tmp_path / "started-0", tmp_path / "started-1"), 120)
        address, torchrun = (tmp_path / "started-0").read_text().split()
        assert address == "127.0.0.1"
        found = listening(int(torchrun))
        assert found and all(each.startswith("0100007F:") for each in found)
    finally:
        job.kill()
        job.wait()
    until(lambda: written(tmp_path / "told-0", tmp_path / "told-1"), 120)
    if again:
        os.kill(int(torchrun), signal.SIGTERM)
    # With the processes their threads and ports.
    until(lambda: not living("=".join(mark)), 120)


def written(*files: Path) -> bool:
    return all(file.exists() and file.stat().st_size for file in files)
