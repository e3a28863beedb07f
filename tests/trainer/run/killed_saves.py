"""Saving killed at random moments: run as a program, which forks a process for each kill.

Prints one JSON object a kill: the step that was last acknowledged, the one that is loaded, and the names of what was
not committed.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from logitmix.comm.process_group import process_group
from logitmix.trainer.data.dataset import load_dataset
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.parallel.parallelize import parallelize
from logitmix.trainer.run.checkpoint import load_saved
from logitmix.trainer.run.folder import read_config, run_lock
from logitmix.trainer.run.metrics import RunProgress
from logitmix.trainer.run.saving import Saver


def save_until_killed(saver: Saver, first: int, told: int, chance: random.Random) -> None:
    for step in itertools.count(first):
        saver.save(RunProgress(step), wait=chance.random() < 0.5)
        while saver._pending:
            saver.poll()
        os.write(told, step.to_bytes(8, "big"))


def main(run: Path, kills: int) -> None:
    config, chance = read_config(run), random.Random(0)
    with process_group("cpu", 60) as ranks:
        model = parallelize(load_dataset(config.data.path).schema, config, ranks)
        optimizer = dense_optimizer(model.tower, config.dense)
        newest = load_saved(run, "last").step
        for number in range(kills):
            read_end, write_end = os.pipe()
            child = os.fork()
            if not child:
                try:
                    save_until_killed(Saver(run, model, optimizer), newest + 1, write_end, random.Random(number))
                finally:
                    os._exit(1)
            os.close(write_end)
            time.sleep(chance.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "the process ended by itself"
            with os.fdopen(read_end, "rb") as told:
                acknowledged = int.from_bytes(told.read()[-8:] or newest.to_bytes(8, "big"), "big")
            left = [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith("step-")]
            newest = load_saved(run, "last").step
            with run_lock(run, ranks):
                pass
            print(json.dumps({"acknowledged": acknowledged, "loaded": newest, "left": left}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
