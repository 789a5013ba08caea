"""A rank's state between two plans: set aside in host memory, then handed to its new owners."""

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.training import get_args, training

from zorse_megatron.adapter.checkpoint.saved_optimizer import (
    CheckpointLayout,
    allocate_state,
    common_state,
    owned_parameters,
    restore_common_state,
)
from zorse_megatron.adapter.checkpoint.saved_parameters import model_shardings, saved_blocks
from zorse_megatron.adapter.compute_dtype import start_from_main
from zorse_megatron.adapter.model.experts import expert_biases, set_expert_biases
from zorse_megatron.adapter.rank_plan import RankPlan
from zorse_megatron.live.move import (
    Owned,
    Transfer,
    common_block,
    moved_bytes,
    peak_bytes,
    plan_transfers,
)
from zorse_megatron.log import say
from zorse_megatron.runtime.collectives import gathered
from zorse_megatron.runtime.state_transfer import Held, HeldBlock, StateTransfer
from zorse_megatron.schedule.tensor_parallel_parts import TensorBlock

# What a rank owns of its optimizer's state, by names and places that are the same under any plan.
#
# They are those of checkpoints (`adapter.checkpoint.saved_parameters`), so whatever a plan can save
# and load has them.


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


def owned_parts(models: Sequence[Any], optimizer: Any, dp_cp_group: Any) -> Iterator[OwnedPart]:
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
    if optimizer.is_stub_optimizer:
        return
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


# Where the training is, in Megatron's arguments; a checkpoint has the same.
_POSITION = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """What one rank has of the training, and nothing of the plan that it comes from."""

    held: Held
    """Empty once it has been taken over."""
    states: tuple[str, ...]
    """Names of the states that each block has values of."""
    dtypes: tuple[torch.dtype, ...]
    common: dict[str, Any] | None
    """Of the optimizer; None: this rank has none."""
    biases: Mapping[int, torch.Tensor]
    """Of experts, by layer."""
    scheduler: dict[str, Any]
    iteration: int
    position: Mapping[str, int]
    num_flops: float
    train_start_s: float | None
    """From when on `--exit-duration-in-mins` counts; None: as it does already."""


def set_aside(
    optimizer: Any,
    parts: Sequence[OwnedPart],
    scheduler: Any,
    *,
    models: Sequence[Any],
    iteration: int,
    num_flops: float,
) -> SetAside:
    """Copy this rank's state to the host, except for what is there."""
    held: Held = {}
    for part in parts:
        held.setdefault(part.name, []).append(HeldBlock(block=part.block, values=part.read()))
    args, states = get_args(), parts[0].states if parts else {}
    return SetAside(
        held=held,
        states=tuple(states),
        dtypes=tuple(tensor.dtype for tensor in states.values()),
        common=None
        if optimizer.is_stub_optimizer
        else common_state(optimizer, CheckpointLayout.DISTRIBUTED),
        biases=expert_biases(models),
        scheduler=scheduler.state_dict(),
        iteration=iteration,
        position={name: getattr(args, name) for name in _POSITION},
        num_flops=num_flops,
        train_start_s=training._TRAIN_START_TIME,
    )


def take_over(
    at: RankPlan, aside: SetAside, models: list[Any], optimizer: Any, scheduler: Any
) -> None:
    """Go on where the training was set aside; a collective call of all ranks.

    Leaves what loading a checkpoint leaves that was saved under the old plan.
    """
    group = dist.new_group(backend="gloo", timeout=at.timeout)
    parts = list(owned_parts(models, optimizer, at.collection.dp_cp))
    told = _tell(group, aside, parts)
    _move(at.rank, aside, parts, told, group)
    for model in models:
        if model.shards is not None:
            model.shards.mark_changed()
    start_from_main(models, optimizer)
    set_expert_biases(models, dict(ChainMap(*(dict(each.aside.biases) for each in told))))
    if not optimizer.is_stub_optimizer:
        restore_common_state(optimizer, _joined_common(told))
    scheduler.load_state_dict(aside.scheduler)
    args = get_args()
    args.iteration = aside.iteration
    args.num_floating_point_operations_so_far = aside.num_flops
    for name, value in aside.position.items():
        setattr(args, name, value)
    update_num_microbatches(args.consumed_train_samples, verbose=False)
    if aside.train_start_s is not None:
        training._TRAIN_START_TIME = aside.train_start_s
    dist.destroy_process_group(group)


@dataclass(frozen=True, kw_only=True)
class _Told:
    """What one rank tells all others."""

    before: Owned
    after: Owned
    aside: SetAside
    """Without what is held."""


def _tell(group: Any, aside: SetAside, parts: Sequence[OwnedPart]) -> list[_Told]:
    after: dict[str, list[TensorBlock]] = {}
    for part in parts:
        # Of a tied embedding with both copies on this rank, what both have comes once.
        if part.block not in after.setdefault(part.name, []):
            after[part.name].append(part.block)
    mine = _Told(
        before={name: [each.block for each in held] for name, held in aside.held.items()},
        after=after,
        aside=replace(aside, held={}),
    )
    return gathered(mine, group)


def _move(
    rank: int,
    aside: SetAside,
    parts: Sequence[OwnedPart],
    told: Sequence[_Told],
    group: Any,
) -> None:
    before = {rank: each.before for rank, each in enumerate(told)}
    after = {rank: each.after for rank, each in enumerate(told)}
    transfers = plan_transfers(before, after)
    named = next(each.aside for each in told if each.aside.states)
    moving = StateTransfer(transfers, aside.held, rank=rank, dtypes=named.dtypes, group=group)
    targets: dict[str, list[OwnedPart]] = {}
    for part in parts:
        states = tuple(part.states)
        assert states == named.states, f"{part.name} has {states}, not {named.states}"
        targets.setdefault(part.name, []).append(part)
    for name in moving.parameters():
        for state in range(len(named.states)):
            for block, values in moving.run(name, state):
                for part in targets.get(name, ()):
                    both = common_block(part.block, block)
                    if both is not None:
                        part.write(state, both, _inside(block, values, both))
    _report(moving, before[rank], transfers, group)


def _report(
    moving: StateTransfer, before: Owned, transfers: Sequence[Transfer], group: Any
) -> None:
    """Say what was sent and held, beside what it should be."""
    state_bytes = [dtype.itemsize for dtype in moving.dtypes]
    mine = (
        moving.sent_bytes,
        moving.peak_bytes,
        peak_bytes(moving.rank, before, transfers, state_bytes),
    )
    sent, peaks, stated = zip(*gathered(mine, group), strict=True)
    had_to, _ = moved_bytes(transfers, state_bytes)
    say(
        f"moved {sum(sent):,} bytes of state between ranks, of which "
        f"{had_to.total():,} had to; a rank held at most "
        f"{max(peaks):,} bytes of it in host memory ({max(stated):,} were expected)"
    )


def _inside(block: TensorBlock, values: torch.Tensor, part: TensorBlock) -> torch.Tensor:
    starts = (p - b for p, b in zip(part.offset, block.offset, strict=True))
    return values[tuple(slice(s, s + n) for s, n in zip(starts, part.size, strict=True))]


def _joined_common(told: Sequence[_Told]) -> dict[str, Any]:
    """The lowest rank's, with the parameter groups of all: a rank may have had none of a kind."""
    commons = [each.aside.common for each in told if each.aside.common is not None]
    first = commons[0]
    groups = [group for each in commons for group in each["optimizer"]["param_groups"]]
    return {**first, "optimizer": {**first["optimizer"], "param_groups": groups}}
