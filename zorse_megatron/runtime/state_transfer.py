"""State from rank to rank, as `live.move` has it: over gloo, between the hosts.

One state of one parameter at a time, so that beside what a rank has set aside it needs little. A
rank lets go of a parameter that it is done with.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zorse_megatron.live.move import Transfer, common_block
from zorse_megatron.schedule.tensor_parallel_parts import TensorBlock


@dataclass(frozen=True, kw_only=True)
class HeldBlock:
    """A block of a parameter, with its values in each state: CPU tensors of the block's size."""

    block: TensorBlock
    values: tuple[torch.Tensor, ...]


Held = dict[str, list[HeldBlock]]
"""Parameter -> blocks that a rank has set aside."""


class StateTransfer:
    """One rank's part in a move."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        held: Held,
        *,
        rank: int,
        dtypes: Sequence[torch.dtype],
        group: Any,
    ) -> None:
        """`held` is emptied. `dtypes`: of each state, the same on all ranks; `group`: a gloo group
        of all ranks."""
        self.rank = rank
        self.dtypes = tuple(dtypes)
        self.group = group
        self.sent_bytes = 0
        """To other ranks, so far."""
        self.peak_bytes = 0
        """The most that has been held at one time: set aside, copies, buffers."""
        self._held = held
        self._of: dict[str, list[Transfer]] = {name: [] for name in held}
        for each in transfers:
            if rank in (each.source, each.destination):
                self._of.setdefault(each.parameter, []).append(each)
        self._aside_bytes = sum(
            value.nbytes for blocks in held.values() for each in blocks for value in each.values
        )
        self._note(0)

    def parameters(self) -> Iterator[str]:
        """Those that this rank has a part in, in the order of all ranks; lets go of each."""
        for name in sorted(self._of):
            yield name
            self._aside_bytes -= sum(
                value.nbytes for each in self._held.pop(name, ()) for value in each.values
            )

    def run(self, parameter: str, state: int) -> list[tuple[TensorBlock, torch.Tensor]]:
        """Send what is to be sent of one state of a parameter; return what this rank gets.

        That is blocks with their values, which together are all that it is to own of it.
        """
        works, sent, got, received_bytes = [], [], [], 0
        tags: Counter[tuple[int, int]] = Counter()
        for each in self._of[parameter]:
            if not each.is_sent:
                got.append((each.block, self._mine(parameter, each.block, state)))
                continue
            tag = tags[each.source, each.destination]  # both ends count the same messages
            tags[each.source, each.destination] += 1
            if each.source == self.rank:
                piece = self._mine(parameter, each.block, state).contiguous()
                works.append(dist.isend(piece, each.destination, group=self.group, tag=tag))
                sent.append(piece)  # until it has left
            else:
                buffer = torch.empty(each.block.size, dtype=self.dtypes[state], device="cpu")
                works.append(dist.irecv(buffer, each.source, group=self.group, tag=tag))
                got.append((each.block, buffer))
                received_bytes += buffer.nbytes
        self.sent_bytes += sum(piece.nbytes for piece in sent)
        self._note(sum(piece.nbytes for piece in sent) + received_bytes)
        for work in works:
            assert work is not None
            work.wait()
        return got

    def _mine(self, parameter: str, block: TensorBlock, state: int) -> torch.Tensor:
        """A view of what this rank has set aside; the block is inside one of its own."""
        for each in self._held[parameter]:
            if common_block(block, each.block) == block:
                starts = (b - e for b, e in zip(block.offset, each.block.offset, strict=True))
                sides = tuple(slice(s, s + n) for s, n in zip(starts, block.size, strict=True))
                return each.values[state][sides]
        raise KeyError(f"found no {block} of {parameter}; expected it among what was set aside")

    def _note(self, passing_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self._aside_bytes + passing_bytes)
