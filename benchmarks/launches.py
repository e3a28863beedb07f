"""What a training step asks of a GPU: kernels that are launched, copies from the host, and waits for the device.

    python -m benchmarks.launches [--recipes ml-1m-mol] [--sources]

A small model's step on a GPU takes as long as the host needs to launch its kernels, some microseconds each, and a wait
for the device leaves it idle. So this runs a whole step of each recipe, as on one GPU and as on the first of eight, on
tensors that have shapes and no memory and say that they are on the GPU. No GPU is needed, and nothing is computed.

Counted as launches: every operation of torch that reaches a kernel; KERNELS has those that take several, or none. A
Triton kernel of ours is one, and so is a copy to pinned memory of the host. The tables' lookup and update, FBGEMM's,
and flash attention run stand-ins, which count what FUSED says. Multi-tensor operations count what torch's division into
chunks gives. A collective on the device is one. Copies from the host are apart; one blocks if its memory is not pinned.
A wait is whatever makes the host read the device: a number, a list, a copy, a mask's or a set's size; not an event, for
which it waits in each step, of the one before. The waits of logged steps are no part of it.

The other ranks are stood in for: each asks for as many rows as this rank asks of itself. The dataset is made up, with
histories up to the longest that the recipe reads.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.autograd.function import once_differentiable
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import distributed as ddp
from torch.nn.utils import clip_grad
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.runtime.jit import JITFunction

from logitmix.comm.process_group import Ranks
from logitmix.modules.batch import Packing
from logitmix.modules.encoders import sasrec
from logitmix.modules.losses import mol_triton
from logitmix.modules.schema import Schema
from logitmix.trainer.config import Config, load_recipe, recipe_names, with_settings
from logitmix.trainer.data.dataset import Dataset
from logitmix.trainer.loop import parallel_model, training_batches
from logitmix.trainer.parallel import clipping, optimizer, parallelize
from logitmix.trainer.parallel.optimizer import dense_optimizer
from logitmix.trainer.parallel.plan import Devices
from logitmix.trainer.step.pipeline import PHASES, Pipeline

GPU = torch.device("cuda", 0)
STEP = 2
"""The counted step: what happens once is over."""
STEPS = 4

KERNELS = {
    # Memory, metadata, views that torch does not mark as such, and random numbers' seeds.
    **dict.fromkeys(
        (
            "empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh",
            "record_stream", "set_", "_reshape_alias", "alias", "detach", "is_same_size", "resize_", "_pin_memory",
            "is_pinned",
        ),
        0,
    ),
    "native_layer_norm_backward": 2,
    "embedding_dense_backward": 16,
    "sort": 5,
    "cumsum": 2,
    "_unique2": 12,
    "index_put": 8,
    "index_put_": 8,
    "_index_put_impl_": 8,
    "nonzero": 4,
    "bincount": 4,
    "searchsorted": 1,
    "_foreach_norm": 3,
}  # fmt: skip
"""Kernels of an operation of torch on CUDA, where it is not one: from ATen's sources."""
FUSED = {
    "lookup": 6,
    "update": 19,
    "flash attention": 3,
    "flash attention's backward": 4,
}
"""Kernels of what is stood in for, as the sources of FBGEMM launch them, and torch's. The lookup sums the lengths (3),
checks the ids (2) and reads the rows. The update numbers the ids over all tables, sorts them (4: two digits of 8 bits),
counts their runs (4) and sums these (3), zeroes counters and sums (4), finds the long runs, and updates long and short
ones in a kernel each. Flash attention takes its offsets as int32, once for queries and once for keys; its backward has
three kernels, and the gradients of query, key and value are stacked."""
BY_LISTS = (110, 64, 48, 36, 30)
BLOCKS, CHUNK = 320, 65536
"""Of torch's multi-tensor operations: the most tensors of a launch by the number of lists, its most blocks, and the
numbers of a block."""


@dataclass(frozen=True)
class Options:
    recipes: tuple[str, ...] = ()
    """All, if none are named."""
    sources: bool = False
    """Also show which lines of code launch the most."""


@dataclass
class Counts:
    """Of one step, by phase, and by phase and source."""

    launches: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    blocking: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    sources: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    @property
    def total(self) -> tuple[int, int, int, int]:
        """Launches, copies, blocking ones among them, waits."""
        return self.launches.total(), self.copies.total(), self.blocking.total(), self.waits.total()


