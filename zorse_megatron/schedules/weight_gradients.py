"""How long weight gradients may wait, in groups that compute them apart from their backwards.

Qi et al. 2024 (arXiv 2401.10241, ZB-H1): stage s of S keeps S - s micro-batches between forward and
backward, and s more between backward and weight gradients, so that all stages keep as many. Then
gradients of inputs reach the first stage sooner, and the others compute weight gradients while the
pipeline drains. The counterpart of `one_f_one_b` in samples: what one round of micro-batches of
every earlier group holds. A plan may say fewer, as what waits takes memory.
"""

from zorse_megatron.schedules.one_f_one_b import round_of
from zorse_megatron.schema.plan.plan import Plan


def most_delayed(plan: Plan, number: int, replica: int) -> int | None:
    """Most micro-batches of a replica whose weight gradients wait; None: they never do.

    With one chunk per group and equal groups, s for stage s, counted from 0.
    """
    group = plan.groups[number]
    if not group.split_backward:
        return None
    first = plan.chunks_of_group(number)[0]
    earlier = {chunk.group for chunk in plan.chunks[:first]}
    samples = sum(round_of(plan.groups[other]) for other in earlier)
    samples = min(samples, group.delayed_samples or samples)
    return -(-samples * group.replicas[replica].num_microbatches // plan.global_batch_size)
