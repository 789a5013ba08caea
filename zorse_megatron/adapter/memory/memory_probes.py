"""What a training run under a plan holds on the device, asked of Megatron's objects."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from zorse_megatron.runtime.activation_offload import ActivationOffload


def parameter_bytes(models: Mapping[int, Any]) -> int:
    """Parameters as they are computed with: unsharded, or shards."""
    return sum(
        model.shards.parameter_bytes
        if model.shards is not None
        else sum(_storage_bytes(buffer.param_data) for buffer in model.buffers)
        for model in models.values()
    )


def gradient_bytes(models: Mapping[int, Any]) -> int:
    """Gradients as they are accumulated: unsharded, or shards."""
    return sum(
        model.shards.gradient_bytes
        if model.shards is not None
        else sum(_storage_bytes(buffer.grad_data) for buffer in model.buffers)
        for model in models.values()
    )


def copied_gradient_bytes(optimizers: list[Any]) -> int:
    """Copies in fp32, for a step, of gradients that are accumulated in 16 bits."""
    return sum(
        shard.grad.nbytes
        for optimizer in optimizers
        for chunk, _, _, shard in optimizer.owned_shards()
        if shard.grad is not None and any(b.grad_dtype != torch.float32 for b in chunk.buffers)
    )


def reduction_bytes(models: Mapping[int, Any]) -> int:
    """What reductions under way hold beside the gradients: 16-bit messages."""
    return sum(model.reduction_bytes for model in models.values())


def state_bytes(optimizers: list[Any]) -> int:
    """Main parameters, where they are others than the parameters, and moments.

    Of state that waits in the host what is on the device.
    """
    storages: dict[int, int] = {}
    for optimizer in optimizers:
        for _, parameter, _, shard in optimizer.owned_shards():
            held = [v for v in optimizer.optimizer.state[shard].values() if _is_large(v)]
            if parameter.dtype != torch.float32:
                held.append(shard)
            for tensor in held:
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    passing = [o.host_state.passing_bytes for o in optimizers if o.host_state is not None]
    return sum(storages.values()) + sum(passing)


class KeptActivations:
    """Counts what forwards keep for their backwards, by storage, also while an action runs.

    A saved tensor counts from when autograd saves it until it drops it: what a backward computes
    again counts while it is there, layer by layer.
    """

    def __init__(
        self, is_parameter: Callable[[int], bool], offload: ActivationOffload | None
    ) -> None:
        self.is_parameter = is_parameter
        self.offload = offload
        self._holders: Counter[int] = Counter()
        """Storage (by identity) -> saved tensors that hold it."""
        self._watched: dict[int, weakref.ref[torch.Tensor]] = {}
        self._sizes: dict[int, int] = {}
        self._held_bytes = 0
        self._highest_bytes = 0

    @property
    def num_bytes(self) -> int:
        """On the device now."""
        return self._held_bytes - self._away_bytes()

    def highest_bytes(self) -> int:
        """On the device at most since the last call."""
        now = self.num_bytes
        highest, self._highest_bytes = max(now, self._highest_bytes), now
        return highest

    @contextmanager
    def counting(self, key: tuple[int, int] | None = None) -> Iterator[None]:
        """Count what computations within the block save; `key`: for it to wait in the host."""
        away_bytes = self._away_bytes()

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept = tensor.detach()
            if not self.is_parameter(tensor.untyped_storage().data_ptr()):
                self.hold(kept, away_bytes=away_bytes)
            return kept

        if key is not None and self.offload is not None:
            with self.offload.keeping(key, keep):
                yield
        else:
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                yield

    def hold(self, tensor: torch.Tensor, *, away_bytes: int | None = None) -> None:
        """Count a tensor's storage for as long as the tensor lives."""
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if not self._holders[identity]:
            self._sizes[identity] = storage.nbytes()
            self._held_bytes += storage.nbytes()
        self._holders[identity] += 1
        watch = id(tensor)
        self._watched[watch] = weakref.ref(tensor, lambda _: self._drop(watch, identity))
        away_bytes = self._away_bytes() if away_bytes is None else away_bytes
        self._highest_bytes = max(self._highest_bytes, self._held_bytes - away_bytes)

    def _drop(self, watch: int, identity: int) -> None:
        del self._watched[watch]
        self._holders[identity] -= 1
        if not self._holders[identity]:
            del self._holders[identity]
            self._held_bytes -= self._sizes.pop(identity)

    def _away_bytes(self) -> int:
        away = self.offload.away if self.offload is not None else {}
        return sum(m.num_bytes for memories in away.values() for m in memories if m.is_away)


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
