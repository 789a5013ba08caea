"""Plans with tensor-parallel sets, and what each rank of a set is to hold of a stock run's weights.

The slices are written by hand, from how Megatron's layers are documented to divide their weights.
"""

from collections.abc import Mapping

import torch

from tests.megatron.comparison import Recorded
from zorse_megatron.plan.plan import Parts, Plan, Replica

_ROWS = ("linear_qkv.", "linear_fc1.", "word_embeddings.", "output_layer.")
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def set_of(
    ranks: tuple[int, ...],
    size: int,
    count: int,
    weight: float = 1.0,
    parts: Parts | None = None,
) -> Replica:
    """A replica of several ranks."""
    return Replica(
        ranks=ranks,
        micro_batch_size=size,
        num_microbatches=count,
        shard_weight=weight,
        parts=parts,
    )


def cut(whole: torch.Tensor, counts: tuple[int, ...], index: int, dim: int = 0) -> torch.Tensor:
    """The part of an axis in proportion to `counts`."""
    length, total = whole.shape[dim], sum(counts)
    return whole.narrow(dim, length * sum(counts[:index]) // total, length * counts[index] // total)


def expected_part(
    name: str, whole: torch.Tensor, replica: Replica, *, index: int, is_gated: bool
) -> torch.Tensor:
    """What rank `index` of a replica holds of a whole weight."""
    parts = replica.parts or Parts()
    kind = parts.mlp_columns if "mlp." in name else parts.vocabulary_rows
    counts = (parts.kv_groups if "self_attention." in name else kind) or (1,) * len(replica.ranks)
    if is_gated and "linear_fc1." in name:
        return torch.cat([cut(half, counts, index) for half in whole.chunk(2)])
    if any(each in name for each in _ROWS):
        return cut(whole, counts, index)
    if name.endswith(_COLUMNS):
        return cut(whole, counts, index, dim=1)
    return whole


def largest_difference(
    plan: Plan, run: Recorded, reference: Mapping[str, list[torch.Tensor]], *, is_gated: bool
) -> float:
    """Relative, of any rank's copy of any parameter. A tied head is the embedding."""
    worst = 0.0
    for rank, weights in enumerate(run.of_ranks):
        group, replica = plan.replica_of_rank(rank)
        mine = plan.groups[group].replicas[replica]
        for name, found in weights.items():
            whole = reference.get(name, reference["embedding.word_embeddings.weight"])[0]
            index = mine.ranks.index(rank)
            expected = expected_part(name, whole, mine, index=index, is_gated=is_gated)
            assert found.shape == expected.shape, name
            if not len(found.view(-1)):
                continue
            difference = (found.double() - expected.double()).norm() / expected.double().norm()
            worst = max(worst, float(difference))
    return worst
