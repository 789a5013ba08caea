"""`zorse_megatron.pretrain` over the backend `staged`, for ranks that share a GPU without NCCL.

gloo carries what is copied to host memory and back: slow, but the same sums. Without a GPU its
copies are copies within host memory, which is how it is tested.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zorse_megatron import pretrain
from zorse_megatron.adapter.plan_run import RankSetup
from zorse_megatron.emulate.on_ranks.backend import gloo_group

BACKEND = "staged"
_TIMEOUT = timedelta(minutes=2)


class StagedWork:
    """An operation under way; its results come to the device when it is waited for."""

    def __init__(self, payload: Any, results: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """`results`: (tensor of the caller, its copy in host memory)."""
        self._payload, self._results = payload, results
        self._is_done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block the host until gloo is done, and copy."""
        if not self._is_done:
            self._payload.wait()
            for tensor, staged in self._results:
                tensor.copy_(staged)
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        """Whether gloo is done, without waiting."""
        return self._is_done or self._payload.is_completed()


class StagedGroup(dist.ProcessGroup):
    """A process group whose operations run on copies in host memory."""

    def __init__(self, payload: dist.ProcessGroup) -> None:
        """`payload`: the gloo group of the same ranks."""
        super().__init__(payload.rank(), payload.size())  # type: ignore[call-arg]
        self.payload = payload

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        """The backend of gloo, by whose name callers choose how to call."""
        return self.payload._get_backend(torch.device("cpu"))

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")]

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        return StagedWork(self.payload.send(list(map(_staged, tensors)), target, tag), [])

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        return self.payload.barrier()


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, there when this returns."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


def _on_copies(method: str) -> Callable[..., Any]:
    """gloo's method, on copies of all tensors; those that it writes come first, and go back."""

    def call(self: StagedGroup, *args: Any, **kwargs: Any) -> Any:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def staged(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                pairs.append((value, _staged(value)))
                return pairs[-1][1]
            return [staged(each) for each in value] if isinstance(value, list | tuple) else value

        outputs = staged(args[0])
        written = list(pairs)
        rest = [staged(each) for each in args[1:]]
        return StagedWork(getattr(self.payload, method)(outputs, *rest, **kwargs), written)

    return call


for _name in (
    "recv",
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "alltoall"),
    *("allgather", "_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    "reduce_scatter_tensor_coalesced",
):
    setattr(StagedGroup, _name, _on_copies(_name))


def main() -> None:
    """Entry point. Megatron trains on the process group that is there already."""

    def create(options: Any, _: Any) -> StagedGroup:
        return StagedGroup(gloo_group(options))

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    start = partial(dist.init_process_group, BACKEND, timeout=_TIMEOUT)
    pretrain.main(setup=RankSetup(init_process_group=start))


if __name__ == "__main__":
    main()
