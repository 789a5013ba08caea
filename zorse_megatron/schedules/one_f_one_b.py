"""1F1B over unequal groups: each replica's in-flight limit.

Megatron's 1F1B lets stage s of S hold S - s micro-batches: one for itself and one for each stage
after it. In samples: what one round of micro-batches of this group and of every later group
holds. A replica gets its part of those samples, by its part of the global batch, rounded up.

With that many, a group waits for whatever time messages take on the way to the groups after it
and back. So a plan may say how many samples more a group has in flight, to have something to do
meanwhile.
"""

from zorse_megatron.schedules.policy import Policy, Worker
from zorse_megatron.schema.plan.plan import Group, Plan


def one_f_one_b(plan: Plan) -> Policy:
    """Forwards first, up to the limit.

    With equal groups this is `forward_backward_pipelining_without_interleaving`, where stage s
    may hold num_warmup_microbatches + 1 = S - s.
    """
    rounds = [round_of(plan.groups[chunk.group]) for chunk in plan.chunks]
    limits: dict[Worker, int] = {}
    for position, chunk in enumerate(plan.chunks):
        extra = plan.groups[chunk.group].extra_in_flight or 0
        shares = share_out(plan, chunk.group, sum(rounds[position:]) + extra)
        if position == len(rounds) - 1 and not extra:
            shares = dict.fromkeys(shares, 1)  # a backward can always follow its forward
        limits |= shares
    return Policy(limits=limits, fill_first=True, samples_per_round=plan.global_batch_size)


def round_of(group: Group) -> int:
    """Samples of one micro-batch of each replica."""
    return sum(replica.micro_batch_size for replica in group.replicas if replica.num_microbatches)


def share_out(plan: Plan, number: int, samples: int) -> dict[Worker, int]:
    """Each replica's part of the samples that its group may have in flight, in micro-batches."""
    return {
        (number, index): max(1, -(-samples * replica.num_microbatches // plan.global_batch_size))
        for index, replica in enumerate(plan.groups[number].replicas)
        if replica.num_microbatches
    }
