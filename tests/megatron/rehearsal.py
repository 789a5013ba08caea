"""Streams of a GPU on the CPU: what runs on which, who waited for whom, and what nobody waited for.

All work is done at once, as in CPU mode, but every operation, copy and message is noted on the
stream that would run it on a GPU, with a vector clock; events and waits carry clocks from stream to
stream. Two accesses to the same bytes, one of them a write, whose order nothing guarantees are a
hazard, and so is memory that is freed while another stream may still use it: torch's allocator
gives it to the next operation of the stream that it was allocated on.

Each communicator has a stream, which waits for the current one when it is given something; waiting
for a work lets the current stream wait. Sources: `ProcessGroupNCCL` and "CUDA semantics" of torch;
the method is that of torch.cuda._sanitizer, which needs a GPU and knows no communicators.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda._sanitizer import zip_arguments
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.megatron.nccl_over_gloo import NcclOverGloo
from zorse_megatron.adapter.cpu_mode import HostEvent, HostStream
from zorse_megatron.runtime.host_link import HostLink

Clock = dict[int, int]
"""Stream -> how many of its operations are over."""
# They change what a tensor shows, not what is in memory, or only reserve memory.
_NO_KERNELS = (
    "set_",
    "resize_",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "as_strided_",
)
# The host waits for the result.
_HOST_WAITS = ("_local_scalar_dense", "equal", "nonzero")
# Who reads states of generators, and Adam's counts of steps.
_READS_HOST = ("random fork", "optimizer _get_value")
# Copies to ordinary memory of the host, for which it waits, too.
_HOST_COPIES = ("copied_to_host", "joined_in_host")
_OURS = ("zorse_megatron", "megatron")


def place() -> str:
    """File, line and function of the innermost caller in zorse_megatron, or else in Megatron."""
    found: dict[str, str] = {}
    frame = sys._getframe(1)
    while frame is not None and _OURS[0] not in found:
        module = frame.f_globals.get("__name__", "")
        top = module.partition(".")[0]
        if top in _OURS and top not in found:
            found[top] = f"{module.rpartition('.')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return next((found[top] for top in _OURS if top in found), "elsewhere")


def _without_line(where: str) -> str:
    return re.sub(r":\d+", "", where)


def _reads_host() -> bool:
    """Whether what is being read has always been in the host's memory."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "").rpartition(".")[2]
        if f"{module} {frame.f_code.co_name}" in _READS_HOST:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


@dataclass(frozen=True)
class Access:
    stream: int
    tick: int
    what: str
    where: str


@dataclass(kw_only=True)
class Memory:
    """One storage: who has last used which of its bytes."""

    ref: StorageWeakRef
    home: "Stream"
    """On whose order it was allocated."""
    is_host: bool
    """Whether copies use it while the host goes on, so that the host must wait for them."""
    uses: dict[tuple[bool, int, int, int], Access] = field(default_factory=dict)
    """(is a write, stream, first byte, end) -> the last one."""

    def not_before(self, clock: Clock, *, writes_only: bool, start: int, end: int) -> list[Access]:
        """Uses of these bytes that may not be over for who has this clock."""
        return [
            use
            for (is_write, stream, first, last), use in self.uses.items()
            if (is_write or not writes_only)
            and first < end
            and start < last
            and use.tick > clock.get(stream, 0)
        ]


