"""What the communicators of a plan take, as `on_ranks.communicators_main` writes it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from zorse_megatron.costs.process_memory import communicator_bytes
from zorse_megatron.schedules.communicators import WORLD_CTAS, Communicator

Use = Literal["world", "group", "region", "across", "set", "link"]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one communicator has taken on one of its ranks."""

    use: Use
    ranks: tuple[int, ...]
    rank: int
    channels: int | None
    """That it may have; None: NCCL decides."""
    num_bytes: int
    """Of the rank's GPU, from before it was connected until after."""

    @property
    def priced_bytes(self) -> int:
        """What the planner takes it for."""
        communicator = Communicator(use=self.use, ranks=self.ranks)
        return communicator_bytes(communicator, self.rank, self.channels or WORLD_CTAS)


def read_taken(path: Path) -> tuple[Taken, ...]:
    """Read what the ranks wrote."""
    values = json.loads(path.read_text(encoding="utf-8"))
    return tuple(Taken(**value | {"ranks": tuple(value["ranks"])}) for value in values)


def figures_of(taken: Sequence[Taken]) -> dict[str, int]:
    """By use: how many a rank has at most, and what one took at most, measured and priced."""
    figures = {}
    for use in dict.fromkeys(each.use for each in taken):
        of_use = [each for each in taken if each.use == use]
        of_rank = [each.rank for each in of_use]
        figures[f"{use}_per_rank"] = max(map(of_rank.count, of_rank))
        figures[f"{use}_bytes"] = max(each.num_bytes for each in of_use)
        figures[f"{use}_priced_bytes"] = max(each.priced_bytes for each in of_use)
    return figures
