"""torchx components: `torchx run -s SCHEDULER logitmix.train -j 1x2 -- RECIPE …`

The entry points in pyproject.toml name them; without an installation, `launch/components.py:train` does the same.

They name the program to start and the machines to start it on, and import none of it: the machine that submits a job
need not be able to run it. Put the environment's bin folder first in PATH (or activate it), because torchx starts the
`python` or `torchrun` that it finds there.
"""

# No functions: torchx takes each that it finds here for a component.
import dataclasses
import random
import re
from argparse import ArgumentParser
from pathlib import PurePath

# torchx 0.7 reads only these spellings: not `str | None`, not `dict[…]`.
from typing import Any, Dict, List, Optional  # noqa: UP035

from torchx import specs
from torchx.components import dist

# Not in a separate function, which torchx would check as a component.
_COMMAND_LINE = ArgumentParser(add_help=False, allow_abbrev=False)
"""The arguments of `logitmix train` that determine the run directory, and the one that `--grace` becomes."""
_COMMAND_LINE.add_argument("recipe", nargs="?")
_COMMAND_LINE.add_argument("--run", nargs="?")
_COMMAND_LINE.add_argument("--train.stop-seconds", "--train.stop_seconds", dest="stop_seconds")


_TORCHRUN = "torchrun --rdzv_backend c10d --rdzv_endpoint localhost:0 "
"""How dist.ddp starts the processes of one node."""
_TORCHRUN_OF_ONE_HOST = "python -P -m logitmix.launch.torchrun "

PORTS = range(20000, 30000)
"""Of the rendezvous of several nodes: below those that Linux gives to connections."""
SECRET = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
"""Names of environment variables whose values are no one else's business."""
LAUNCHER_SECONDS = 30
"""How much longer than its ranks torchrun may take to end, and a pod or Slurm's limit of time than torchrun."""
FORGETFUL = ("aws_batch", "kubernetes")
"""Schedulers whose containers keep nothing but what is mounted."""


@dataclasses.dataclass
class _Training(specs.Role):  # type: ignore[misc]  # torchx is not read
    """A role with what torchx has no words for, which it puts into the scheduler's request."""

    run: str = ""
    """The run directory."""
    grace: int = 600
    """Seconds that the ranks have to save, which the job gets as train.stop_seconds."""
    secrets: List[str] = dataclasses.field(default_factory=list)
    """Names of Kubernetes's secrets, whose keys become environment variables."""

    def pre_proc(self, scheduler: str, dryrun_info: Any) -> Any:
        mounted = any(PurePath(self.run).is_relative_to(mount.dst_path) for mount in self.mounts)
        if scheduler in FORGETFUL and "://" not in self.run and not mounted:
            raise SystemExit(
                f"logitmix.train: the run directory {self.run} would end with its container; give it a --run under a "
                "mount: --mounts type=volume,src=CLAIM,dst=/shared … -- RECIPE --run /shared/runs/NAME"
            )
        if self.secrets and scheduler != "kubernetes":
            raise SystemExit("logitmix.train: --env_from_secret names secrets of Kubernetes, and needs -s kubernetes")
        if scheduler == "slurm":
            for replica in dryrun_info.request.replicas.values():
                # To the processes of the job, before a limit of time, whoever sets it.
                replica.sbatch_opts["signal"] = f"TERM@{self.grace + 2 * LAUNCHER_SECONDS}"
        if scheduler == "kubernetes":
            for name in filter(SECRET.fullmatch, self.env):
                raise SystemExit(
                    f"logitmix.train: --env would show the value of {name} to all who may read the job; put it into a "
                    f"secret: kubectl create secret generic NAME --from-env-file FILE, and give --env_from_secret NAME"
                )
            for task in dryrun_info.request.resource["spec"]["tasks"]:
                self._amend(task["template"].spec)
        return dryrun_info

    def _amend(self, pod: Any) -> None:
        """Gives a pod of Kubernetes what torchx has no words for."""
        from kubernetes.client.models import V1EnvFromSource, V1SecretEnvSource

        pod.termination_grace_period_seconds = self.grace + 2 * LAUNCHER_SECONDS
        for container in pod.containers:
            container.env_from = [V1EnvFromSource(secret_ref=V1SecretEnvSource(name=name)) for name in self.secrets]


