"""A backend that takes itself for NCCL, on the CPU over gloo, and notes every launch.

`$ZORSE_TEST_RECORD/launches-rank<R>.json`: each call of torch.distributed as the process group gets
it, stock's own too, in order: `group` (its name, the same on all of its ranks), `ranks`, `kind`,
`numel` of each tensor, of messages `peer` (a global rank), and of exchanges `dtype`. Uneven lists
are as many reductions or broadcasts, as in NCCL's process group.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "nccl-over-gloo"
_CPU = torch.device("cpu")


class _Together:
    def __init__(self, works: Sequence[Any], then: Callable[[], Any] = lambda: None) -> None:
        self.works = [work for work in works if work is not None]
        self.then = then

    def wait(self, *_: Any) -> bool:
        for work in self.works:
            work.wait()
        self.then()
        return True


class _Named:
    """Gloo's backend under the name by which callers choose how to call."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def name(self) -> str:
        return "nccl"


class NcclOverGloo(dist.ProcessGroup):
    """Does what gloo does, called as NCCL is."""

    def __init__(
        self,
        payload: dist.ProcessGroup,
        *,
        ranks: Sequence[int],
        label: str,
        log: list[dict[str, Any]],
    ) -> None:
        super().__init__(payload.rank(), payload.size())  # type: ignore[call-arg]
        self.payload, self.ranks, self.label, self.log = payload, list(ranks), label, log

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        """By which torch forgets a group that is left with a plan."""
        return self.label

    def _get_backend(self, device: torch.device) -> Any:
        return _Named(self.payload._get_backend(_CPU))

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def note(
        self,
        kind: str,
        tensors: Sequence[torch.Tensor],
        peer: int | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.log.append(
            {
                "group": self.label,
                "ranks": self.ranks,
                "kind": kind,
                "numel": [tensor.numel() for tensor in tensors],
                "peer": None if peer is None else self.ranks[peer],
                "dtype": None if dtype is None else str(dtype),
            }
        )

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        self.note("send", tensors, target)
        assert tag == 0, "NCCL knows no tags"
        return self.payload.send(tensors, target, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        self.note("receive", tensors, source)
        assert tag == 0, "NCCL knows no tags"
        return self.payload.recv(tensors, source, tag)

    def alltoall_base(self, received: Any, *args: Any) -> Any:
        self.note("alltoall_base", [], dtype=received.dtype)  # sizes differ from rank to rank
        return self.payload.alltoall_base(received, *args)

    def reduce_scatter(self, outputs: Any, lists: Any, options: Any = None) -> Any:
        (output,), (parts,) = outputs, lists
        self.note("reduce_scatter", parts)
        return self._reduced_to_owners(output, parts, options)

    def _reduce_scatter_base(self, output: Any, whole: Any, options: Any = None) -> Any:
        parts = self._equal_parts(whole)
        self.note("reduce_scatter", parts)
        return self._reduced_to_owners(output, parts, options)

    def allgather(self, lists: Any, inputs: Any, options: Any = None) -> Any:
        (parts,), (own,) = lists, inputs
        self.note("all_gather", parts)
        return self._sent_by_owners(parts, own)

    def _allgather_base(self, whole: Any, own: Any, options: Any = None) -> Any:
        parts = self._equal_parts(whole)
        self.note("all_gather", parts)
        return self._sent_by_owners(parts, own)

    def _equal_parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """One for each rank, also of nothing."""
        return list(whole.view(-1).tensor_split(self.size()))

    def _reduced_to_owners(self, output: Any, parts: Sequence[Any], options: Any) -> Any:
        is_in_place = output.data_ptr() == parts[self.rank()].data_ptr()
        if not is_in_place:  # as of Megatron's sequence parallelism
            parts = [part.clone() for part in parts]
        works = []
        for owner, part in enumerate(parts):
            if part.numel():
                each = dist.ReduceOptions()
                each.rootRank = owner
                each.reduceOp = dist.ReduceOp.SUM if options is None else options.reduceOp
                works.append(self.payload.reduce([part], each))
        own = parts[self.rank()]
        return _Together(works, lambda: is_in_place or output.copy_(own.view_as(output)))

    def _sent_by_owners(self, parts: Sequence[Any], own: Any) -> Any:
        if parts[self.rank()].data_ptr() != own.data_ptr():
            parts[self.rank()].copy_(own.view_as(parts[self.rank()]))
        works = []
        for owner, part in enumerate(parts):
            if part.numel():
                each = dist.BroadcastOptions()
                each.rootRank = owner
                works.append(self.payload.broadcast([part], each))
        return _Together(works)


def _noted(kind: str) -> Callable[..., Any]:
    def call(self: NcclOverGloo, *args: Any, **kwargs: Any) -> Any:
        tensors = args[0] if args and isinstance(args[0], list) else []
        self.note(kind, [t for t in tensors if isinstance(t, torch.Tensor)])
        return getattr(self.payload, kind)(*args, **kwargs)

    return call


for _kind in ("allreduce", "broadcast", "reduce", "barrier", "gather", "scatter"):
    setattr(NcclOverGloo, _kind, _noted(_kind))
for _new, _old in (
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("all_gather_single", "_allgather_base"),
):
    setattr(NcclOverGloo, _new, getattr(NcclOverGloo, _old))


def register(log: list[dict[str, Any]], group_class: type[NcclOverGloo] = NcclOverGloo) -> None:
    """Make the backend known to torch in this process."""

    def create(options: Any, _: Any) -> NcclOverGloo:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        payload = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
        payload._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        gloo = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout
        )
        gloo._set_sequence_number_for_group()
        payload._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        return group_class(payload, ranks=ranks, label=str(options.group_id), log=log)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def save(log: list[dict[str, Any]], path: Any) -> None:
    path.write_text(json.dumps(log))