class Rehearsal(TorchDispatchMode):
    """Notes what the process does from `start` on. `without`: a place whose waits are ignored."""

    def __init__(self, without: str | None = None) -> None:
        super().__init__()
        self.without = without
        self.hazards: dict[str, None] = {}
        self.waits: dict[str, int] = {}
        """Module and function -> how often something is waited for there."""
        self.host: Clock = {}
        self.host_waited: Counter[str] = Counter()
        """Module and function -> how often the host waits for the device there."""
        self._streams: list[Stream] = []
        self._memories: dict[int, Memory] = {}
        self._crossed: set[int] = set()
        """Those that several streams have used."""
        self._is_muted = False
        self.current = self.main = self.new_stream()

    def new_stream(self) -> "Stream":
        self._streams.append(Stream(self, len(self._streams)))
        return self._streams[-1]

    def start(self) -> None:
        """Take the place of what CPU mode says of streams, and see every operation."""
        torch.cuda.Stream = lambda *_, **__: self.new_stream()  # type: ignore[misc, assignment]
        torch.cuda.Event = type(
            "Event", (Event,), {"__init__": lambda e, **_: Event.__init__(e, self)}
        )  # type: ignore[misc]
        torch.cuda.current_stream = lambda *_: self.current  # type: ignore[assignment]
        torch.cuda.default_stream = lambda *_: self.main  # type: ignore[assignment]
        torch.cuda.stream = self.on  # type: ignore[assignment, misc]
        torch.cuda.synchronize = lambda *_: self.host_waits(*self._streams)
        resize = torch.UntypedStorage.resize_

        def resize_(storage: Any, num_bytes: int) -> Any:
            self._resized(storage, num_bytes)
            result = resize(storage, num_bytes)
            self._memory(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
        tolist = torch.Tensor.tolist
        torch.Tensor.cpu = lambda tensor, *_, **__: self.to_host(tensor)  # type: ignore[method-assign, assignment]
        torch.Tensor.tolist = lambda tensor: tolist(tensor.cpu())  # type: ignore[method-assign]
        self.__enter__()

    @contextmanager
    def on(self, stream: "Stream | None") -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def muted(self) -> Iterator[None]:
        before, self._is_muted = self._is_muted, True
        try:
            yield
        finally:
            self._is_muted = before

    # What is waited for.

    def may_wait(self) -> bool:
        """Note that something is waited for; whether it counts."""
        where = _without_line(place())
        self.waits[where] = self.waits.get(where, 0) + 1
        return where != self.without

    def host_waits(self, *streams: "Stream") -> None:
        self.host_waited[_without_line(place())] += 1
        for stream in streams if self.may_wait() else ():
            join(self.host, stream.clock)

    # What is used.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if self._is_muted:
            return result
        if name in _NO_KERNELS:
            for tensor in _tensors(result):
                self._memory(tensor.untyped_storage())
            return result
        reads, writes = [], []
        for argument, value in zip_arguments(func._schema, args, kwargs):
            if argument.alias_info is None:
                reads += _tensors(value)
            elif argument.alias_info.is_write:
                writes += _tensors(value)
        returned = result if len(func._schema.returns) > 1 else (result,)
        for one, value in zip(func._schema.returns, returned, strict=False):
            if one.alias_info is None:
                writes += _tensors(value)
        if writes or name in _HOST_WAITS:  # views of what they read do nothing
            self.use(reads, writes, name)
        if name in _HOST_WAITS or place().endswith(_HOST_COPIES):
            self.host_waited[_without_line(place())] += int(not _reads_host())
            join(self.host, self.current.clock)
        return result

    def use(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor], what: str) -> None:
        """Something runs on the current stream."""
        stream, where = self.current, place()
        self._look_for_freed()
        join(stream.clock, self.host)
        stream.clock[stream.number] += 1
        access = Access(stream.number, stream.clock[stream.number], what, where)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._use(stream, access, tensor, is_write=is_write)

    def _use(
        self, stream: "Stream", access: Access, tensor: torch.Tensor, *, is_write: bool
    ) -> None:
        start = tensor.storage_offset() * tensor.element_size()
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (1 + extent) * tensor.element_size()
        memory = self._memory(tensor.untyped_storage())
        by_host = memory.is_host and not stream.copies
        clock = self.host if by_host else stream.clock
        for other in memory.not_before(clock, writes_only=not is_write, start=start, end=end):
            self._found(f"{_said(access, is_write)}, and nothing waits for {_said(other)}")
        if by_host:
            return  # what is given to streams later comes after it
        memory.uses[is_write, stream.number, start, end] = access
        if stream is not memory.home:
            self._crossed.add(memory.ref.cdata)

    def _memory(self, storage: Any, *, is_host: bool = False) -> Memory:
        found = self._memories.get(storage._cdata)
        if found is None or found.ref.expired():
            if found is not None:
                self._freed(found)
            home = self.current
            found = Memory(ref=StorageWeakRef(storage), home=home, is_host=is_host)
            if not is_host:  # what its stream had used there before comes first
                born = Access(home.number, home.clock[home.number], "allocation", place())
                found.uses[True, home.number, 0, sys.maxsize] = born
            self._memories[storage._cdata] = found
        return found

    def new_host_memory(self, num_bytes: int) -> torch.Tensor:
        """As if it were pinned."""
        with self.muted():
            block = torch.empty(num_bytes, dtype=torch.uint8)
        self._memory(block.untyped_storage(), is_host=True)
        return block

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor.cpu()`: what is not there is copied, and the host waits for that."""
        if self._is_muted:
            return tensor
        self.use(_tensors(tensor), (), "cpu")
        if self._memory(tensor.untyped_storage()).is_host:
            return tensor
        with self.muted():
            copied = tensor.clone()
        memory = self._memory(copied.untyped_storage(), is_host=True)
        self.host_waited[_without_line(place())] += 1
        if self.may_wait():
            join(self.host, self.current.clock)
        else:
            stream = self.current
            access = Access(stream.number, stream.clock[stream.number], "cpu", place())
            memory.uses[True, stream.number, 0, sys.maxsize] = access
        return copied

    def keep_in_host(self, tensor: torch.Tensor) -> None:
        """Take for memory of the host what is not known to be of it: nothing has used it yet."""
        memory = self._memory(tensor.untyped_storage())
        if not memory.is_host:
            memory.is_host = True
            memory.uses.clear()

    def _look_for_freed(self) -> None:
        for key in [key for key in self._crossed if self._memories[key].ref.expired()]:
            self._freed(self._memories.pop(key))
            self._crossed.discard(key)

    def _freed(self, memory: Memory) -> None:
        clock = dict(memory.home.clock)
        join(clock, self.host)
        for use in memory.not_before(clock, writes_only=False, start=0, end=sys.maxsize):
            self._found(f"memory is freed at {place()}, and nothing waits for {_said(use)}")

    def _resized(self, storage: Any, num_bytes: int) -> None:
        known = self._memories.pop(storage._cdata, None)
        self._crossed.discard(storage._cdata)
        if known is not None and not known.ref.expired() and num_bytes < storage.nbytes():
            self._freed(known)

    def _found(self, hazard: str) -> None:
        self.hazards.setdefault(hazard)


def _said(access: Access, is_write: bool | None = None) -> str:
    does = "" if is_write is None else " writes" if is_write else " reads"
    return f"{access.what}{does} at {access.where} on stream {access.stream}"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.numel()]


class Stream(HostStream):
    """`torch.cuda.Stream`, and what is known to be over before its next operation."""

    def __init__(self, rehearsal: Rehearsal, number: int) -> None:
        super().__init__()
        self.rehearsal, self.number = rehearsal, number
        self.clock: Clock = {number: 0}
        self.copies = False
        """Whether it copies between device and host, and does nothing else."""

    def wait_stream(self, stream: Any) -> None:
        if self.rehearsal.may_wait():
            join(self.clock, stream.clock)

    def wait_event(self, event: Any) -> None:
        if self.rehearsal.may_wait():
            join(self.clock, event.clock)

    def synchronize(self) -> None:
        self.rehearsal.host_waits(self)

    def record_event(self, event: Any = None) -> "Event":
        recorded = event or Event(self.rehearsal)
        recorded.record(self)
        return recorded


class Event(HostEvent):
    """`torch.cuda.Event`: what was over when it was recorded."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self.rehearsal, self.clock = rehearsal, Clock()

    def record(self, stream: Any = None) -> None:
        super().record()
        self.clock = dict((stream or self.rehearsal.current).clock)

    def wait(self, stream: Any = None) -> None:
        (stream or self.rehearsal.current).wait_event(self)

    def synchronize(self) -> None:
        self.rehearsal.host_waits(SimpleNamespace(clock=self.clock))  # type: ignore[arg-type]


class RehearsedLink(HostLink):
    """Copies as on a GPU, from and to memory that need not be pinned."""

    def __init__(self, rehearsal: Rehearsal, device: torch.device) -> None:
        super().__init__(device)
        self.is_cuda = True
        self._to_host, self._from_host = rehearsal.new_stream(), rehearsal.new_stream()
        self._to_host.copies = self._from_host.copies = True
        self._new = rehearsal.new_host_memory

    def _allocated(self, num_bytes: int, category: str) -> torch.Tensor:
        return self._new(num_bytes)


class _Work(dist.Work):
    """A work of NCCL: to wait for it lets the current stream wait."""

    def __init__(self, payload: Any, done: "Event", tensors: Sequence[torch.Tensor]) -> None:
        """`tensors`: kept until then, as by ProcessGroupNCCL."""
        super().__init__()
        self.payload, self.done, self.tensors = payload, done, tensors

    def wait(self, *_: Any) -> bool:
        if self.payload is not None:
            with self.done.rehearsal.muted():
                self.payload.wait()
        self.done.wait()
        self.tensors = ()
        return True


class HostObjects:
    """`torch.distributed`, where no stream takes part in what groups on the hosts pickle."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather_object(self, *args: Any, group: Any = None) -> None:
        with self.rehearsal.muted() if _is_of_hosts(group) else nullcontext():
            dist.all_gather_object(*args, group=group)

    def broadcast_object_list(self, *args: Any, group: Any = None, **kwargs: Any) -> None:
        with self.rehearsal.muted() if _is_of_hosts(group) else nullcontext():
            dist.broadcast_object_list(*args, group=group, **kwargs)


def _is_of_hosts(group: Any) -> bool:
    return group is not None and not isinstance(group, NcclOverGloo)


class HostMessages(HostObjects):
    """The same, where no stream waits for messages between hosts, but the host."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__(rehearsal)
        self.stream = Stream(rehearsal, -1)  # not the device's: a wait for that is not for it
        self.stream.copies = True

    def isend(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._start("isend", [tensor], [], tensor, *args, **kwargs)

    def irecv(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._start("irecv", [], [tensor], tensor, *args, **kwargs)

    def all_gather_into_tensor(self, whole: Any, own: Any, *args: Any, **kwargs: Any) -> Any:
        return self._start("all_gather_into_tensor", [own], [whole], whole, own, *args, **kwargs)

    def _start(self, kind: str, reads: Any, writes: Any, *args: Any, **kwargs: Any) -> Any:
        seen = self.rehearsal
        for tensor in (*reads, *writes):
            seen.keep_in_host(tensor)
        with seen.on(self.stream):
            seen.use(_tensors(reads), _tensors(writes), kind)
        done = self.stream.record_event()
        with seen.muted():
            return _HostWork(getattr(dist, kind)(*args, **kwargs), done)


class _HostWork:
    def __init__(self, work: Any, done: "Event") -> None:
        self.work, self.done = work, done

    def wait(self) -> None:
        self.work.wait()
        self.done.synchronize()


def _others(parts: Sequence[torch.Tensor], own: torch.Tensor) -> list[torch.Tensor]:
    """Parts that are received: in place, a rank's own is not written."""
    return [part for part in parts if part.data_ptr() != own.data_ptr()]


Uses = Callable[..., tuple[Any, Any]]
_USES: dict[str, Uses] = {
    "send": lambda tensors, *_: (tensors, ()),
    "recv": lambda tensors, *_: ((), tensors),
    "reduce_scatter": lambda outputs, lists, *_: (lists, outputs),
    "_reduce_scatter_base": lambda output, whole, *_: (whole, output),
    "reduce_scatter_single": lambda output, whole, *_: (whole, output),
    "allgather": lambda lists, inputs, *_: (inputs, _others(lists[0], inputs[0])),
    "_allgather_base": lambda whole, own, *_: (own, _others(whole.split(own.numel() or 1), own)),
    "all_gather_single": lambda whole, own, *_: (own, _others(whole.split(own.numel() or 1), own)),
    "allreduce": lambda tensors, *_: ((), tensors),
    "broadcast": lambda tensors, *_: ((), tensors),
    "reduce": lambda tensors, *_: ((), tensors),
    "alltoall_base": lambda output, whole, *_: (whole, output),
    "gather": lambda outputs, inputs, *_: (inputs, outputs),
    "scatter": lambda outputs, inputs, *_: (inputs, outputs),
    "barrier": lambda *_: ((), ()),
}
"""What each reads and writes."""


def groups_of(rehearsal: Rehearsal) -> type[NcclOverGloo]:
    """A process group whose operations run on a stream of its own."""

    class RehearsedGroup(NcclOverGloo):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.stream = rehearsal.new_stream()

    for kind, uses in _USES.items():
        setattr(RehearsedGroup, kind, _on_its_stream(rehearsal, kind, uses))
    return RehearsedGroup


def _on_its_stream(rehearsal: Rehearsal, kind: str, uses: Uses) -> Callable[..., _Work]:
    base = getattr(NcclOverGloo, kind)

    def call(self: Any, *args: Any, **kwargs: Any) -> _Work:
        reads, writes = map(_tensors, uses(*args))
        join(self.stream.clock, rehearsal.current.clock)
        with rehearsal.on(self.stream):
            rehearsal.use(reads, writes, kind)
        with rehearsal.muted():
            payload = base(self, *args, **kwargs)
        done = self.stream.record_event()
        return _Work(payload, done, (*reads, *writes))

    return call
