"""A CUDA device that is simulated, for tests on machines without one: what the product does on CUDA, done for real.

A tensor of this device is memory of the host that says that it is on "cuda:0". So torch takes CUDA's ways (autocast,
autograd with its streams, the product's own branches), and each operation arrives here, below autograd, is checked as
CUDA would check it, and is then computed on the CPU. The values are those of a CPU run up to rounding. Simulated are:

- Devices: tensors of the host and of the device do not mix, except where CUDA lets them.
- Triton: a launch's arguments are checked, and the kernel runs in Triton's interpreter.
- FBGEMM's fused tables: a stand-in for the lookup, its gradients and the optimizers that the product uses.
- Flash and efficient attention: stand-ins that ask for what these ask for.
- Streams: see `Streams`.
- NCCL: a stream of its own, over the process group that there is.

Not reached: values and limits of CUDA's own kernels, and operations that have none; inline assembly, tensor cores,
registers and shared memory (benchmarks.kernels compiles the kernels); FBGEMM's caches of rows, and its rounding at
random; NCCL itself; streams within C++, such as DDP's sums, which count as work of the current stream; the allocator's
limits, CUDA graphs and `torch.compile`.

`begin` cannot be undone: use it in a process of its own.
"""

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._sanitizer import StreamSynchronizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from logitmix.comm import fp8_c
from logitmix.comm.fp8_plain import MANTISSA_BITS
from logitmix.modules import noise

DEVICE = torch.device("cuda", 0)
"""Of this rank, from `begin` on."""
CPU = torch.device("cpu")
SOURCE = Path(__file__).with_suffix(".cpp")
NCCL, HOST = -1, -2
"""The stream of NCCL, and in place of one the host that waits for an event; the streams are numbered by
simulated_cuda.cpp, from 0 for the default stream."""
FAR = 1 << 62
"""What a simulated tensor's address has on top, so that C that reads it ends the process as it would on CUDA."""
aten = torch.ops.aten


class Fault(AssertionError):
    """What CUDA would refuse, or would do wrong without a word."""


