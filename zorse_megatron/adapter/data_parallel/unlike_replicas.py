"""The replicas of a group that cut their layers differently."""

from dataclasses import dataclass

from zorse_megatron.adapter.parameters.parameter_parts import part_of_whole
from zorse_megatron.runtime.part_exchange import PartedTensor
from zorse_megatron.schedules.set_parts import SetParts
from zorse_megatron.schedules.tensor_parts import TensorPart, owned_blocks
from zorse_megatron.schema.plan.plan import Group
from zorse_megatron.schema.plan.rank_axes import holds_equal_parts


@dataclass(frozen=True, kw_only=True)
class UnlikeReplicas:
    """What the ranks of a group hold and own of its parameters."""

    ranks: tuple[tuple[int, ...], ...]
    """Of each replica, in order."""
    parts: tuple[SetParts, ...]
    """Of each replica."""
    weights: tuple[float, ...]
    """Of each replica: its share of the state."""

    @classmethod
    def of(cls, group: Group) -> "UnlikeReplicas | None":
        """Those of a plan's group; None where all replicas hold equal parts."""
        if holds_equal_parts(group):
            return None
        return cls(
            ranks=tuple(replica.ranks for replica in group.replicas),
            parts=tuple(map(SetParts.of, group.replicas)),
            weights=tuple(replica.shard_weight for replica in group.replicas),
        )

    def parted(
        self, name: str, mine: TensorPart, axis: int | None, *, is_gated: bool
    ) -> PartedTensor:
        """The parameter of this name; `mine`: what this rank holds, `axis`: that which is cut."""
        replicas = [
            {
                rank: part_of_whole(
                    name,
                    mine.shape,
                    axis,
                    parts,
                    is_gated=is_gated,
                    index=index,
                )
                for index, rank in enumerate(ranks)
            }
            for ranks, parts in zip(self.ranks, self.parts, strict=True)
        ]
        return PartedTensor(part=mine, blocks=owned_blocks(replicas, self.weights))
