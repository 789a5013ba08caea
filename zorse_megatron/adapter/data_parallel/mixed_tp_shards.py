"""Groups whose replicas cut their layers differently: what a rank owns is packed.

Where all replicas of a group hold the same parts, ranks with the same part reduce and gather flat
buffers (`buckets`). Here no two ranks need have the same buffer. What a rank owns is a list
of blocks of whole parameters (`schedule.tensor_parallel_parts`), packed into a buffer of its own,
which is what sums of gradients arrive in, what the optimizer steps, and what checkpoints hold.
Parameters as layers compute with them are made of it by UNSHARD (`runtime.mixed_tp_exchange`).

To the rest it is a chunk of which a rank keeps its shards, with the packed order as the order of
each parameter's elements. The parameters may stay unsharded, if the list never releases them; the
packed buffer is beside them then.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from zorse_megatron.adapter.data_parallel.chunk_shards import ChunkShards
from zorse_megatron.adapter.parameter_parts import expert_of, part_of_whole
from zorse_megatron.plan.plan import Group
from zorse_megatron.runtime.mixed_tp_exchange import (
    MixedTpTensor,
    gather_from_owners,
    sum_into_owners,
)
from zorse_megatron.runtime.sharded_buffer import ShardedBuffer
from zorse_megatron.schedule.shards import Interval
from zorse_megatron.schedule.tensor_parallel_parts import (
    Run,
    TensorPart,
    TpPartition,
    owned_blocks,
    runs_of,
)

_LAYER = re.compile(r"decoder\.layers\.\d+\.")


class MixedTpShards(ChunkShards):
    """The memory of one wrapped chunk, none of which may wait in the host.

    Gathers and reductions are over when they return.
    """

    def __init__(
        self, ddp: Any, mixed_tp: dict[torch.nn.Parameter, MixedTpTensor], *, reshards: bool
    ) -> None:
        """`mixed_tp`: each trainable parameter; `reshards`: whether the list ever releases."""
        super().__init__(ddp, buffers=())
        self.rank = torch.distributed.get_rank()
        self.mixed_tp = mixed_tp
        self.reshards = reshards
        self.units = list(_units(ddp.module, mixed_tp))
        self.full = [ShardedBuffer(buffer.param_data, ()) for buffer in ddp.buffers]
        self.gradients = [ShardedBuffer(buffer.grad_data, ()) for buffer in ddp.buffers]
        self.values = {p: t.packed(p.detach(), self.rank) for p, t in mixed_tp.items()}
        """What this rank owns of each parameter."""
        self.sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        """And of its gradient, once it has been reduced."""
        self.on_summed: Callable[[], None] = lambda: None
        """Called within a reduction, when there are gradients and all sums of them."""
        self._close_gradients()

    # Parameters.

    @torch.no_grad()
    def unshard(self) -> None:
        """Make the parameters of what their owners have; a collective call of the group."""
        if self.reshards and self.is_unsharded:
            return
        for buffer in self.full:
            buffer.allocate()
        for unit in self.units:
            gather_from_owners(
                [self.mixed_tp[p] for p in unit],
                [self.values[p] for p in unit],
                [p.data for p in unit],  # whose versions autograd does not watch
                self.group,
            )

    def reshard(self) -> None:
        """Keep what this rank owns only, if the list ever does."""
        for buffer in self.full if self.reshards else ():
            buffer.free()

    @contextmanager
    def owned_in_place(self) -> Iterator[None]:
        """Have memory where stock's code reads parameters; what it reads is not used."""
        for buffer in self.full:
            buffer.allocate()
        try:
            yield
        finally:
            self.reshard()

    def parameter_piece(self, parameter: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of what this rank owns of a parameter."""
        return self.values[parameter][start:stop]

    read = parameter_piece

    @torch.no_grad()
    def write(
        self, parameter: torch.nn.Parameter, start: int, stop: int, values: torch.Tensor
    ) -> None:
        """Set elements as in `parameter_piece`."""
        self.values[parameter][start:stop].copy_(values.reshape(-1))

    def num_owned(self, parameter: torch.nn.Parameter) -> int:
        """Elements that this rank owns of a parameter."""
        return self.values[parameter].numel()

    def packed(self, parameter: torch.nn.Parameter, local: torch.Tensor) -> torch.Tensor:
        """What this rank owns, of a value of what it holds."""
        return self.mixed_tp[parameter].packed(local.view(parameter.shape), self.rank)

    def owned_runs(self, parameter: torch.nn.Parameter) -> tuple[Run, ...]:
        """What this rank owns, as places in the flattened whole parameter."""
        tensor, at = self.mixed_tp[parameter], 0
        runs: list[Run] = []
        for block in tensor.owned_by(self.rank):
            runs += runs_of(block, tensor.part.shape, at)
            at += block.numel
        return tuple(runs)

    def owners(self, parameter: torch.nn.Parameter) -> dict[int, Interval]:
        """Global rank -> what it owns of the flattened parameter, where no TP group cuts any."""
        tensor = self.mixed_tp[parameter]
        found: dict[int, Interval] = {}
        for each in tensor.blocks:
            for run in runs_of(each.block, tensor.part.shape, 0):
                start, stop = found.get(each.owner, (run.start, run.start))
                assert stop == run.start, "what one rank owns is in one piece"
                found[each.owner] = start, run.stop
        return found

    @property
    def parameter_bytes(self) -> int:
        """What parameters take of the device now."""
        return sum(b.held_bytes for b in self.full) + sum(v.nbytes for v in self.values.values())

    @property
    def gradient_bytes(self) -> int:
        """What gradients take of the device now."""
        return sum(b.held_bytes for b in self.gradients) + sum(v.nbytes for v in self.sums.values())

    # Gradients.

    @torch.no_grad()
    def start_reduction(self) -> None:
        """Sum the gradients into what their owners have, and let them go.

        Zeros where no backward was. The stream waits for the sums, so the memory is free behind
        them, as the simulator has it.
        """
        self.open_gradients()
        for group in self.bucket_groups:
            group.prepare_gradients()
        for unit in self.units:
            gradients: list[Any] = [p.main_grad for p in unit]  # type: ignore[attr-defined]
            for parameter, gradient in zip(unit, gradients, strict=True):
                self.sums[parameter] = gradient.new_empty(self.num_owned(parameter))
            sum_into_owners(
                [self.mixed_tp[p] for p in unit],
                gradients,
                [self.sums[p] for p in unit],
                self.group,
            )
        self.on_summed()
        for buffer in self.gradients:
            buffer.free()
        self._reduced = True

    def gradient_piece(self, parameter: torch.nn.Parameter, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of what this rank owns of a parameter's gradient."""
        return self.sums[parameter][start:stop]

    def _close_gradients(self) -> None:
        super()._close_gradients()
        self.sums = {}


def mixed_tp_tensor(
    group: Group, name: str, mine: TensorPart, axis: int | None, *, is_gated: bool
) -> MixedTpTensor:
    """A parameter of a group whose replicas cut it differently.

    `name`: in the model; `mine`: what this rank holds; `axis`: that which is cut.
    """
    part_of = partial(part_of_whole, name, mine.shape, axis, is_gated=is_gated)
    holders: list[dict[int, TensorPart]] = []
    weights: list[float] = []
    for replica in group.replicas:
        shared, alone = replica.expert_parallel, TpPartition(degree=1)
        if shared is not None and expert_of(name) is None:
            # Each rank has the whole of it, and samples of its own.
            for index, rank in enumerate(replica.ranks):
                holders.append({rank: part_of(tp_shards=alone, index=0)})
                weights.append(replica.shard_weight * shared.weight_of(index))
            continue
        parts = TpPartition.of(replica)
        ranks = enumerate(replica.ranks)
        holders.append({rank: part_of(tp_shards=parts, index=index) for index, rank in ranks})
        weights.append(replica.shard_weight)
    return MixedTpTensor(part=mine, blocks=owned_blocks(holders, weights))


def _units(
    model: torch.nn.Module, mixed_tp: dict[torch.nn.Parameter, MixedTpTensor]
) -> Iterator[Sequence[torch.nn.Parameter]]:
    """Parameters that are exchanged together, of one type: a layer, or what is in none."""
    units: dict[tuple[str, torch.dtype], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter in mixed_tp:
            layer = _LAYER.search(name)
            units.setdefault((layer[0] if layer else "", parameter.dtype), []).append(parameter)
    return iter(units.values())