def compiled(folder: Path) -> Path | None:
    """simulated_cuda.cpp as a library in this folder, in some seconds; None without a compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    library, root = folder / "simulated_cuda.so", Path(torch.__file__).parent
    words = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root / 'include'}", str(SOURCE)]
    words += [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(library)]
    subprocess.run(words, check=True)
    return library


class Simulated(Tensor):
    """Memory of the host that says that it is on the device."""

    elem: Tensor

    @staticmethod
    def __new__(cls, elem: Tensor) -> "Simulated":
        return _make(cls, elem)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _DEVICE.run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.elem.data_ptr() + FAR if self.numel() else 0

    @property
    def data(self) -> Any:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: "Simulated") -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.elem = other.elem

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def as_subclass(self, cls: Any) -> Any:
        return _make(_both(cls), self.elem)

    def __repr__(self, **_: Any) -> str:
        return f"Simulated({self.elem})"

    def __deepcopy__(self, memo: Any) -> Any:
        copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Fault("a tensor of the device is pickled")


def _make(cls: Any, elem: Tensor) -> Any:
    made = Tensor._make_subclass(cls, elem, False, dispatch_device=True, device_for_backend_keys=DEVICE)
    made.elem = elem
    return made


@functools.cache
def _both(cls: Any) -> Any:
    return type(cls.__name__, (cls, Simulated), {})


@dataclass
class Access:
    stream: int
    number: int
    what: str


@dataclass
class Memory:
    """An allocation: the stream that it belongs to, and its last accesses."""

    stream: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    made: str = ""


class Streams:
    """Which access to memory comes before which, by the events that were recorded and waited for. Collects faults:

    - an access on one stream that does not come after what another stream wrote, or writes what another may still read;
    - memory that is freed, and so given to the next who asks on its own stream, while another stream may still use it,
      though neither `record_stream` nor an event of that stream was waited for.

    A part of torch's own CUDA stream sanitizer keeps what comes before what. The rest of that is not used: it knows
    memory by a tensor's address, so not two views as one, and it does not look at what is freed.
    """

    def __init__(self) -> None:
        self.order = StreamSynchronizations()
        self.memory: dict[int, Memory] = {}
        self.faults: list[str] = []
        self.number = 0
        self.lock = threading.RLock()

    def access(self, stream: int, read: list[Tensor], written: list[Tensor], what: str) -> None:
        """An operation of a stream."""
        with self.lock:
            self.number += 1
            self.order.update_seq_num(stream, self.number)
            access = Access(stream, self.number, what)
            for memory in {id(of): of for of in map(self._of, written)}.values():
                for other in (memory.write, *memory.reads.values()):
                    self._require_after(access, other, memory, "writes what {} may still use")
                memory.write, memory.reads = access, {}
            for memory in {id(of): of for of in map(self._of, read)}.values():
                if memory.write is not access:
                    self._require_after(access, memory.write, memory, "reads what {} may still write")
                    memory.reads[stream] = access

    def record(self, tensor: Tensor, stream: int) -> None:
        with self.lock:
            self._of(tensor).recorded.add(stream)

    def recorded(self, event: int, stream: int) -> None:
        with self.lock:
            self.order.create_event(event)
            self.order.record_state(event, stream)

    def waited(self, event: int, stream: int) -> None:
        with self.lock:
            if stream == HOST:
                self.order.all_streams_wait_for_event(event)
            else:
                self.order.stream_wait_for_event(stream, event)

    def host_waits(self, stream: int | None = None) -> None:
        """The host waits for a stream, or for all."""
        with self.lock:
            if stream is None:
                self.order.sync_all_streams()
            else:
                self.order.all_streams_wait_for_stream(stream)

    def _of(self, tensor: Tensor) -> Memory:
        plain = tensor.elem if isinstance(tensor, Simulated) else tensor
        storage = (plain._values() if plain.is_sparse else plain).untyped_storage()
        key = storage._cdata
        if key not in self.memory:
            self.memory[key] = Memory(_LIBRARY.current_stream(), made=where())
            weakref.finalize(storage, self._freed, key).atexit = False
        return self.memory[key]

    def _freed(self, key: int) -> None:
        with self.lock:
            memory = self.memory.pop(key)
            for access in (memory.write, *memory.reads.values()):
                if access is None or access.stream in memory.recorded:
                    continue
                if not self.order.is_ordered_after(memory.stream, access.number, access.stream):
                    self.faults.append(
                        f"memory of stream {memory.stream}, made at {memory.made}, is freed while stream "
                        f"{access.stream} may still use it ({access.what}): record_stream is missing"
                    )

    def _require_after(self, access: Access, other: Access | None, memory: Memory, said: str) -> None:
        if other and not self.order.is_ordered_after(access.stream, other.number, other.stream):
            said = said.format(f"stream {other.stream} ({other.what})")
            self.faults.append(f"stream {access.stream} ({access.what}) {said}, memory made at {memory.made}")


class Device:
    """The operations of the device."""

    def __init__(self) -> None:
        self.streams: Streams | None = None
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        """Where the host waited for the device; not for an event."""
        self.sent: list[tuple[int, Tensor, Tensor]] = []
        """Copies to pinned memory of the host: the stream, the memory and what it will have once the next event of the
        stream is waited for."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default:
            return DEVICE
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(isinstance(leaf, Simulated) for leaf in leaves)
        asked = kwargs.get("device")
        asked = None if asked is None else torch.device(asked)
        if asked is not None and asked.type == "cuda" and asked.index not in (None, DEVICE.index):
            raise Fault(f"{func} asks for {asked}, but this rank has {DEVICE} at {where()}")
        if not there and (asked is None or asked.type != "cuda"):
            if func is aten.is_pinned.default:
                return id(args[0]) in _PINNED
            if func in (aten._pin_memory.default, aten.pin_memory.default):
                return _pinned(args[0])
            if asked is None and not any(isinstance(of, torch.device) for of in args):
                return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func._can_decompose():
            # Without autograd, torch has not taken it apart yet.
            with Everywhere():
                return func.decompose(*args, **kwargs)
        if not there and (asked is None or asked.type != "cuda"):
            return func(*args, **kwargs)
        if special := _SPECIAL.get(func):
            return special(self, *args, **kwargs)
        if asked is not None:
            kwargs = {**kwargs, "device": CPU}
        on_device = asked.type == "cuda" if asked is not None else True
        if there:
            _check_devices(func, args, leaves)
            counted = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
            if not on_device or counted or func in _WAITING or (func in _INDEXING and _has_masks(args[1])):
                self._waits(func)
        if "pin_memory" in kwargs:
            kwargs = {**kwargs, "pin_memory": False}
        plain_args, plain_kwargs = tree_map_only(Simulated, lambda of: of.elem, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if not on_device:
            self._note(func, leaves, [], args, kwargs)
            return out
        by_elem = {id(of.elem): of for of in leaves if isinstance(of, Simulated)}
        made = tree_map_only(Tensor, lambda of: by_elem.get(id(of)) if id(of) in by_elem else Simulated(of), out)
        self._note(func, leaves, [of for of in tree_leaves(made) if isinstance(of, Simulated)], args, kwargs)
        return made

    def faults(self) -> list[str]:
        """Those of the streams, once each."""
        return [*dict.fromkeys(self.streams.faults)] if self.streams else []

    def launched(self, name: str, tensors: list[Tensor]) -> None:
        """A kernel, which may write what it is given."""
        self.launches[name] += 1
        if self.streams:
            self.streams.access(current(), [], tensors, f"{name} at {where()}")

    def _note(self, func: Any, given: list[Tensor], made: list[Tensor], args: Any, kwargs: Any) -> None:
        if self.streams is None or func.is_view:
            return
        written = [of for of in _written(func, args, kwargs) if isinstance(of, Simulated)]
        ids = {*map(id, written)}
        read = [of for of in given if isinstance(of, Simulated) and id(of) not in ids]
        # What an operation makes may be what it was given.
        written += [of for of in made if id(of) not in ids and all(of is not one for one in read)]
        if func in _EMPTY:
            written = []
            for of in made:
                self.streams._of(of)
        self.streams.access(current(), read, written, f"{func} at {where()}")

    def _waits(self, func: Any) -> None:
        self.waits[f"{func} at {where()}"] += 1
        if self.streams:
            self.streams.host_waits(current())


_DEVICE = Device()
_LIBRARY: Any = None
_PINNED: set[int] = set()


class Everywhere(TorchDispatchMode):
    """Also for operations that are given no tensor of the device, such as those that make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _DEVICE.run(func, args, kwargs or {})


def where() -> str:
    """The line of the product that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("logitmix."):
            return f"{name.removeprefix('logitmix.').replace('.', '/')}.py:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch"


def current() -> int:
    number: int = _LIBRARY.current_stream()
    return number


def _pinned(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    _PINNED.add(id(copied))
    weakref.finalize(copied, _PINNED.discard, id(copied)).atexit = False
    return copied


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (of for of in tree_leaves(value) if isinstance(of, Tensor))


_EMPTY = {
    aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default,
    aten.new_empty_strided.default,
}  # fmt: skip
_COPYING = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}
_INDEXING = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
    aten._unsafe_index.Tensor, aten._unsafe_index_put.default,
}  # fmt: skip
_WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default, aten.is_nonzero.default,
}  # fmt: skip
_WITH_A_NUMBER = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill_.Tensor, aten.fill.Tensor}
"""Operations beside the pointwise ones that take a tensor of the host without axes for a number."""