class Meter(TorchDispatchMode):
    """Runs operations on tensors that say they are on the GPU, and counts them while it is `on`."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.phase, self.counts = False, "", Counts()
        self.casts: dict[int, Tensor] = {}
        """Of weights, in this phase."""

    def note(self, kind: str, what: str, number: int = 1) -> None:
        if self.on and number:
            getattr(self.counts, kind)[self.phase] += number
            self.counts.sources[self.phase, _source(), what if kind == "launches" else f"{kind}: {what}"] += number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
        device, name = kwargs.get("device"), func._overloadpacket.__name__
        to_gpu = device is not None and device.type in ("cuda", "meta")
        if not there and not to_gpu:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            self.note("launches", name)
            return self._collective(func, args)
        if name in _READS or (name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) == 1):
            self.note("waits", name)
            return _READS[name](args[0])
        target = args[0] if name == "copy_" else None
        if there and len(args) > 2 and getattr(target, "in_pinned_memory", False):
            self.note("launches", "copy_ to the host")
            return target
        if (target is not None and not isinstance(target, OnGPU)) or (
            there and device is not None and device.type == "cpu"
        ):
            self.note("waits", f"{name} to the host")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype) if target is None else target
        if name in _INDEXED and any(of is not None and of.dtype == torch.bool for of in args[1]):
            self.note("waits", f"{name} by a mask")
            args = args[0], [place for of in args[1] for place in _places(of)], *args[2:]
        from_host = [tensor for tensor in tensors if not isinstance(tensor, OnGPU) and tensor.ndim]
        if name in ("_to_copy", "copy_") and (from_host or (not there and tensors)):
            source = args[1] if name == "copy_" else args[0]
            asynchronous = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            self.note("copies", name)
            if not (asynchronous and getattr(source, "in_pinned_memory", False)):
                self.note("blocking", name)
        else:
            assert not from_host, f"{name} has tensors on the GPU and on the host"
            self.note("launches", name, _kernels(func, name, args, kwargs))
        return self._without_memory(func, args, kwargs)

    @staticmethod
    def _without_memory(func: Any, args: Any, kwargs: Any) -> Any:
        own: dict[int, OnGPU] = {}

        def inside(tensor: Tensor) -> Tensor:
            if isinstance(tensor, OnGPU):
                own[id(tensor.shape_only)] = tensor
                return tensor.shape_only
            return tensor.to("meta")

        args, kwargs = tree_map_only(Tensor, inside, (args, kwargs))
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs))

        def outside(tensor: Tensor) -> Tensor:
            return own[id(tensor)] if id(tensor) in own else OnGPU(tensor)

        return tree_map_only(Tensor, outside, func(*args, **kwargs))

    @staticmethod
    def _collective(func: Any, args: Any) -> Any:
        """What one waits for is there at once."""
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result([args[0]] if isinstance(args[0], Tensor) else args[0])
        work = _create_work_from_future(done).boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)


METER = Meter()


class OnGPU(Tensor):
    """A tensor without memory that says it is on the GPU: to Python and to autocast. To autograd's engine, which would
    need a driver, it is on the meta device."""

    shape_only: Tensor
    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape_only: Tensor) -> "OnGPU":
        made = Tensor._make_subclass(cls, shape_only, False, device_for_backend_keys=GPU)  # type: ignore[call-arg]
        made.shape_only = shape_only
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            METER.note("waits", "tolist")
            return torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
        if func is Tensor.record_stream:
            return None
        # So that what is there already is not moved.
        args, kwargs = tree_map_only(
            torch.device, lambda of: torch.device("meta") if of.type == "cuda" else of, (args, kwargs or {})
        )
        if torch.is_autocast_enabled("cuda"):
            args, kwargs = _autocast(func.__name__, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __torch_dispatch__(self, *_: Any) -> Any:  # type: ignore[override]
        raise AssertionError("the meter is not on")


def _autocast(name: str, args: Any, kwargs: Any) -> Any:
    """What autocast makes of a call's arguments on CUDA: in C++ it would see the meta device and do nothing."""
    lower, full = torch.get_autocast_dtype("cuda"), torch.float32

    def cast(to: torch.dtype) -> Any:
        def one(tensor: Tensor) -> Tensor:
            if tensor.dtype == to or not tensor.is_floating_point():
                return tensor
            if not (to == lower and tensor.is_leaf and tensor.requires_grad and tensor._base is None):
                return tensor.to(to)
            # A weight is cast once for all of its uses.
            if id(tensor) not in METER.casts:
                METER.casts[id(tensor)] = tensor.to(to)
            return METER.casts[id(tensor)]

        return tree_map_only(OnGPU, one, (args, kwargs))

    if name in _LOWER:
        return cast(lower)
    if name in _FULL:
        return cast(full)
    if name in _SUMS and kwargs.get("dtype") is None and args[0].dtype == lower:
        return args, kwargs | {"dtype": full}
    if name in _WIDEST and any(of.dtype == full for of in tree_leaves(args) if isinstance(of, OnGPU)):
        return cast(full)
    return args, kwargs


