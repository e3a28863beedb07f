"""torchx components: `torchx run -s SCHEDULER logitmix.train -j 1x2 -- RECIPE …`

The entry points in pyproject.toml name them; without an installation, `launch/components.py:train` does the same.

They name the program to start and the machines to start it on, and import none of it: the machine that submits a job
need not be able to run it. Put the environment's bin folder first in PATH (or activate it), because torchx starts the
`python` or `torchrun` that it finds there.
"""

from argparse import ArgumentParser
from pathlib import PurePath

# torchx 0.7 reads only these spellings: not `str | None`, not `dict[…]`.
from typing import Dict, List, Optional  # noqa: UP035

from torchx import specs
from torchx.components import dist

# Not in a separate function, which torchx would check as a component.
_COMMAND_LINE = ArgumentParser(add_help=False, allow_abbrev=False)
"""The arguments of `logitmix train` that determine the run directory."""
_COMMAND_LINE.add_argument("recipe", nargs="?")
_COMMAND_LINE.add_argument("--run", nargs="?")


_TORCHRUN = "torchrun --rdzv_backend c10d --rdzv_endpoint localhost:0 "
"""How dist.ddp starts the processes of one node."""
_TORCHRUN_OF_ONE_HOST = "python -P -m logitmix.launch.torchrun "


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
    """
    _, nodes, processes, _ = dist.parse_nnodes(j)
    known, _ = _COMMAND_LINE.parse_known_args(args)
    run = known.run or f"runs/{PurePath(known.recipe or '').stem}"
    # torchrun writes to disks alone.
    logs = {"PET_LOG_DIR": f"{PurePath(run)}/logs"} if known.recipe and "://" not in run else {}
    app = dist.ddp(
        "logitmix.trainer.cli",
        "train",
        *args,
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
        # OpenMP thread itself, with a warning; `train.threads` decides.
        env={"PET_MAX_RESTARTS": str(max_restarts), "OMP_NUM_THREADS": "1", **logs, **(env or {})},
        mounts=mounts,
        max_retries=max_retries,
    )
    (role,) = app.roles
    role.name = "train"
    if nodes == 1:
        role.args = [argument.replace(_TORCHRUN, _TORCHRUN_OF_ONE_HOST) for argument in role.args]
    return app


def tensorboard(logdir: str, port: int = 6006, host: str = "localhost", image: str = "logitmix") -> specs.AppDef:
    """Shows the curves of one run, or of all runs below a folder.

    Args:
        logdir: run directory, or a folder of them
        port: port to listen on
        host: address to listen on; 0.0.0.0 lets other machines in
        image: container image that holds tensorboard, for the schedulers that start one
    """
    return specs.AppDef(
        name="tensorboard",
        roles=[
            specs.Role(
                name="tensorboard",
                image=image,
                entrypoint="tensorboard",
                args=["--logdir", logdir, "--host", host, "--port", str(port)],
                port_map={"http": port},
                resource=specs.resource(cpu=1, memMB=4096),
            )
        ],
    )
