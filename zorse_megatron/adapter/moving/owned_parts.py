"""What a rank owns of its optimizer's state, by names and places that are the same under any plan.

They are those of checkpoints (`checkpoint.sharded_tensors`), so whatever a plan can save and load
has them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zorse_megatron.adapter.checkpoint.saved_groups import allocate_state
from zorse_megatron.adapter.checkpoint.saved_optimizer import owned_parameters
from zorse_megatron.adapter.checkpoint.sharded_tensors import model_shardings, saved_blocks
from zorse_megatron.schedules.tensor_blocks import TensorBlock


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedPart:
    """A block of one parameter, with the state that a rank has of it."""

    name: str
    """Of the parameter in checkpoints, and the layer, where one tensor has those of all layers."""
    block: TensorBlock
    """Of what the name stands for."""
    optimizer: Any
    start: int
    """Where the block begins in the tensors."""
    states: Mapping[str, torch.Tensor]
    """Name of a state -> its tensor, flat, with other blocks of the parameter, too."""

    def read(self) -> tuple[torch.Tensor, ...]:
        """The values of each state: in the host, and copied only if they are not there."""
        return tuple(self._of(self.optimizer.read(t)).cpu() for t in self.states.values())

    @property
    def device_bytes(self) -> int:
        """What `read` takes of the host's memory."""
        held = (t for t in self.states.values() if t.device.type != "cpu")
        return self.block.numel * sum(tensor.element_size() for tensor in held)

    @torch.no_grad()
    def write(self, state: int, block: TensorBlock, values: torch.Tensor) -> None:
        """Set a block inside this one, in one state; values of any device."""
        tensor = tuple(self.states.values())[state]
        waits = self.optimizer.memory_of(tensor) is not None
        found = self.optimizer.read(tensor)
        whole = found.clone() if waits else found  # what waits may be read as a copy
        starts = (b - o for b, o in zip(block.offset, self.block.offset, strict=True))
        sides = tuple(slice(s, s + n) for s, n in zip(starts, block.size, strict=True))
        self._of(whole)[sides].copy_(values)
        if waits:
            self.optimizer.write(tensor, whole)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This block of a state's tensor."""
        return tensor.view(-1)[self.start : self.start + self.block.numel].view(self.block.size)


def owned_parts(
    models: Sequence[Any], optimizers: Sequence[Any], dp_cp_group: Any
) -> Iterator[OwnedPart]:
    """All parts of this rank; allocates state that there is none of yet.

    `models`: its wrapped chunks; `dp_cp_group`: its data-parallel group.
    """
    metadata = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": dp_cp_group,
    }
    shardings = model_shardings(
        {str(n): model.sharded_state_dict(metadata=metadata) for n, model in enumerate(models)}
    )
    for optimizer in optimizers:
        if optimizer.is_stub_optimizer:
            continue
        allocate_state(optimizer)
        for parameter in owned_parameters(optimizer):
            yield from _parts_of(optimizer, parameter, shardings[id(parameter)])


def _parts_of(optimizer: Any, parameter: torch.nn.Parameter, sharding: Any) -> Iterator[OwnedPart]:
    tensors = optimizer._get_main_param_and_optimizer_states(parameter)
    states = {key: tensors[key] for key in sorted(tensors) if key != "step"}
    chunk = next(each for each in optimizer.model_chunks if parameter in each.parts)
    # Where the blocks are, not what is in them.
    start, stand_in = 0, torch.empty(tensors["param"].numel(), device="meta")
    for entry in saved_blocks("", stand_in, chunk, parameter, sharding):
        lead = len(entry.global_shape) - parameter.dim()
        layer = "".join(f"/{number}" for number in entry.global_offset[:lead])
        block = TensorBlock(
            offset=tuple(entry.global_offset[lead:]), size=tuple(entry.local_shape[lead:])
        )
        yield OwnedPart(
            name=entry.key + layer, block=block, optimizer=optimizer, start=start, states=states
        )
        start += block.numel