_LOWER = {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "einsum", "conv1d"}
_FULL = {
    "layer_norm", "rms_norm", "exp", "log", "log1p", "expm1", "pow", "__pow__", "rsqrt", "reciprocal", "norm",
    "softplus", "logsumexp", "binary_cross_entropy_with_logits", "cosine_similarity", "dist", "renorm", "erfinv",
}  # fmt: skip
_SUMS = {"sum", "prod", "softmax", "log_softmax", "cumsum", "cumprod", "vector_norm"}
_WIDEST = {"addcmul", "addcdiv", "cat", "stack", "dot", "index_put", "scatter_add", "bilinear", "cross", "tensordot"}
"""Autocast's lists for CUDA, by the names of functions; torch's documentation has them. Those of _SUMS end in FP32."""


def _some(of: Tensor) -> Tensor:
    return OnGPU(torch.empty(len(of), dtype=torch.int64, device="meta"))


_READS: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": lambda of: torch.zeros((), dtype=of.dtype).item(),
    "item": lambda of: torch.zeros((), dtype=of.dtype).item(),
    "equal": lambda of: True,
    "is_nonzero": lambda of: False,
    "nonzero": lambda of: OnGPU(torch.empty(of.numel(), of.ndim, dtype=torch.int64, device="meta")),
    "masked_select": lambda of: OnGPU(torch.empty(of.numel(), dtype=of.dtype, device="meta")),
    "_unique2": lambda of: (_some(of), _some(of), _some(of)),
    "repeat_interleave": _some,
}
"""Operations whose result, or its shape, the host waits for; and something in its place."""


_INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


