"""1F1B over unequal groups: how many micro-batches each replica may have in flight.

Megatron's 1F1B lets stage s of S hold S - s micro-batches: one for itself and one for each stage
behind it. In samples: what one round of micro-batches of this group and of every later group
holds. A replica gets its part of those samples, by its part of the global batch, rounded up.
"""

from collections.abc import Sequence

from zorse_megatron.schema.plan import Group


def in_flight_limits(groups: Sequence[Group], global_batch_size: int) -> list[dict[int, int]]:
    """For each group in model order: replica number -> micro-batches in flight, at most.

    With equal groups this is `S - s`, as in Megatron's
    `forward_backward_pipelining_without_interleaving` (num_warmup_microbatches + 1).
    """
    rounds = [
        sum(replica.micro_batch_size for replica in group.replicas if replica.num_microbatches)
        for group in groups
    ]
    limits = []
    for position, group in enumerate(groups):
        samples = sum(rounds[position:])
        limits.append(
            {
                number: max(1, -(-samples * replica.num_microbatches // global_batch_size))
                for number, replica in enumerate(group.replicas)
                if replica.num_microbatches
            }
        )
    return limits
