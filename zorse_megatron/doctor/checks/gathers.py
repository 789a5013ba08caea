"""With several GPUs: which share of all-gathers' time computation hides."""

import json

from zorse_megatron.doctor.finding import Finding, not_possible, passed
from zorse_megatron.doctor.machine import NO_CUDA
from zorse_megatron.doctor.rank_jobs import RankJob
from zorse_megatron.doctor.timed_cases import PARAMETERS_PER_LAYER, TimedCase, iteration_s
from zorse_megatron.doctor.workshop import Workshop
from zorse_megatron.schedules.actions import Kind
from zorse_megatron.schedules.lower import lower_plan

_MOST_RANKS = 4
_BYTES_PER_PARAMETER = 2


def hidden_gathers(workshop: Workshop) -> Finding:
    """One group with its parameters gathered per pass, and unsharded; and the gathers alone.

    There is no target: the share depends on the link and on the number of micro-batches.
    """
    if not workshop.machine.has_gpu:
        return not_possible(NO_CUDA)
    ranks = min(_MOST_RANKS, len(workshop.machine.gpus))
    if ranks < 2:
        return not_possible("one GPU gathers nothing")
    per_pass = TimedCase(layers=4, micro_batches=16, ranks=ranks, parameters="per_pass")
    unsharded = TimedCase(layers=4, micro_batches=16, ranks=ranks, parameters="resident")
    each_s = gather_s(workshop, ranks=ranks)
    times_s, alone_s = [], []
    for name, case in (("gathered per pass", per_pass), ("unsharded", unsharded)):
        base = case.flags(workshop.machine.layer_flags)
        times_s.append(iteration_s(workshop.trained(name, case.plan, base=base)))
        actions = lower_plan(case.plan).ranks[0]
        alone_s.append(each_s * sum(action.kind is Kind.GATHER for action in actions))
    # What the unsharded run gathers after its step is not hidden.
    exposed_s = times_s[0] - (times_s[1] - alone_s[1])
    hidden = 1 - exposed_s / alone_s[0]
    return passed(
        f"{ranks} ranks: gathers alone {alone_s[0]:.3g} s an iteration, of which {hidden:.0%} "
        "does not lengthen it",
        gathered_per_pass_s=times_s[0],
        unsharded_s=times_s[1],
        gathers_alone_s=alone_s[0],
        hidden_share=hidden,
    )


def gather_s(workshop: Workshop, *, ranks: int) -> float:
    """How long it takes to gather a layer's parameters with nothing beside it."""
    directory = workshop.directory / "gather"
    workshop.run(
        RankJob(
            name="gather",
            entry="zorse_megatron.doctor.on_ranks.gather_main",
            arguments=(str(directory / "answer.json"), str(_layer_bytes())),
            world_size=ranks,
            directory=directory,
            limit_s=workshop.limit_s(),
        )
    )
    return float(json.loads((directory / "answer.json").read_text()))


def _layer_bytes() -> int:
    return _BYTES_PER_PARAMETER * PARAMETERS_PER_LAYER
