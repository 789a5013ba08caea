"""The torch.distributed backend `emulated`: gloo carries the data, the conductor says when.

Payloads travel at once over gloo. To the rank that waits, an operation is done when the emulated
links say so; asynchronous operations stay asynchronous. Until the rank's clock runs, groups are
plain gloo.

What an operation costs is asked of its tensors through `ModelSizes`, as a tiny model stands for a
large one. In a rank's own tensor-parallel group collectives are those inside layers, as are
exchanges of ranks that share experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zorse_megatron.emulate.conductor import RankClock
from zorse_megatron.emulate.link_clock import (
    Collective,
    CollectiveKind,
    Name,
    PartExchange,
    Transfer,
)
from zorse_megatron.runtime.collectives import OperationKind, StageSizes
from zorse_megatron.runtime.mixed_tp_exchange import Exchanged

if TYPE_CHECKING:
    from zorse_megatron.emulate.on_ranks.model_sizes import ModelSizes


BACKEND = "emulated"
_CPU = torch.device("cpu")


class EmulatedWork:
    """An operation under way: done when both the emulated links and gloo are done."""

    def __init__(self, clock: RankClock, name: Name, payload: Any) -> None:
        self._clock, self.name, self._payload = clock, name, payload
        self._is_done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Stop the rank until its time. Raises EmulationFailed where that never comes."""
        if not self._is_done:
            self._clock.wait(self.name)
            self._is_done = True
            self._payload.wait()  # all ranks have posted it, so this is a matter of moments
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def result(self) -> Any:
        """What gloo returns."""
        self.wait()
        return self._payload.result()

    def get_future(self) -> Any:
        """Refused: a future would be done in gloo's time."""
        raise NotImplementedError("emulated operations have no futures; wait for the work")


Describe = Callable[[Any, tuple[Any, ...]], tuple[CollectiveKind, Sequence[int]]]
"""(group, arguments of the call) -> kind, and bytes of each part."""


