"""NCCL: do the ranks of a plan find each other, and what memory does each communicator take?"""

from zorse_megatron.doctor.connection import figures_of
from zorse_megatron.doctor.finding import Finding, not_possible, passed
from zorse_megatron.doctor.machine import NO_CUDA
from zorse_megatron.doctor.workshop import CONNECTED, Workshop
from zorse_megatron.errors import RankFailure


def communicators(workshop: Workshop) -> Finding:
    """Make the communicators of the first plan, as its training does."""
    if not workshop.machine.has_gpu:
        return not_possible(NO_CUDA)
    shares_gpus = workshop.machine.shares_gpus(CONNECTED.world_size)
    try:
        taken = workshop.connected()
    except RankFailure as failure:
        if not shares_gpus:
            raise
        return not_possible(
            f"NCCL runs no two ranks on one GPU here ({_reason(failure)}); plans with more ranks "
            "than GPUs are trained over host memory and gloo instead"
        )
    figures = figures_of(taken)
    listed = ", ".join(
        f"{each} {figures[f'{each}_bytes'] / 1e6:.0f} MB "
        f"(priced {figures[f'{each}_priced_bytes'] / 1e6:.0f})"
        for each in dict.fromkeys(each.use for each in taken)
    )
    shared = " that share GPUs, which show the sum of theirs" if shares_gpus else ""
    return passed(f"{CONNECTED.world_size} ranks{shared}; at most {listed}", **figures)


def _reason(failure: RankFailure) -> str:
    """NCCL's own words if it has said any, else the last line."""
    lines = [line.strip() for line in failure.problems[0].remedy.splitlines() if line.strip()]
    of_nccl = [line for line in lines if "NCCL" in line or "Duplicate GPU" in line]
    return (of_nccl or lines)[-1]
