"""The kernels on shards: compiled, right, and as fast as memory allows."""

import json

from zorse_megatron.doctor.finding import Finding, failed, not_possible, passed
from zorse_megatron.doctor.machine import NO_CUDA
from zorse_megatron.doctor.rank_jobs import RankJob
from zorse_megatron.doctor.workshop import Workshop
from zorse_megatron.schema.gpus.compute_capability import TRITON_FROM

MIN_SHARE_OF_COPY = 0.85
"""The target of docs/kernels.md."""


def kernels(workshop: Workshop) -> Finding:
    """Run each kernel in Triton, compare it with plain torch, and time it against a copy."""
    if not workshop.machine.has_gpu:
        return not_possible(NO_CUDA)
    directory = workshop.directory / "kernels"
    workshop.run(
        RankJob(
            name="kernels",
            entry="zorse_megatron.doctor.on_ranks.kernels_main",
            arguments=(str(directory / "answer.json"),),
            world_size=1,
            directory=directory,
            limit_s=workshop.limit_s(),
        )
    )
    answer = json.loads((directory / "answer.json").read_text())
    rows = answer["rows"]
    figures = {
        f"{row['kernel']}_{row['num_bytes'] // 10**6}_mb_share_of_copy": row["share_of_copy"]
        for row in rows
    }
    figures["copy_bytes_per_s"] = max(row["copy_bytes_per_s"] for row in rows)
    wrong = [f"{row['kernel']}: {row['disagrees']}" for row in rows if row["disagrees"]]
    if wrong:
        return failed(f"results differ from plain torch's: {'; '.join(wrong)}", **figures)
    reason = answer["in_plain_torch_because"]
    if reason is not None and workshop.machine.gpus[0].capability < TRITON_FROM:
        return not_possible(reason)
    if reason is not None:
        return failed(f"kernels run in plain torch: {reason}", **figures)
    slow = [
        f"{row['kernel']} ({row['num_bytes'] / 1e6:.0f} MB) {row['share_of_copy']:.0%}"
        for row in rows
        if row["share_of_copy"] < MIN_SHARE_OF_COPY
    ]
    if slow:
        expected = f"expected at least {MIN_SHARE_OF_COPY:.0%} of a copy's bandwidth"
        return failed(f"right, but slow: {', '.join(slow)}; {expected}", **figures)
    least = min(row["share_of_copy"] for row in rows)
    return passed(f"compiled by Triton, right, at least {least:.0%} of a copy's speed", **figures)