def _places(index: Tensor | None) -> list[Tensor | None]:
    """In place of a mask, one index for each of its dimensions."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [OnGPU(torch.empty(index.numel(), dtype=torch.int64, device="meta")) for _ in index.shape]


def _kernels(func: Any, name: str, args: Any, kwargs: Any) -> int:
    if name in KERNELS:
        return KERNELS[name]
    if func.is_view:
        return 0
    if name.startswith(("_foreach_", "_fused_")):
        lists = [of for of in (*args, *kwargs.values()) if isinstance(of, list) and of and isinstance(of[0], Tensor)]
        # The steps' list is not divided with the others.
        lists = [of for of in lists if name.startswith("_foreach_") or of[0].ndim or len(of) == 1]
        return multi_tensor_launches([tensor.numel() for tensor in lists[0]], len(lists) + (not name.endswith("_")))
    return 1


def multi_tensor_launches(sizes: Sequence[int], lists: int) -> int:
    """Of torch's multi_tensor_apply, for tensors of these numbers."""
    launches = tensors = blocks = 0
    for size in filter(None, sizes):
        tensors += 1
        chunks = -(-size // CHUNK)
        for chunk in range(chunks):
            blocks += 1
            last = chunk == chunks - 1
            if blocks == BLOCKS or (last and tensors == BY_LISTS[lists - 1]):
                launches, blocks, tensors = launches + 1, 0, 0 if last else 1
    return launches + (blocks > 0)


def _source() -> str:
    """The innermost line of the project's code, or in backward the operation whose gradient is computed."""
    node, frame = torch._C._current_autograd_node(), sys._getframe(2)
    while frame.f_back and "/logitmix/" not in frame.f_code.co_filename.replace("/namespace/logitmix/", "/logitmix/"):
        frame = frame.f_back
    if node is not None and frame.f_code.co_name == "backward" and not frame.f_locals.get("ctx"):
        return str(node.name())
    return f"{frame.f_code.co_filename.rpartition('/logitmix/')[2]}:{frame.f_lineno}"


class _Fused(torch.autograd.Function):
    """Something of that shape, and its gradient; counted by name."""

    @staticmethod
    def forward(ctx: Any, names: tuple[str, str], shape: tuple[int, ...], dtype: torch.dtype, source: Tensor) -> Tensor:
        ctx.of, ctx.shape, ctx.dtype = names[1], source.shape, source.dtype
        METER.note("launches", names[0], FUSED[names[0]])
        return torch.empty(shape, dtype=dtype, device=GPU)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        METER.note("launches", ctx.of, FUSED[ctx.of])
        return None, None, None, torch.empty(ctx.shape, dtype=ctx.dtype, device=GPU)


def _attended(packed_T3Gd: Tensor, packing: Packing) -> Tensor:
    T, _, G, d = packed_T3Gd.shape
    names = "flash attention", "flash attention's backward"
    return cast(Tensor, _Fused.apply(names, (T, G, d), packed_T3Gd.dtype, packed_T3Gd))


def _looked_up(shards: Any, pooled: bool, features: Any) -> Tensor:
    """In place of a kernel of tables of one width: one lookup and one update, whatever their number."""
    _ADAM.iter_cpu += 1
    shape = len(features.values()), shards[0][1].row.shape[1]
    asks = torch.empty(0, device=GPU, requires_grad=True)
    return cast(Tensor, _Fused.apply(("lookup", "update"), shape, torch.float32, asks))


_ADAM = SimpleNamespace(iter_cpu=0)
"""In place of FBGEMM's tables, which count their lookups."""


def _pinned(self: Tensor) -> Tensor:
    copied = self.clone()
    copied.in_pinned_memory = True  # type: ignore[attr-defined]
    return copied


def _exchanged(
    received: Tensor, sent: Tensor, to: Any = None, from_: Any = None, group: Any = None, **options: Any
) -> Any:
    """On the host, every rank sends what this one sends to itself."""
    if not isinstance(received, OnGPU):
        W, rank = group.size(), group.rank()
        own = sent.split(from_ or [len(sent) // W] * W)[rank]
        received.copy_(own.repeat(W))
    return _EXCHANGE(received, sent, to, from_, group=group, **options)


_EXCHANGE = dist.all_to_all_single


class _Stream:
    cuda_stream = 0
    device = GPU

    def __getattr__(self, name: str) -> Any:
        if name == "synchronize":
            METER.note("waits", "synchronize")
        return lambda *_: self


def _launched(kernel: Any, *_: Any, **__: Any) -> None:
    METER.note("launches", kernel.fn.__name__)


@contextmanager
def as_if_on_a_gpu(
    launch: Callable[..., None] = _launched, multiprocessors: int = 132, shared: int = 227 * 1024, major: int = 9
) -> Iterator[None]:
    """The project's code within works as on a GPU, with tensors without memory. Triton's kernels are passed to
    `launch`, as JITFunction.run is called; a block has `shared` bytes of shared memory at most."""

    def on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
        """Without the meter."""

        def called(*arguments: Any) -> Any:
            with _disable_current_modes():
                return function(*arguments)

        return called

    shard = parallelize._shard

    def sharded(collections: Any, plans: Any, settings: Any, ranks: Ranks, replicas: Any) -> Any:
        return shard(collections, plans, settings, replace(ranks, device=torch.device("cpu")), replicas)

    properties = SimpleNamespace(multi_processor_count=multiprocessors, total_memory=80 * 2**30, major=major, minor=0)
    cuda = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "current_device": lambda: 0,
        "device_of": lambda _: nullcontext(),
        "get_device_properties": lambda *_: properties,
        "is_current_stream_capturing": lambda: False,
        "Event": lambda *_: SimpleNamespace(record=lambda: None, synchronize=lambda: None),
        "Stream": lambda *_: _Stream(),
        "current_stream": lambda *_: _Stream(),
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: METER.note("waits", "synchronize"),
    }
    with ExitStack() as stack:
        patch = lambda owner, name, value: stack.enter_context(mock.patch.object(owner, name, value))  # noqa: E731
        for name, value in cuda.items():
            patch(torch.cuda, name, value)
        patch(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch(Tensor, "pin_memory", _pinned)
        patch(JITFunction, "run", launch)
        patch(mol_triton, "max_shared_mem", lambda _: shared)
        patch(dist, "all_to_all_single", _exchanged)
        patch(ddp, "_verify_param_shape_across_processes", lambda *_: None)
        patch(ddp, "_sync_module_states", lambda **_: None)
        for name in ("_has_foreach_support", "_device_has_foreach_support"):
            patch(clip_grad, name, lambda *_: True)
        patch(sasrec, "attend_jagged", _attended)
        patch(optimizer, "_looked_up", _looked_up)
        patch(clipping, "fused_adam", lambda _: _ADAM)
        # Every rank says that it has the first one's shards.
        patch(ShardedTensor, "_init_from_local_shards", lambda *_, **__: SimpleNamespace())
        patch(parallelize, "own_group", lambda ranks, _: ranks.group)
        patch(parallelize, "unsharded", on_the_host(parallelize.unsharded))
        patch(parallelize, "plan_tables", on_the_host(parallelize.plan_tables))
        patch(parallelize, "_shard", on_the_host(sharded))
        patch(Devices, "of", staticmethod(lambda ranks: Devices(ranks.world_size, ranks.world_size, "cpu")))
        # Without a kernel for CUDA in this build, torch would compute this one from others.
        kernels = torch.library.Library("aten", "IMPL")
        stack.callback(kernels._destroy)
        kernels.impl("silu_backward", lambda *_: None, "CUDA")
        patch(
            sys.modules[torch.optim.Optimizer.__module__],
            "_foreach_supported_types",
            [Tensor, torch.nn.Parameter, OnGPU],
        )
        # Parameters become other tensors when they are moved, not the same with other memory.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(METER)
        yield


def made_up(max_length: int, users: int = 1024, items: int = 3706) -> Dataset:
    """Histories of 5 to 2 L actions, so that some are longer than what is read."""
    random = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(random.integers(5, 2 * max_length, users))])
    actions = random.integers(0, items, offsets[-1]).astype(np.int32)
    times = np.arange(len(actions), dtype=np.int32)
    return Dataset(Path("made up"), "made up", users, items, actions, offsets, times, Schema.of_ids(items), 0.0)


class _Phases:
    """In place of a pipeline's clock: tells the meter the phase."""

    elapsed, in_steps, exact = 0.0, 0.0, False

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        METER.phase, METER.casts = phase, {}
        yield


def counted(config: Config, world_size: int) -> Counts:
    """A step of the first of so many ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    ranks = Ranks(0, world_size, 0, GPU, group)
    config = replace(config, train=replace(config.train, precision="bf16", log_every=1000))
    try:
        dataset = made_up(config.model.encoder.max_length)
        batches = training_batches(config, dataset, ranks)
        with as_if_on_a_gpu():
            model = parallel_model(config, dataset.schema, ranks, restored=True)
            optimizer = dense_optimizer(model.tower, config.dense)
            tables, _ADAM.iter_cpu = model.table_optimizers, 0
            tables.first_rows = [torch.empty(table.dim, device=GPU) for table in model.plan.values() for _ in range(3)]
            with Pipeline(model, optimizer, batches, STEPS) as pipeline:
                pipeline.clock = cast(Any, _Phases())
                for _ in range(STEP - 1):
                    pipeline.train_step()
                METER.counts, METER.on = Counts(), True
                pipeline.train_step()
                METER.on = False
        return METER.counts
    finally:
        METER.on = False
        dist.destroy_process_group()


def cases(recipes: Sequence[str] = ()) -> dict[tuple[str, int, int], Config]:
    """By recipe, batch and ranks: each at batch 128 on one rank, and at its own batch on eight. Without the moving
    average, which is of every tenth step."""
    found = {}
    for name in recipes or recipe_names():
        config = with_settings(load_recipe(name), {"train.ema": 0.0})
        found[name, 128, 1] = replace(config, train=replace(config.train, batch_size=128))
        found[name, config.train.batch_size, 8] = config
    return found


def main(options: Options) -> None:
    console = Console(width=160)
    titles = ("recipe", "batch", "ranks", *PHASES, "launches", "copies", "blocking", "waits")
    table = Table(*titles)
    for case, config in cases(options.recipes).items():
        counts = counted(config, case[2])
        table.add_row(*map(str, (*case, *(counts.launches[phase] for phase in PHASES), *counts.total)))
        if options.sources:
            of_case = Table("phase", "source", "operation", "times", title=" ".join(map(str, case)))
            for (phase, source, what), number in counts.sources.most_common():
                of_case.add_row(phase, source, what, str(number))
            console.print(of_case)
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
