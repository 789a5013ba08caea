"""NCCL: do ranks find each other, and what memory does each communicator take?"""

import json

from zorse_megatron.doctor.finding import Finding, not_possible, passed
from zorse_megatron.doctor.machine import NO_CUDA
from zorse_megatron.doctor.rank_jobs import RankJob
from zorse_megatron.doctor.workshop import Workshop
from zorse_megatron.errors import RankFailure


def communicators(workshop: Workshop) -> Finding:
    """Make the kinds of communicators of a plan; on a single GPU, of two ranks that share it."""
    if not workshop.machine.has_gpu:
        return not_possible(NO_CUDA)
    world_size = max(2, len(workshop.machine.gpus))
    directory = workshop.directory / "communicators"
    job = RankJob(
        name="communicators",
        entry="zorse_megatron.doctor.on_ranks.communicators_main",
        arguments=(str(directory / "answer.json"),),
        world_size=world_size,
        directory=directory,
        limit_s=workshop.limit_s(),
        environment=workshop.environment(world_size),
    )
    try:
        workshop.run(job)
    except RankFailure as failure:
        if not workshop.machine.shares_gpus(world_size):
            raise
        workshop.is_staged = True
        return not_possible(
            f"NCCL runs no two ranks on one GPU here ({_reason(failure)}); plans with more ranks "
            "than GPUs are trained over host memory and gloo instead"
        )
    notes = json.loads((directory / "answer.json").read_text())
    figures = {f"{name.replace(', ', '_').replace(' ', '_')}_bytes": size for name, size in notes}
    listed = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in notes)
    shared = ", which share a GPU" if workshop.machine.shares_gpus(world_size) else ""
    return passed(f"{world_size} ranks{shared}: {listed}", **figures)


def _reason(failure: RankFailure) -> str:
    """NCCL's own words if it has said any, else the last line."""
    lines = [line.strip() for line in failure.problems[0].remedy.splitlines() if line.strip()]
    of_nccl = [line for line in lines if "NCCL" in line or "Duplicate GPU" in line]
    return (of_nccl or lines)[-1]