def train(
    *args: str,
    j: str = "1x2",
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,
    h: Optional[str] = None,
    image: str = "logitmix",
    name: str = "/train",
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    max_restarts: int = 0,
    grace: int = 600,
    env_from_secret: Optional[List[str]] = None,
    port: int = 0,
) -> specs.AppDef:
    """Starts `logitmix train ARGS` on every process of a job, with torchrun. What they say is shown, and kept in the
    run directory, in logs/, unless that is a URL.

    Args:
        args: what follows `logitmix train`: a recipe, its overrides, --run
        j: nodes x processes of a node; with GPUs, one process for each
        cpu: cores of a node; 0 asks for 2 a process
        gpu: GPUs of a node
        memMB: memory of a node in MB, a hard limit on Slurm; 0 asks for 16384 a process
        h: named resource of the scheduler, instead of cpu, gpu and memMB
        image: container image that holds logitmix, for the schedulers that start one
        name: EXPERIMENT/RUN, as the scheduler shows the job
        env: environment variables of the job: KEY=VALUE,…
        mounts: what a container sees of its host, such as type=bind,src=/data,dst=/data
        max_retries: how often the scheduler starts a failed job again; training resumes from the run directory
        max_restarts: how often torchrun restarts a node's processes within a job, after one has died
        grace: seconds for a run to save once it is told to end, handed on as --train.stop-seconds; Slurm tells it a
            minute more before the limit of time, and a pod of Kubernetes is given a minute more
        env_from_secret: Kubernetes: names of secrets, each key of which becomes an environment variable of the job
        port: of the rendezvous of several nodes; 0 takes one by chance, so that jobs can share a host
    """
    _, nodes, processes, _ = dist.parse_nnodes(j)
    known, _ = _COMMAND_LINE.parse_known_args(args)
    if known.stop_seconds:
        raise SystemExit(
            "logitmix.train: --grace is the job's --train.stop-seconds, so that what starts it waits as long; give "
            f"--grace {known.stop_seconds} before the -- in its place"
        )
    run = known.run or f"runs/{PurePath(known.recipe or '').stem}"
    # torchrun writes to disks alone.
    logs = {"PET_LOG_DIR": f"{PurePath(run)}/logs"} if known.recipe and "://" not in run else {}
    app = dist.ddp(
        "logitmix.trainer.cli",
        "train",
        *args,
        "--train.stop-seconds",
        str(grace),
        # `torchrun -m -- MODULE ARGS`: without the `--`, torchrun takes the --run in ARGS for its own --run-path.
        m="--",
        j=j,
        cpu=cpu or 2 * processes,
        gpu=gpu,
        memMB=memMB or 16384 * processes,
        h=h,
        image=image,
        name=name,
        # torchrun reads its own options from PET_… too, and dist.ddp passes on few of them. torchrun would set one
        # OpenMP thread itself, with a warning; `train.threads` decides. After a signal, torchrun would end the ranks in
        # 30 s.
        env={
            "PET_MAX_RESTARTS": str(max_restarts),
            "OMP_NUM_THREADS": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(grace + LAUNCHER_SECONDS),
            **logs,
            **(env or {}),
        },
        mounts=mounts,
        max_retries=max_retries,
        rdzv_port=port or random.choice(PORTS),
    )
    (of_ddp,) = app.roles
    role = _Training(
        **vars(of_ddp),
        run=run,
        grace=grace,
        secrets=env_from_secret or [],
    )
    app.roles = [role]
    role.name = "train"
    if nodes == 1:
        role.args = [argument.replace(_TORCHRUN, _TORCHRUN_OF_ONE_HOST) for argument in role.args]
    return app
