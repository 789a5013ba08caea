"""Which rank sends which part of which parameter to whom, from what ranks own under two plans.

An owner under the new plan takes what it owned under the old one from itself, and of the rest every
element from the lowest rank that has it. Several may: a tied embedding has two copies, and both
have the same values. All ranks compute the same list, whose order is that of messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.migration.boxes import common_block, without
from zorse_megatron.schedules.tensor_blocks import TensorBlock

Owned = Mapping[str, Sequence[TensorBlock]]
"""Parameter -> what a rank owns of it; blocks of one rank have no element in common."""
Owners = Mapping[int, Owned]
"""Rank -> what it owns."""


class MoveError(ZorseError):
    """State cannot be moved from one plan to another."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A block of a parameter, and of each of its states, that one rank hands to another.

    To itself if they are the same: then it is not sent.
    """

    parameter: str
    block: TensorBlock
    source: int
    destination: int

    @property
    def is_sent(self) -> bool:
        """Whether it goes to another rank."""
        return self.source != self.destination


def plan_transfers(before: Owners, after: Owners) -> tuple[Transfer, ...]:
    """All that has to change hands, ordered by parameter, destination and its blocks.

    Every element that a rank owns `after` is in exactly one transfer to it. Raises MoveError where
    nobody owned an element `before`.
    """
    names = sorted({name for owned in after.values() for name in owned})
    holders: dict[str, list[tuple[int, TensorBlock]]] = {name: [] for name in names}
    for rank in sorted(before):
        for name, blocks in before[rank].items():
            if name in holders:
                holders[name] += [(rank, block) for block in blocks]
    return tuple(
        transfer
        for name in names
        for rank in sorted(after)
        for block in after[rank].get(name, ())
        for transfer in _to(rank, name, block, holders[name])
    )


def _to(
    rank: int, name: str, wanted: TensorBlock, holders: Sequence[tuple[int, TensorBlock]]
) -> Iterator[Transfer]:
    """Where one owner has one block from."""
    missing = [wanted]
    # Its own first; otherwise the order of ranks, as the sort is stable.
    for source, held in sorted(holders, key=lambda holder: holder[0] != rank):
        left: list[TensorBlock] = []
        for block in missing:
            both = common_block(block, held)
            if both is None:
                left.append(block)
                continue
            yield Transfer(parameter=name, block=both, source=source, destination=rank)
            left += without(block, both)
        missing = left
    if missing:
        raise MoveError(
            "State cannot be moved to the new plan",
            [
                Problem(
                    where=f"parameter {name}",
                    found=f"no owner of {missing[0]}, which rank {rank} is to own",
                    expected="an owner of every element under the plan that has been run",
                    remedy="Save a checkpoint, and start the new plan from it.",
                )
            ],
        )