def _has_masks(indices: Any) -> bool:
    return any(isinstance(of, Tensor) and of.dtype == torch.bool for of in indices)


def _check_devices(func: Any, args: Any, leaves: list[Tensor]) -> None:
    for leaf in leaves:
        if isinstance(leaf, Simulated):
            continue
        if leaf.device.type != "cpu":
            raise Fault(f"{func} is given tensors of {leaf.device} and {DEVICE} at {where()}")
        number = leaf.ndim == 0 and (torch.Tag.pointwise in func.tags or func in _WITH_A_NUMBER | _INDEXING)
        index = func in _INDEXING and isinstance(args[0], Simulated) and any(leaf is of for of in args[1])
        if func not in _COPYING and not number and not index:
            shape = tuple(leaf.shape)
            raise Fault(f"{func} is given a tensor of the host, {shape} {leaf.dtype}, with others of CUDA at {where()}")
        if index:
            _DEVICE._waits(func)


def _copy(on: Device, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Between devices, or on one."""
    target, origin = (of.elem if isinstance(of, Simulated) else of for of in (to, source))
    if not isinstance(to, Simulated):
        if non_blocking and id(to) in _PINNED:
            on._note(aten.copy_.default, [source], [], (to, source), {})
            on.sent.append((current(), to, origin.clone()))
            to.fill_(torch.nan)
            return to
        on._waits("copy to the host")
    elif not isinstance(source, Simulated) and source.ndim and not (non_blocking and id(source) in _PINNED):
        on.waits[f"copy from the host at {where()}"] += 1
    target.copy_(origin)
    on._note(aten.copy_.default, [source], [], (to, source), {})
    return to


def _to_copy(on: Device, source: Tensor, **options: Any) -> Tensor:
    asked = options.pop("device", None)
    asked = source.device if asked is None else torch.device(asked)
    non_blocking = options.pop("non_blocking", False)
    origin = source.elem if isinstance(source, Simulated) else source
    out = aten._to_copy.default(origin, **{**options, "pin_memory": None})
    if asked.type != "cuda":
        if non_blocking:
            raise Fault(f"a copy to the host is not waited for at {where()}")
        on._note(aten._to_copy.default, [source], [], (source,), {})
        on._waits("copy to the host")
        return out
    if not isinstance(source, Simulated) and not (non_blocking and id(source) in _PINNED):
        on.waits[f"copy from the host at {where()}"] += 1
    made = Simulated(out)
    on._note(aten._to_copy.default, [source], [made], (source,), {})
    return made


def _record_stream(on: Device, tensor: Tensor, stream: torch.Stream) -> None:
    if on.streams:
        on.streams.record(tensor, stream.stream_id)


def _attended(
    given: list[Tensor], causal: bool, scale: float | None, gradient: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Each sequence for itself, query, key and value [T, G, d] -> [T, G, d], or with the gradient of that, theirs."""
    *sides, bounds = given
    scale = sides[0].shape[-1] ** -0.5 if scale is None else scale
    outs = []
    for first, last in itertools.pairwise(bounds.tolist()):
        q, k, v = (of[first:last].transpose(0, 1).float() for of in sides)
        score = q @ k.mT * scale
        if causal:
            score += torch.full_like(score[0], -torch.inf).triu(1)
        weight = score.softmax(-1)
        if gradient is None:
            outs.append([weight @ v])
            continue
        d_out = gradient[first:last].transpose(0, 1).float()
        d_weight = d_out @ v.mT
        d_score = weight * (d_weight - (d_weight * weight).sum(-1, keepdim=True)) * scale
        outs.append([d_score @ k, d_score.mT @ q, weight.mT @ d_out])
    return tuple(torch.cat(of, 1).transpose(0, 1).to(sides[0].dtype) for of in zip(*outs, strict=True))


def _require_attention(
    q: Tensor, k: Tensor, v: Tensor, cumulative: list[Tensor], dtypes: tuple[torch.dtype, ...]
) -> None:
    if not all(isinstance(of, Simulated) for of in (q, k, v, *cumulative)):
        raise Fault(f"attention is given tensors of the host at {where()}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in dtypes:
        raise Fault(f"attention is given {q.dtype}, {k.dtype} and {v.dtype} at {where()}")
    if any(of.stride(-1) != 1 for of in (q, k, v)) or any(of.dtype != torch.int32 for of in cumulative):
        raise Fault(f"attention is given rows that are not contiguous, or bounds that are not int32, at {where()}")
    least = 16 // q.element_size()
    if any(stride % least for of in (q, k, v) for stride in of.stride()[:-1]) or q.shape[-1] % least:
        raise Fault(f"attention is given rows that are not aligned to 16 bytes at {where()}")


def _attend(
    on: Device, name: str, given: list[Any], causal: bool, scale: float | None, gradient: Any = None
) -> tuple[Tensor, ...]:
    plain = [of.elem for of in given]
    outs = tuple(map(Simulated, _attended(plain, causal, scale, None if gradient is None else gradient.elem)))
    on.launched(name, [])
    on._note(aten.clone.default, given if gradient is None else [gradient, *given], [*outs], (), {})
    return outs


def _like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return Simulated(torch.zeros(shape, dtype=dtype))


def _flash(on: Device, q: Any, k: Any, v: Any, cum_q: Any, cum_k: Any, *rest: Any, scale: Any = None, **_: Any) -> Any:
    _require_attention(q, k, v, [cum_q, cum_k], (torch.float16, torch.bfloat16))
    (out,) = _attend(on, "flash attention", [q, k, v, cum_q], rest[3], scale)
    numbers = [_like((2,), torch.uint64), _like((), torch.uint64), _like((0,), q.dtype)]
    return out, _like((q.shape[1], q.shape[0]), torch.float32), *numbers


def _flash_backward(
    on: Device, gradient: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, cum_q: Any, cum_k: Any, *rest: Any,
    scale: Any = None, **_: Any,
) -> Any:  # fmt: skip
    _require_attention(q, k, v, [cum_q, cum_k], (torch.float16, torch.bfloat16))
    return _attend(on, "flash attention, backward", [q, k, v, cum_q], rest[3], scale, gradient)


def _efficient(
    on: Device, q: Any, k: Any, v: Any, bias: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout: float,
    mask: int, logsumexp: bool = False, *, scale: Any = None, **_: Any,
) -> Any:  # fmt: skip
    _require_attention(q, k, v, [cum_q, cum_k], (torch.float16, torch.bfloat16, torch.float32))
    (out,) = _attend(on, "efficient attention", [q[0], k[0], v[0], cum_q], bool(mask), scale)
    return (
        out[None],
        _like((len(cum_q) - 1, q.shape[2], max_q), torch.float32),
        *[_like((), torch.int64)] * 2,
        max_q,
        max_k,
    )


def _efficient_backward(
    on: Device, gradient: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, cum_q: Any, cum_k: Any, max_q: int,
    max_k: int, logsumexp: Any, dropout: float, seed: Any, offset: Any, mask: int, *_: Any, scale: Any = None,
    **__: Any,
) -> Any:  # fmt: skip
    given = [q[0], k[0], v[0], cum_q]
    grads = _attend(on, "efficient attention, backward", given, bool(mask), scale, gradient[0])
    return *(of[None] for of in grads), None


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten._to_copy.default: _to_copy,
    aten.record_stream.default: _record_stream,
    aten._flash_attention_forward.default: _flash,
    aten._flash_attention_backward.default: _flash_backward,
    aten._efficient_attention_forward.default: _efficient,
    aten._efficient_attention_backward.default: _efficient_backward,
    aten.is_pinned.default: lambda device, tensor, *_: False,
}


class Stream(torch.Stream):
    """torch.cuda.Stream."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=DEVICE, priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def synchronize(self) -> None:
        if _DEVICE.streams:
            _DEVICE.streams.host_waits(self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        raise Fault("use torch.cuda.stream")


class Event(torch.Event):
    """torch.cuda.Event."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> "Event":
        return super().__new__(cls, device=DEVICE, enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        stream = stream or current_stream()
        super().record(stream)
        self.sent = [of for of in _DEVICE.sent if of[0] == stream.stream_id]
        _DEVICE.sent = [of for of in _DEVICE.sent if of[0] != stream.stream_id]

    def wait(self, stream: Any = None) -> None:
        super().wait(stream or current_stream())

    def synchronize(self) -> None:
        super().synchronize()
        for _, to, origin in self.sent:
            to.copy_(origin)

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def current_stream(device: Any = None) -> Stream:
    return _stream(current())


def _stream(number: int) -> Stream:
    return Stream(stream_id=number, device_index=DEVICE.index, device_type=1)


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """torch.cuda.stream."""
    if stream is None:
        yield
        return
    before = _LIBRARY.exchange_stream(stream.stream_id)
    try:
        yield
    finally:
        _LIBRARY.exchange_stream(before)


class Work(dist.Work):
    """A collective on NCCL's stream, which keeps its tensors until it is waited for, as torch does."""

    def __init__(self, work: Any, tensors: list[Any]) -> None:
        super().__init__()
        self.work, self.tensors = work, tensors
        self.done = Event()
        self.done.record(_stream(NCCL))

    def wait(self, timeout: Any = None) -> bool:
        if self.work:
            self.work.wait()
        self._wait()
        self.work, self.tensors = None, []
        return True

    def _wait(self) -> None:
        current_stream().wait_event(self.done)

    def is_completed(self) -> bool:
        return self.work is None


def _collective(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def simulated(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        tensors = [of for of in tree_leaves((args, kwargs)) if isinstance(of, Tensor)]
        there = [isinstance(of, Simulated) for of in tensors]
        if not any(there):
            return collective(*args, async_op=async_op, **kwargs)
        if not all(there):
            raise Fault(f"{collective.__name__} of tensors of the host and the device at {where()}")
        if not all(of.is_contiguous() for of in tensors):
            raise Fault(f"{collective.__name__} of tensors that are not contiguous at {where()}")
        if not async_op:
            collective(*args, **kwargs)
            return None
        nccl = _stream(NCCL)
        nccl.wait_stream(current_stream())
        with on_stream(nccl):
            work = collective(*args, async_op=True, **kwargs)
        return Work(work, tensors)

    return simulated


def begin(library: Path) -> Device:
    """From now on, this process has a CUDA device."""
    global _LIBRARY, DEVICE
    if _LIBRARY is not None:
        return _DEVICE
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    _LIBRARY = ctypes.CDLL(str(library))
    _LIBRARY.current_stream.restype = ctypes.c_int64
    _LIBRARY.exchange_stream.restype, _LIBRARY.exchange_stream.argtypes = ctypes.c_int64, [ctypes.c_int64]
    told = ctypes.CFUNCTYPE(None, ctypes.c_ssize_t, ctypes.c_int64)

    def recorded(event: int, stream: int) -> None:
        if _DEVICE.streams:
            _DEVICE.streams.recorded(event, stream)

    def waited(event: int, stream: int) -> None:
        if _DEVICE.streams:
            _DEVICE.streams.waited(event, stream)

    _DEVICE.callbacks = told(recorded), told(waited)  # type: ignore[attr-defined]
    _LIBRARY.begin(DEVICE.index, *_DEVICE.callbacks)  # type: ignore[attr-defined]
    _take_over_torch()
    _take_over_collectives()
    _interpret_triton()
    _take_over_fbgemm()
    Everywhere().__enter__()
    return _DEVICE


def _take_over_torch() -> None:
    cuda: Any = torch.cuda
    properties = SimpleNamespace(
        name="simulated", total_memory=80 * 2**30, multi_processor_count=4, major=9, minor=0, uuid="0"
    )
    stands_for = {
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: _stream(0),
        "device_of": lambda tensor: nullcontext(),
        "device": lambda device=None: nullcontext(),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: properties.name,
        "synchronize": lambda device=None: _DEVICE.streams and _DEVICE.streams.host_waits(),
    }
    answers = {
        "_lazy_init": None, "init": None, "is_available": True, "is_initialized": True, "device_count": 8,
        "current_device": DEVICE.index, "_exchange_device": DEVICE.index, "_maybe_exchange_device": DEVICE.index,
        "is_bf16_supported": True, "is_current_stream_capturing": False, "max_memory_allocated": 0,
        "memory_allocated": 0, "memory_reserved": 0, "mem_get_info": (80 * 2**30, 80 * 2**30), "empty_cache": None,
        "reset_peak_memory_stats": None, "manual_seed": None, "manual_seed_all": None,
    }  # fmt: skip

    def set_device(device: Any) -> None:
        if torch.device(device).index != DEVICE.index:
            raise Fault(f"rank {DEVICE.index} takes {device}")

    stands_for["set_device"] = set_device
    for name, value in answers.items():
        stands_for[name] = functools.partial(lambda value, *args, **kwargs: value, value)
    for name, stand_in in stands_for.items():
        setattr(cuda, name, stand_in)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    # torch.tensor makes memory of the host, and only then asks for the device.
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_swap_module_params_on_conversion(True)


def _take_over_collectives() -> None:
    for name in ("all_to_all_single", "all_reduce", "all_gather", "broadcast", "all_gather_into_tensor",
                 "reduce_scatter_tensor", "all_to_all", "reduce"):  # fmt: skip
        setattr(dist, name, _collective(getattr(dist, name)))
    init = dist.init_process_group

    def init_process_group(backend: str, **kwargs: Any) -> None:
        init(backend.replace("nccl", "gloo"), **kwargs)

    dist.init_process_group = init_process_group
    dist.get_backend = lambda group=None: "nccl"


def _interpret_triton() -> None:
    """Has kernels that are loaded from now on run in the interpreter, with their arguments checked."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
        del sys.modules[name]
    import triton.compiler.compiler
    from triton.runtime.interpreter import InterpretedFunction

    triton.compiler.compiler.max_shared_mem = lambda device: 227 * 1024
    run = InterpretedFunction.run

    def checked(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        name = self.fn.__name__
        tensors = []
        for number, argument in enumerate((*args, *kwargs.values())):
            if isinstance(argument, Tensor):
                if not isinstance(argument, Simulated):
                    raise Fault(f"{name} is given a tensor of the host as argument {number} at {where()}")
                if argument.elem.data_ptr() % argument.element_size():
                    raise Fault(f"{name} is given a tensor that is not aligned as argument {number} at {where()}")
                tensors.append(argument)
        _DEVICE.launched(name, tensors)
        # These choose what only a GPU's compiler has, and what makes up for the interpreter.
        emulated = {"EMULATED": any(of.dtype == torch.bfloat16 for of in tensors), "COARSE": False, "ASSEMBLY": False}
        kwargs |= {flag: value for flag, value in emulated.items() if flag in kwargs}
        args = [of.elem if isinstance(of, Simulated) else of for of in args]
        with torch.utils._python_dispatch._disable_current_modes():
            if name in _PLAIN:
                return _PLAIN[name](*args, **kwargs)
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = checked


def _dropout(
    x: Any, row: Any, onto: Any, relu: Any, out: Any, R: int, W: int, low: int, high: int, drop: int, scale: float,
    *, ONTO: bool, RELU: bool, HALF: bool, **_: Any,
) -> None:  # fmt: skip
    key = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
    value = noise._dropped(x.to(torch.bfloat16 if HALF else torch.float32), row, key, drop)
    value = value.masked_fill(relu <= 0, 0.0) if RELU else value
    out.copy_(onto + value if ONTO else value)


def _quantize(
    values: Any, stride: int, wire: Any, wire_stride: int, ends: Any, R: int, W: int, low: int, high: int,
    *, RANDOM: bool, MANTISSA: int, **_: Any,
) -> None:  # fmt: skip
    seed = low | high << 32 if RANDOM else None
    fp8_c.quantize(values, _FP8[MANTISSA], ends.diff().tolist(), seed, wire)


def _dequantize(
    wire: Any, wire_stride: int, values: Any, stride: int, ends: Any, R: int, *, MANTISSA: int, **_: Any
) -> None:
    fp8_c.dequantize(wire, _FP8[MANTISSA], ends.diff().tolist(), values)


_FP8 = {bits: dtype for dtype, bits in MANTISSA_BITS.items()}
_PLAIN = {"_dropout": _dropout, "_quantize_kernel": _quantize, "_dequantize_kernel": _dequantize}
"""The kernels that are called most often, in plain forms that their own tests hold them to."""


def _take_over_fbgemm() -> None:
    from fbgemm_gpu.split_embedding_codegen_lookup_invokers import lookup_adam, lookup_rowwise_adagrad, lookup_sgd

    lookup_adam.invoke = _adam
    lookup_rowwise_adagrad.invoke = _rowwise_adagrad
    lookup_sgd.invoke = _sgd


def _adam(common: Any, settings: Any, momentum1: Any, momentum2: Any, step: int, **_: Any) -> Tensor:
    def update(row: Tensor, gradient: Tensor, feature: int, ids: Tensor, lr: float) -> Tensor:
        moments = []
        for kept, beta, of in ((momentum1, settings.beta1, gradient), (momentum2, settings.beta2, gradient.square())):
            table = _state(kept, feature, row.shape[1])
            table[ids] = moment = beta * table[ids] + (1 - beta) * of
            moments.append(moment / (1 - beta**step))
        return row - lr * moments[0] / (moments[1].sqrt() + settings.eps)

    return _lookup(common, update)


def _rowwise_adagrad(common: Any, settings: Any, momentum1: Any, **_: Any) -> Tensor:
    def update(row: Tensor, gradient: Tensor, feature: int, ids: Tensor, lr: float) -> Tensor:
        table = _state(momentum1, feature, 1)
        table[ids] = squares = table[ids] + gradient.square().mean(1, keepdim=True)
        return row - (lr / (squares.sqrt() + settings.eps)) * gradient

    return _lookup(common, update)


def _sgd(common: Any, settings: Any, **_: Any) -> Tensor:
    return _lookup(common, lambda row, gradient, feature, ids, lr: row - lr * gradient)


Update = Callable[[Tensor, Tensor, int, Tensor, float], Tensor]


def _state(kept: Any, feature: int, width: int) -> Tensor:
    """What an optimizer keeps of a feature's table and of those behind it [R, width]."""
    return _rows(kept.dev, int(kept.offsets.elem[feature]), width)


def _rows(memory: Tensor, place: int, width: int) -> Tensor:
    return memory[place : place + (len(memory) - place) // width * width].view(-1, width)


def _lookup(common: Any, update: Update) -> Tensor:
    """FBGEMM's lookup of one or several tables, with the update in its backward."""
    indices, offsets = common.indices, common.offsets
    for name in ("indices", "offsets", "dev_weights", "weights_offsets", "indice_weights"):
        given = getattr(common, name)
        if given is not None and not (isinstance(given, Simulated) and given.is_contiguous()):
            raise Fault(f"FBGEMM's lookup is given {name} that are not contiguous memory of the device at {where()}")
    if indices.dtype != offsets.dtype:
        raise Fault(f"FBGEMM's lookup is given {indices.dtype} and {offsets.dtype} at {where()}")
    out: Tensor = _Lookup.apply(common, update, common.placeholder_autograd_tensor)
    return out


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, common: Any, update: Update, placeholder: Tensor) -> Tensor:
        ctx.common, ctx.update = common, update
        outs = []
        for feature in _features(common):
            lengths, weights = feature.lengths, feature.weights
            row = feature.table.index_select(0, feature.ids).float()
            if common.pooling_mode == 2:
                outs.append(row)
                continue
            row = row if weights is None else row * weights[:, None]
            bag = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE), lengths, output_size=len(row))
            outs.append(row.new_zeros(len(lengths), row.shape[1]).index_add_(0, bag, row))
        return torch.cat(outs, 0 if common.pooling_mode == 2 else 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        common, row, column = ctx.common, 0, 0
        for feature in _features(common):
            ids, D = feature.ids, feature.table.shape[1]
            if common.pooling_mode == 2:
                own, row = gradient[row : row + len(ids)], row + len(ids)
            else:
                own, column = gradient[:, column : column + D], column + D
                own = own.repeat_interleave(feature.lengths, 0, output_size=len(ids))
                own = own if feature.weights is None else own * feature.weights[:, None]
            unique, inverse = map(Simulated, ids.elem.unique(return_inverse=True))  # type: ignore[attr-defined]
            summed = own.new_zeros(len(unique), D).index_add_(0, inverse, own)
            row_RC = feature.table.index_select(0, unique).float()
            moved = ctx.update(row_RC, summed, feature.number, unique, common.learning_rate_tensor.item())
            feature.table[unique] = moved.to(feature.table.dtype)
        return None, None, None


@dataclass
class _Feature:
    number: int
    table: Tensor
    """Its rows and those behind them [R, D]."""
    ids: Tensor
    lengths: Tensor
    """Of its bags."""
    weights: Tensor | None
    """Of its ids."""


def _features(common: Any) -> Iterator[_Feature]:
    places, bounds = common.weights_offsets.elem.tolist(), common.offsets.elem.tolist()
    alone = common.pooling_mode == 2
    widths = [common.max_D] * len(places) if alone else common.D_offsets.elem.diff().tolist()
    bags = (len(bounds) - 1) // len(places)
    for feature, (place, D) in enumerate(zip(places, widths, strict=True)):
        own = bounds[feature * bags : (feature + 1) * bags + 1]
        span = slice(own[0], own[-1])
        yield _Feature(
            feature,
            _rows(common.dev_weights, place, D),
            common.indices[span],
            common.offsets[feature * bags : (feature + 1) * bags + 1].diff(),
            None if common.indice_weights is None else common.indice_weights[span],
        )
