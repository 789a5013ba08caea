"""Interleaved 1F1B over unequal groups with several chunks each; parameters stay unsharded.

Megatron's `forward_backward_pipelining_with_interleaving` takes P micro-batches, one for each of
its P stages, through all V chunks of a stage before the next P. Stage s starts its backwards after
(V - 1) P + 2 (P - s - 1) forwards, and then does one forward and one backward in turn. In samples:
a group takes one round of micro-batches of all groups through all of its chunks; and it may have in
flight that many for each of its chunks but the last, two rounds of every chunk after its last one,
and one round of its own.
"""

from zorse_megatron.schedules.one_f_one_b import round_of, share_out
from zorse_megatron.schedules.policy import Policy, Worker
from zorse_megatron.schema.plan.plan import Plan


def interleaved(plan: Plan) -> Policy:
    """Forwards first, up to the limit.

    For a plan that Megatron could run this is its order, with `microbatch_group_size_per_vp_stage`
    = P. In others a replica does what it can rather than wait for its turn: on random plans of
    unequal groups that takes a quarter off the simulated time.
    """
    rounds = [round_of(group) for group in plan.groups]
    limits: dict[Worker, int] = {}
    for number in range(len(plan.groups)):
        chunks = plan.chunks_of_group(number)
        after = sum(rounds[chunk.group] for chunk in plan.chunks[chunks[-1] + 1 :])
        samples = (len(chunks) - 1) * sum(rounds) + 2 * after + rounds[number]
        samples += plan.groups[number].extra_in_flight or 0
        limits |= share_out(plan, number, samples)
    return Policy(
        limits=limits, fill_first=True, samples_per_round=sum(rounds), strict=_is_megatrons(plan)
    )


def _is_megatrons(plan: Plan) -> bool:
    """Equal groups, chunks dealt out in turn, and micro-batches in whole rounds of stages."""
    stages = len(plan.groups)
    order = [chunk.group for chunk in plan.chunks]
    works = {
        (len(group.replicas), replica.micro_batch_size, replica.num_microbatches)
        for group in plan.groups
        for replica in group.replicas
    }
    turns = order[:stages] * (len(order) // stages)
    return (
        len(works) == 1
        and order == turns
        and plan.groups[0].replicas[0].num_microbatches % stages == 0
    )
