"""How many hardware queues the streams of a rank's GPU share.

CUDA deals streams out to so many queues as `CUDA_DEVICE_MAX_CONNECTIONS` says (8 without it, 32 at
most). What waits at the head of a queue holds back the other streams of it. What ranks launch for a
plan's lists cannot hang for that (docs/simulator.md), but it may be late; and a reduction that
--overlap-grad-reduce starts within a backward comes before its place in the list, so that with
fewer queues than streams two ranks can wait for each other.
"""

from collections.abc import Mapping

from zorse_megatron.errors import Problem
from zorse_megatron.schedules.communicators import communicators_of, resident_kernels
from zorse_megatron.schedules.lower import lower_plan
from zorse_megatron.schema.plan.plan import Plan

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = 32
# Computations, openings of receive buffers, copies to the host and from it.
_OTHER_STREAMS = 4
# Stages of sums and gathers in a region, and across regions.
_STREAMS_OF_STAGES = 2


def queue_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What to set before CUDA starts: as many queues as there are, unless the user has chosen."""
    return {} if VARIABLE in environment else {VARIABLE: str(MOST_QUEUES)}


def queue_problems(
    plan: Plan, environment: Mapping[str, str], *, overlaps_reductions: bool
) -> list[Problem]:
    """What is wrong with the number of queues for --overlap-grad-reduce, if that is on."""
    if not overlaps_reductions or len(plan.groups) == 1:
        return []
    lists = [lower_plan(plan, forward_only=forward_only) for forward_only in (False, True)]
    streams = max(resident_kernels(communicators_of(plan, lists)).values()) + _OTHER_STREAMS
    if any(group.hierarchical for group in plan.groups):
        streams += _STREAMS_OF_STAGES
    given = environment.get(VARIABLE, str(MOST_QUEUES))
    queues = int(given) if given.isdecimal() else MOST_QUEUES
    if queues >= streams:
        return []
    set_it = f"Unset {VARIABLE}, which then is {MOST_QUEUES}, or leave"
    return [
        Problem(
            where="--overlap-grad-reduce",
            found=f"{VARIABLE}={given} and {streams} streams on the busiest rank",
            expected=f"as many hardware queues as streams ({streams}), or two ranks can wait for "
            "each other: such a reduction starts before its place in the list",
            remedy=f"{set_it if streams <= MOST_QUEUES else 'Leave'} --overlap-grad-reduce out: a "
            "chunk's reduction then starts when its last backward has ended.",
        )
    ]
