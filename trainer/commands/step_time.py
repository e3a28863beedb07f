"""About how long a step takes on GPUs that are not here, from their data sheets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from logitmix.trainer.commands.miniature import Work


@dataclass(frozen=True)
class GPU:
    """What its data sheet says, without sparsity."""

    gib: float
    bf16: float
    """Matrix products, operations a second; a multiply-add is two."""
    fp32: float
    memory: float
    """Bytes a second."""
    nvlink: float
    """Bytes a second in one direction, to the other GPUs of a host of eight."""
    network: float
    """Bytes a second of the network card that a host has for each GPU."""


GPUS: Mapping[str, GPU] = {
    "a100": GPU(80, 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
    "h100": GPU(80, 989e12, 67e12, 3.35e12, 450e9, 50e9),
    "h200": GPU(141, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    "b200": GPU(180, 2250e12, 75e12, 8e12, 900e9, 50e9),
}
"""SXM cards of 80, 80, 141 and 180 GB in NVIDIA's DGX or HGX hosts, whose network is of 200 Gbit/s a GPU, then 400."""
LAUNCH = 90e-6
"""Seconds in which the host starts a kernel, with Python and torch: 89 to 109 in steps of ml-1m-dot, ml-1m-mol and
ml-1m-hstu, on a virtual machine with an H100 (benchmarks/notes/h100.md)."""
REACHED = {"bf16": 0.5, "MoL's pairs": 0.1, "fp32": 0.3, "memory": 0.7, "nvlink": 0.7, "network": 0.8}
"""The part of a data sheet's rate that is reached. Of MoL's pairs and of FP32, the dot product's pairs, as measured
there; the others are assumed."""
TABLES, EXCHANGE, OPTIMIZER, SEEN = 27, 12, 18, 1.07
"""Kernels of a lookup with its update, of an exchange of its rows with other ranks, and of the dense optimizer with the
gradients' check, as benchmarks/launches.py counts them; an H100 was given 7 % more than what was counted then
(benchmarks/notes/h100.md): 268 of ml-1m-mol, 170 of ml-1m-dot and 249 of ml-1m-hstu, without the check's last 11."""
ALL_TO_ALL, ALL_REDUCE = (8.4e-6, 3.4e-6, 14e-6), (14e-6, 1.25e-6, 8.5e-6)
"""Seconds that NCCL's collectives take with next to nothing to send: at least, for a hop by NVLink, and for one by the
network. NCCL reckons with these (2.30, `ncclTunerConstantsDefaults` in src/graph/tuning.cc): for sending and receiving
those of rings with the protocol Simple, for sums those of trees with LL128."""
MESSAGE = 1e-6
"""Seconds in which a rank posts a message to the network (2.30, `getNetOverhead` there: 1 us on Intel's CPUs, 2 on
AMD's). An all-to-all has one for each rank of other hosts."""
ASSUMED = (
    f"{LAUNCH * 1e6:g} us of the host to start a kernel; of the data sheet's rates "
    f"{', '.join(f'{of:.0%} ({name})' for name, of in REACHED.items())}; NCCL's own figures of latency, with "
    f"{MESSAGE * 1e6:g} us a message to another host; only the sum of the tower's gradients overlaps"
)
LEFT_OUT = (
    "waits for the host's own collectives (gloo) and for the making of batches, a network that others use, GPUs that "
    "are slower than the others, logging, evaluation and checkpoints"
)


@dataclass(frozen=True)
class Load:
    """What a rank's step takes besides the tower's forward, loss and backward. Bytes."""

    within: float
    """Ids, rows and gradients that cross within a host, of the rank that sends or receives the most."""
    between: float
    """And between hosts."""
    dense: float
    """The tower's gradients."""
    tables: float
    """Read and written by lookups, codec and updates of rows."""
    optimizer: float
    """Read and written by the dense optimizer."""
    exchanges: int = 1
    """Exchanges of rows: one for each width and kind of sharding."""
    all_to_alls: Sequence[tuple[int, int]] = ()
    """The ranks of each all-to-all, and how many of them each host has."""
    all_reduces: int = 1


@dataclass(frozen=True)
class StepTime:
    """Seconds. The host starts kernels while the device computes, so the longer of both counts."""

    parts: Mapping[str, float]
    """By what takes them, on the rank that has the most of it."""
    total: float
    floor: float
    """The larger of arithmetic and memory traffic at the data sheet's rates."""
    kernels: int
    """Kernels that the host starts."""

    def longest(self) -> list[str]:
        """The three parts that take longest."""
        return sorted(self.parts, key=lambda name: -self.parts[name])[:3]


def all_to_all_latency(ranks: int, per_host: int) -> float:
    """Seconds of an all-to-all among so many ranks, with next to nothing to send: it grows with the ranks."""
    if ranks == 1:
        return 0.0
    least, nvlink, network = ALL_TO_ALL
    return least + (network if ranks > per_host else nvlink) + MESSAGE * (ranks - per_host)


def all_reduce_latency(ranks: int, per_host: int) -> float:
    """Seconds of a sum over so many ranks, of next to nothing: a chain within each host, a tree of the hosts, and the
    same way back."""
    if ranks == 1:
        return 0.0
    least, nvlink, network = ALL_REDUCE
    return least + 2 * ((per_host - 1) * nvlink + math.ceil(math.log2(ranks / per_host)) * network)


def step_time(gpu: GPU, work: Work, load: Load, world_size: int, per_host: int) -> StepTime:
    """Of a step of each rank."""
    of_rows = load.exchanges * (TABLES + EXCHANGE * (world_size > 1))
    kernels = round(SEEN * (work.kernels + of_rows + OPTIMIZER))
    traffic = work.traffic + load.tables + load.optimizer
    hosts, local = world_size // per_host, min(per_host, world_size)
    # A ring of n ranks sends the gradients' bytes 2 (n - 1) / n times; with hosts, each rank has its share to add up.
    ring = 2 * load.dense * (local - 1) / local / (gpu.nvlink * REACHED["nvlink"])
    ring += 2 * load.dense / local * (hosts - 1) / hosts / (gpu.network * REACHED["network"])
    ring += load.all_reduces * all_reduce_latency(world_size, local)
    arithmetic = work.bf16 / (gpu.bf16 * REACHED["bf16"]) + work.fp32 / (gpu.fp32 * REACHED["fp32"])
    arithmetic += work.mol / (gpu.bf16 * REACHED["MoL's pairs"])
    parts = {
        "starting kernels": kernels * LAUNCH,
        "arithmetic": arithmetic,
        "memory traffic": traffic / (gpu.memory * REACHED["memory"]),
        "rows within a host": load.within / (gpu.nvlink * REACHED["nvlink"]),
        "rows between hosts": load.between / (gpu.network * REACHED["network"]),
        "latency of all-to-alls": sum(all_to_all_latency(*ranks) for ranks in load.all_to_alls),
        "sum of gradients": ring,
    }
    device = parts["arithmetic"] + parts["memory traffic"]
    computed = max(parts["starting kernels"], device)
    hidden = min(ring, device / 2)
    rows = parts["rows within a host"] + parts["rows between hosts"] + parts["latency of all-to-alls"]
    total = computed + rows + ring - hidden
    floor = max((work.bf16 + work.mol) / gpu.bf16 + work.fp32 / gpu.fp32, traffic / gpu.memory)
    return StepTime({name: of for name, of in parts.items() if of}, total, floor, kernels)