class EmulatedGroup(dist.ProcessGroup):
    """A process group whose collectives and messages take the emulated links' time."""

    def __init__(
        self,
        payload: dist.ProcessGroup,
        *,
        ranks: Sequence[int],
        label: str,
        clock: RankClock,
        sizes: "ModelSizes",
    ) -> None:
        """`payload`: the gloo group of the same ranks. `label`: the same on all of them."""
        super().__init__(payload.rank(), payload.size())  # type: ignore[call-arg]
        self.payload = payload
        self.ranks = tuple(ranks)
        self.label = label
        self.clock = clock
        self.sizes = sizes
        self.is_tp_group = sizes.is_tp_group(self.ranks)
        self._bundled: list[Any] | None = None

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        """The backend of gloo, by whose name callers choose how to call."""
        return self.payload._get_backend(_CPU)

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def one_operation(
        self,
        kind: OperationKind,
        parts: Sequence[torch.Tensor],
        start: Callable[[], Sequence[Any]],
        *,
        sent_as: torch.dtype | None,
    ) -> Sequence[Any]:
        """Do what `start` does on this group as one operation, as one launch of NCCL would be.

        See `runtime.collectives.CountsOperations`.
        """
        if not self.clock.is_running or self.size() == 1:
            return start()
        self.sizes.on_operation()
        if self.is_tp_group:  # what has arrived in parts is gathered
            part_bytes = [self.sizes.activation_bytes(part.numel()) for part in parts]
        else:
            part_bytes = self.sizes.part_bytes(parts)
        if sent_as is not None:
            whole = parts[0].element_size()
            part_bytes = [size * sent_as.itemsize // whole for size in part_bytes]
        payload = self._payload_of(start)
        name = self._post(kind, part_bytes)
        return [EmulatedWork(self.clock, name, payload)]

    def one_exchange(self, exchanged: Exchanged, start: Callable[[], Any]) -> Any:
        """Do what `start` does as messages that are under way at once."""
        if not self.clock.is_running or self.size() == 1:
            return start()
        sizes = self.sizes.exchange_bytes(exchanged)
        return self.exchange(sizes, self._payload_of(start))

    def exchange(self, sizes: Mapping[tuple[int, int], int], payload: Any) -> EmulatedWork:
        """Post messages of these bytes, (source, target) -> bytes; `payload` carries the data."""
        messages = tuple((*pair, num_bytes) for pair, num_bytes in sorted(sizes.items()))
        operation = PartExchange(ranks=self.ranks, messages=messages)
        return EmulatedWork(self.clock, self.clock.post((self.label,), operation), payload)

    def announce(
        self, kind: OperationKind, sizes: StageSizes, whole: torch.Tensor, after: Any
    ) -> "EmulatedWork | None":
        """Post one stage of an operation whose data `carry` moves.

        See `runtime.collectives`. Elements count as their share of the real buffer.
        """
        if not self.clock.is_running or self.size() == 1:
            return None
        self.sizes.on_operation()
        num_bytes = self.sizes.buffer_bytes(whole)

        def to_bytes(count: int) -> int:
            return -(-num_bytes * count // max(1, whole.numel()))

        operation: Collective | PartExchange
        if isinstance(sizes, Mapping):
            messages = tuple(
                (self.ranks[source], self.ranks[target], to_bytes(count))
                for (source, target), count in sorted(sizes.items())
            )
            operation = PartExchange(ranks=self.ranks, messages=messages)
        else:
            parts = tuple(map(to_bytes, sizes))
            operation = Collective(kind=kind, ranks=self.ranks, part_bytes=parts)
        before = None if after is None else after.name
        name = self.clock.post((self.label,), operation, after=before)
        return EmulatedWork(self.clock, name, _All([]))

    def carry(self, start: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Do what `start` does in no time of the cluster's."""
        return [self._payload_of(start)]

    def _payload_of(self, start: Callable[[], Any]) -> "_All":
        """Start gloo's operations, which count as one."""
        self._bundled = []
        try:
            start()
            return _All(self._bundled)
        finally:
            self._bundled = None

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        work = self.payload.send(tensors, target, tag)
        return self._message(work, tensors, source=self.rank(), target=target)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        work = self.payload.recv(tensors, source, tag)
        return self._message(work, tensors, source=source, target=self.rank())

    def _message(self, payload: Any, tensors: list[torch.Tensor], source: int, target: int) -> Any:
        if not self.clock.is_running:
            return payload
        sends = source == self.rank()
        ends = self.ranks[source], self.ranks[target]
        size = sum(map(self.sizes.message_bytes, tensors)) if sends else None
        transfer = Transfer(source=ends[0], target=ends[1], num_bytes=size)
        name = self.clock.post((self.label, *ends), transfer, receives=not sends)
        return EmulatedWork(self.clock, name, payload)

    def _collective(self, method: str, describe: Describe, args: tuple[Any, ...]) -> Any:
        payload = getattr(self.payload, method)(*args)
        if not self.clock.is_running or self.size() == 1:
            return payload
        if self._bundled is not None:
            self._bundled.append(payload)
            return payload
        return EmulatedWork(self.clock, self._post(*describe(self, args)), payload)

    def _post(self, kind: CollectiveKind, part_bytes: Sequence[int]) -> Name:
        collective = Collective(kind=kind, ranks=self.ranks, part_bytes=tuple(part_bytes))
        return self.clock.post((self.label,), collective)

    def whole_bytes(self, whole: Sequence[torch.Tensor]) -> int | None:
        """Bytes of tensors that a collective works on; None: it takes no time."""
        if not self.is_tp_group:
            return sum(map(self.sizes.buffer_bytes, whole))
        sizes = list(map(self.sizes.inside_bytes, whole))
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def even_parts(self, total: int) -> list[int]:
        """Bytes of each rank's part where tensors are split evenly."""
        return [-(-total // self.size())] * self.size()


@dataclass(frozen=True)
class _All:
    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _whole(kind: CollectiveKind) -> Describe:
    def describe(group: EmulatedGroup, args: tuple[Any, ...]) -> tuple[CollectiveKind, list[int]]:
        total = group.whole_bytes(args[0])
        return _MEETING if total is None else (kind, [total])

    return describe


_MEETING: tuple[CollectiveKind, list[int]] = "meeting", []


def _is_async(args: tuple[Any, ...]) -> bool:
    return any(getattr(each, "asyncOp", False) for each in args)


def _nothing(group: EmulatedGroup, args: tuple[Any, ...]) -> tuple[CollectiveKind, list[int]]:
    return "all_reduce", [1]


def _lists(kind: CollectiveKind, position: int) -> Describe:
    """Describe calls with a list of tensors per tensor; `position`: where the lists are."""

    def describe(group: EmulatedGroup, args: tuple[Any, ...]) -> tuple[CollectiveKind, list[int]]:
        per_tensor = [group.sizes.part_bytes(parts) for parts in args[position]]
        return kind, [sum(parts) for parts in zip(*per_tensor, strict=True)]

    return describe


def _evenly(kind: CollectiveKind, position: int) -> Describe:
    """Describe calls with all ranks' parts in one tensor or several; `position`: where."""

    def describe(group: EmulatedGroup, args: tuple[Any, ...]) -> tuple[CollectiveKind, list[int]]:
        whole = args[position]
        total = group.whole_bytes([whole] if isinstance(whole, torch.Tensor) else whole)
        if total is None or (group.is_tp_group and kind == "all_gather" and _is_async(args)):
            # Megatron gathers inputs once more for gradients of weights: a product hides that.
            return _MEETING
        return kind, group.even_parts(total)

    return describe


_COLLECTIVES: dict[str, Describe] = {
    "allreduce": _whole("all_reduce"),
    "allreduce_coalesced": _whole("all_reduce"),
    "barrier": _nothing,
    "broadcast": _whole("broadcast"),
    "reduce": _whole("broadcast"),  # the same way up the tree
    "allgather": _lists("all_gather", 0),
    "_allgather_base": _evenly("all_gather", 0),
    "all_gather_single": _evenly("all_gather", 0),
    "all_gather_single_coalesced": _evenly("all_gather", 0),
    "allgather_into_tensor_coalesced": _evenly("all_gather", 0),
    "reduce_scatter": _lists("reduce_scatter", 1),
    "_reduce_scatter_base": _evenly("reduce_scatter", 1),
    "reduce_scatter_single": _evenly("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": _evenly("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": _evenly("reduce_scatter", 1),
}

# By any of its names: sends tokens to experts and back, in a group of ranks that share them.
_EXCHANGES = ("alltoall_base", "all_to_all_single")
# Nothing that trains under emulation calls these but bundled; they would be done in gloo's time.
_REFUSED = (
    "alltoall",
    "recv_anysource",
    "_start_coalescing",
    "_end_coalescing",
)
# Once for each process or job, before the clock runs: carried by gloo alone.
_GLOO_ONLY = ("gather", "scatter", "monitored_barrier")


def _add_methods() -> None:
    for method, describe in _COLLECTIVES.items():
        setattr(EmulatedGroup, method, _emulated(method, describe))
    for method in _EXCHANGES:
        setattr(EmulatedGroup, method, _exchanging(method))
    for method in _REFUSED:
        setattr(EmulatedGroup, method, _refused(method))
    for method in _GLOO_ONLY:
        setattr(EmulatedGroup, method, _plain(method))


def _emulated(method: str, describe: Describe) -> Callable[..., Any]:
    def call(self: EmulatedGroup, *args: Any, **kwargs: Any) -> Any:
        return self._collective(method, describe, (*args, *kwargs.values()))

    return call


def _exchanging(method: str) -> Callable[..., Any]:
    of_others = _refused(method)

    def call(self: EmulatedGroup, received: torch.Tensor, rows: torch.Tensor, *args: Any) -> Any:
        sharing, clock = self.sizes.sharing, self.clock
        is_part = self._bundled is not None
        if is_part or not clock.is_running or sharing is None or sharing.ranks != self.ranks:
            return of_others(self, received, rows, *args)
        payload = getattr(self.payload, method)(received, rows, *args)
        return self.exchange(self.sizes.token_messages(rows), payload)

    return call


def _refused(method: str) -> Callable[..., Any]:
    def call(self: EmulatedGroup, *args: Any, **kwargs: Any) -> Any:
        if self._bundled is None and self.clock.is_running:
            raise NotImplementedError(f"the emulated backend has no cost for {method}")
        payload = getattr(self.payload, method)(*args, **kwargs)
        if self._bundled is not None:
            self._bundled.append(payload)
        return payload

    return call


def _plain(method: str) -> Callable[..., Any]:
    def call(self: EmulatedGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.payload, method)(*args, **kwargs)

    return call


_add_methods()


def register(clock: RankClock, sizes: "ModelSizes") -> None:
    """Make the backend known to torch in this process; `init_process_group("emulated")` uses it."""

    def create(options: Any, _: Any) -> EmulatedGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return EmulatedGroup(
            _gloo_group(options),
            ranks=ranks,
            label=str(options.group_id),
            clock=clock,
            sizes=sizes,
        )

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def _gloo_group(options: Any) -> dist.ProcessGroup:
    """The same group as `init_process_group("gloo")` makes."""
    rank, size = options.group_rank, options.group_size
    group = dist.ProcessGroup(options.store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = dist.ProcessGroupGloo(options.store, rank, size, timeout=options.timeout)
    gloo._set_sequence_number_for_group()
    group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    return group
