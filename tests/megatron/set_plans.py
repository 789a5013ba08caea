"""Plans with tensor-parallel sets, and what each rank of a set is to hold of a stock run's weights.

The slices are written by hand, from how Megatron's layers are documented to divide their weights.
"""

from collections.abc import Mapping

import torch

from tests.megatron.comparison import Recorded
from zorse_megatron.schema.plan.plan import Plan, Replica

_ROWS = ("linear_qkv.", "linear_fc1.", "word_embeddings.", "output_layer.")
_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def set_of(ranks: tuple[int, ...], size: int, count: int, weight: float = 1.0) -> Replica:
    """A replica of several ranks."""
    return Replica(ranks=ranks, micro_batch_size=size, num_microbatches=count, shard_weight=weight)


def expected_part(
    name: str, whole: torch.Tensor, *, index: int, degree: int, is_gated: bool
) -> torch.Tensor:
    """What rank `index` of `degree` equal ones holds of a whole weight."""
    if is_gated and "linear_fc1." in name:
        return torch.cat([half.chunk(degree)[index] for half in whole.chunk(2)])
    if any(each in name for each in _ROWS):
        return whole.chunk(degree)[index]
    if name.endswith(_COLUMNS):
        return whole.chunk(degree, dim=1)[index]
    return whole


def largest_difference(
    plan: Plan, run: Recorded, reference: Mapping[str, list[torch.Tensor]], *, is_gated: bool
) -> float:
    """Relative, of any rank's copy of any parameter. A tied head is the embedding."""
    worst = 0.0
    for rank, weights in enumerate(run.of_ranks):
        group, replica = plan.replica_of_rank(rank)
        ranks = plan.groups[group].replicas[replica].ranks
        for name, found in weights.items():
            whole = reference.get(name, reference["embedding.word_embeddings.weight"])[0]
            expected = expected_part(
                name, whole, index=ranks.index(rank), degree=len(ranks), is_gated=is_gated
            )
            assert found.shape == expected.shape, name
            difference = (found.double() - expected.double()).norm() / expected.double().norm()
            worst = max(worst, float(difference))
    return worst
