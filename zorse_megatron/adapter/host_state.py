"""Training state that waits in host memory: fetched, stepped and sent back chunk by chunk.

Adam's rule is the same for every element, so the chunks' shards can be stepped one after the other
with the same result, and the state of two chunks at most is on the device: the one that is stepped
and the one that is fetched meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zorse_megatron.adapter.optimizer_checkpoint import allocate_state
from zorse_megatron.runtime.host_memory import HostBacked, HostLink, wait_until_back


class HostState:
    """The host's part of what one rank's optimizer owns; made when the chunks' shards exist.

    Parameters that wait in the host are those that the list has offloaded when the step comes.
    """

    def __init__(
        self,
        optimizer: Any,
        link: HostLink,
        *,
        optimizer_state: bool,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`optimizer_state`: whether main parameters and moments wait in the host, too.

        `on_change`: called within a step, whenever as much is on the device as there will be until
        the next call.
        """
        self.optimizer = optimizer
        self.on_change = on_change
        self.inner = optimizer.optimizer
        self._step_all = self.inner.step
        self.link = link
        self.chunks: list[Any] = list(optimizer.model_chunks)
        self._shards: dict[int, list[tuple[torch.nn.Parameter, torch.Tensor]]] = {
            id(chunk): [] for chunk in self.chunks
        }
        for chunk, parameter, _, shard in optimizer.owned_shards():
            self._shards[id(chunk)].append((parameter, shard))
        self._state: dict[int, list[HostBacked]] = {id(chunk): [] for chunk in self.chunks}
        if optimizer_state:
            allocate_state(optimizer)
            for chunk in self.chunks:
                self._state[id(chunk)] = self._move_state(chunk)

    def step(self) -> None:
        """The inner optimizer's step, and the copy of new main parameters to the shards."""
        # Fused optimizers count here, once per call, and not in groups that are empty then.
        before = after = self._counts()
        away = [self._away(chunk) for chunk in self.chunks]
        for number, chunk in enumerate(self.chunks):
            if number:
                # Before the next one comes, so that no three are there. While it leaves, this one
                # is still coming: both directions of the link stay in use.
                _let_go(away[number - 1])
            for memories in away[number : number + 2]:
                for memory in memories:
                    memory.start_back()
            self.on_change()
            for memory in away[number]:
                memory.wait_until_back()
            self._count_from(before)
            with self._only(chunk):
                self._step_all()
            after = [max(counts) for counts in zip(after, self._counts(), strict=True)]
            self.optimizer.copy_main_to_model(chunk)
            self._send(chunk, away[number])
        self._count_from(after)
        _let_go(away[-1])

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have all state on the device within the block, as for a checkpoint."""
        away = [memory for chunk in self.chunks for memory in self._away(chunk)]
        wait_until_back(away)
        try:
            yield
        finally:
            for memory in away:
                memory.send()
            _let_go(away)

    def _move_state(self, chunk: Any) -> list[HostBacked]:
        """Make flat tensors of the chunk's moments and main parameters, and send them away."""
        memories = []
        state = self.inner.state
        shards = [shard for _, shard in self._shards[id(chunk)]]
        names = sorted({n for s in shards for n, v in state[s].items() if _is_moment(v, s)})
        for name in names:
            flat = torch.cat([state[shard][name].view(-1) for shard in shards])
            for shard, part in zip(shards, _cut(flat, shards), strict=True):
                state[shard][name] = part.view_as(shard)
            memories.append(HostBacked(flat, self.link, "optimizer state"))
        main = [s for p, s in self._shards[id(chunk)] if p.dtype != torch.float32]
        if main:
            flat = torch.cat([shard.detach().view(-1) for shard in main])
            for shard, part in zip(main, _cut(flat, main), strict=True):
                shard.data = part.view_as(shard)
            memories.append(HostBacked(flat, self.link, "optimizer state"))
        for memory in memories:
            memory.send()
            memory.let_go(wait=True)
        return memories

    def _counts(self) -> list[int]:
        """Steps that each group has counted, 0 where it counts none."""
        return [group.get("step", 0) for group in self.inner.param_groups]

    def _count_from(self, counts: list[int]) -> None:
        for group, count in zip(self.inner.param_groups, counts, strict=True):
            if "step" in group:
                group["step"] = count

    def _send(self, chunk: Any, memories: list[HostBacked]) -> None:
        for memory in memories:
            memory.send()
        if chunk.shards is not None:
            for buffer in chunk.shards.parameters:
                if buffer.memory in memories:
                    buffer.changed = False

    def _away(self, chunk: Any) -> list[HostBacked]:
        """What of the chunk is in the host now."""
        parameters = chunk.shards.parameters if chunk.shards is not None else []
        shards = [buffer.memory for buffer in parameters if buffer.in_shard]
        found = [*self._state[id(chunk)], *(memory for memory in shards if memory is not None)]
        return [memory for memory in found if memory.is_away and memory.num_bytes]

    @contextmanager
    def _only(self, chunk: Any) -> Iterator[None]:
        """Within the block, the inner optimizer has the chunk's shards only."""
        mine = {id(shard) for _, shard in self._shards[id(chunk)]}
        groups = self.inner.param_groups
        everything = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [shard for shard in group["params"] if id(shard) in mine]
        try:
            yield
        finally:
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters


def _let_go(memories: list[HostBacked]) -> None:
    for memory in memories:
        memory.let_go(wait=True)


def _is_moment(value: Any, shard: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shard.shape and value.ndim > 0


def _cut(flat: torch.Tensor, like: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return flat.split([tensor.numel() for tensor in like])
