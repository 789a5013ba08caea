"""What a training run under a plan holds on the device, asked of Megatron's objects."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from zorse_megatron.runtime.activation_offload import ActivationOffload


def parameter_bytes(models: Mapping[int, Any]) -> int:
    """Parameters as they are computed with: whole, or shards."""
    return sum(
        sum(buffer.held_bytes for buffer in model.shards.parameters)
        if model.shards is not None
        else sum(_storage_bytes(buffer.param_data) for buffer in model.buffers)
        for model in models.values()
    )


def gradient_bytes(models: Mapping[int, Any]) -> int:
    """Gradients as they are accumulated: whole, or shards."""
    return sum(
        sum(buffer.held_bytes for buffer in model.shards.gradients)
        if model.shards is not None
        else sum(_storage_bytes(buffer.grad_data) for buffer in model.buffers)
        for model in models.values()
    )


def state_bytes(optimizers: list[Any]) -> int:
    """Main parameters, where they are others than the parameters, and moments."""
    storages: dict[int, int] = {}
    for optimizer in optimizers:
        for _, parameter, _, shard in optimizer.owned_shards():
            held = [v for v in optimizer.optimizer.state[shard].values() if _is_large(v)]
            if parameter.dtype != torch.float32:
                held.append(shard)
            for tensor in held:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class KeptActivations:
    """Counts what forwards keep for their backwards, by storage."""

    def __init__(
        self, is_parameter: Callable[[int], bool], offload: ActivationOffload | None
    ) -> None:
        self.is_parameter = is_parameter
        self.offload = offload
        self.kept: dict[tuple[int, int], int] = {}

    @property
    def num_bytes(self) -> int:
        """On the device now."""
        away = self.offload.away if self.offload is not None else {}
        gone = sum(m.num_bytes for memories in away.values() for m in memories if m.is_away)
        return sum(self.kept.values()) - gone

    @contextmanager
    def counting(self, key: tuple[int, int], *, leaves: bool) -> Iterator[None]:
        """Count what a forward within the block saves; `leaves`: for it to wait in the host."""
        found: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if not self.is_parameter(storage.data_ptr()):
                found[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        if leaves and self.offload is not None:
            with self.offload.keeping(key, note):
                yield
        else:
            with saved_tensors_hooks(note, lambda tensor: tensor):
                yield
        self.kept[key] = sum(found.values())

    def forget(self, key: tuple[int, int]) -> None:
        """The backward is done."""
        self.kept.pop(key, None)


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
