"""Runs of stock Megatron and of plans on the same command, and how far they are apart.

The command is NVIDIA's own `pretrain_gpt.py` where that is there, else the built-in entry.
"""

import dataclasses
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.megatron.launch import run_ranks
from tests.megatron.upstream import SCRIPT
from tests.shared import once_per_run
from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.schedule.actions import from_norm, parse_action
from zorse_megatron.trace import Span

NUM_LAYERS = 4
GLOBAL_BATCH_SIZE = 8
STEPS = 3
MANY_STEPS = 20
"""For a canonical plan: rounding would have added up by then, if it did."""

MODEL_FLAGS = (
    *("--num-layers", str(NUM_LAYERS), "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "1", "--global-batch-size", str(GLOBAL_BATCH_SIZE)),
    *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-warmup-iters", "2", "--lr-decay-iters", "40"),
    *("--weight-decay", "0.1", *WITHOUT_DROPOUT, "--log-interval", "1", "--seed", "11"),
    *("--distributed-timeout-minutes", "1", "--calculate-per-token-loss"),
)
BASE_FLAGS = (*MODEL_FLAGS, *WITHOUT_EVALUATION, *WITHOUT_WORKERS)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What one run computed."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    steps: tuple[dict[str, Any], ...]
    initial: dict[str, list[torch.Tensor]]
    """Name in the whole model -> the copies that ranks hold."""
    final: dict[str, list[torch.Tensor]]
    of_ranks: tuple[dict[str, torch.Tensor], ...]
    """Rank -> its own parameters after the last step."""
    outputs: tuple[str, ...]


def run_recorded(
    flags: Sequence[str],
    world_size: int,
    *,
    timeout_s: float = 120,
    entry: str = "tests.megatron.recording_entry",
    script: Sequence[str] = SCRIPT,
    env: Mapping[str, str] | None = None,
) -> Recorded:
    """Run `zorse_megatron.pretrain` with `flags` and read what it recorded."""
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch, "record")
        result = run_ranks(
            [*script, *flags],
            world_size,
            entry=entry,
            timeout_s=timeout_s,
            env={"ZORSE_TEST_RECORD": str(record), **(env or {})},
        ).check()
        steps = json.loads((record / f"steps-rank{world_size - 1}.json").read_text())
        return Recorded(
            losses=tuple(step["loss"].get("lm loss", float("nan")) for step in steps),
            grad_norms=tuple(step["grad_norm"] for step in steps),
            steps=tuple(steps),
            initial=_copies(record, "initial", world_size),
            final=_copies(record, "weights", world_size),
            of_ranks=tuple(
                torch.load(record / f"weights-rank{rank}.pt") for rank in range(world_size)
            ),
            outputs=result.outputs,
        )


def _copies(record: Path, kind: str, world_size: int) -> dict[str, list[torch.Tensor]]:
    copies: dict[str, list[torch.Tensor]] = {}
    for rank in range(world_size):
        for name, value in torch.load(record / f"{kind}-rank{rank}.pt").items():
            copies.setdefault(name, []).append(value)
    return copies


@once_per_run
def stock_run(flags: tuple[str, ...], world_size: int = 1, **options: Any) -> Recorded:
    """A stock run of the command; one for each command in a run of the tests."""
    return run_recorded(flags, world_size, **options)


def plan_run(plan: Plan, flags: Sequence[str], **options: Any) -> Recorded:
    """A run of the command under a plan."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "plan.json")
        save_plan(plan, path)
        return run_recorded([*flags, "--zorse-plan", str(path)], plan.world_size, **options)


def replica(rank: int, size: int, count: int, weight: float = 1.0) -> Replica:
    return Replica(
        ranks=(rank,), micro_batch_size=size, num_microbatches=count, shard_weight=weight
    )


def plan_of(*groups: tuple[tuple[Replica, ...], int]) -> Plan:
    """A plan of (replicas, number of layers) in model order."""
    chunks, first = [], 0
    for number, (_, layers) in enumerate(groups):
        chunks.append(Chunk(group=number, layers=(first, first + layers)))
        first += layers
    return Plan(
        schema_version=1,
        global_batch_size=groups[0][0][0].num_samples
        + sum(r.num_samples for r in groups[0][0][1:]),
        model=ModelFingerprint(num_layers=first),
        groups=tuple(Group(replicas=replicas) for replicas, _ in groups),
        chunks=tuple(chunks),
        schedule=Schedule(name="1f1b"),
    )


def computing_in(plan: Plan, *dtypes: ComputeDtype | None) -> Plan:
    """The plan, with a type for each group to compute in."""
    groups = [
        dataclasses.replace(group, compute_dtype=dtype)
        for group, dtype in zip(plan.groups, dtypes, strict=True)
    ]
    return dataclasses.replace(plan, groups=tuple(groups))


def chunked_plan(groups: Sequence[tuple[Replica, ...]], chunks: Sequence[tuple[int, int]]) -> Plan:
    """A breadth-first plan of chunks (group, number of layers) in model order."""
    plan = plan_of(*((replicas, 1) for replicas in groups))
    listed, first = [], 0
    for group, layers in chunks:
        listed.append(Chunk(group=group, layers=(first, first + layers)))
        first += layers
    return dataclasses.replace(
        plan,
        model=ModelFingerprint(num_layers=first),
        chunks=tuple(listed),
        schedule=Schedule(name="breadth_first"),
    )


# Group sizes in model order; every layout has unequal micro-batches and shards where it can.
LAYOUTS = {
    "2|1": plan_of(((replica(0, 1, 6, 3.0), replica(1, 1, 2, 1.0)), 1), ((replica(2, 4, 2),), 3)),
    "1|2": plan_of(((replica(1, 2, 4),), 3), ((replica(2, 3, 2, 0.2), replica(0, 2, 1, 0.8)), 1)),
    "3|2": plan_of(
        ((replica(0, 1, 3, 0.0), replica(4, 2, 2, 1.0), replica(2, 1, 1, 2.5)), 2),
        ((replica(1, 1, 5, 1.0), replica(3, 3, 1, 1.0)), 2),
    ),
    "2|1|2": plan_of(
        ((replica(0, 2, 3, 3.0), replica(1, 1, 2, 1.0)), 1),
        ((replica(2, 4, 2),), 2),
        ((replica(3, 1, 5, 1.0), replica(4, 3, 1, 0.3)), 1),
    ),
    "1|1|1|1": plan_of(
        ((replica(3, 1, 8),), 1), ((replica(1, 8, 1),), 1),
        ((replica(2, 2, 4),), 1), ((replica(0, 4, 2),), 1),
    ),
    "4": plan_of(
        (
            (replica(0, 1, 1, 1.0), replica(1, 3, 1, 0.0), replica(2, 1, 2, 4.0), replica(3, 2, 1)),
            4,
        ),
    ),
    "5, one idle": plan_of(
        (
            (
                replica(0, 1, 2, 1.0),
                replica(1, 2, 1, 2.0),
                replica(2, 1, 0, 5.0),
                replica(3, 3, 1, 1.0),
                replica(4, 1, 1, 0.5),
            ),
            4,
        ),
    ),
    # Neither rank 0 nor the last rank is where stock expects it: on an end of the pipeline.
    "1|3|1, ends inside": plan_of(
        ((replica(2, 4, 2),), 1),
        ((replica(0, 1, 4, 3.0), replica(4, 2, 1, 1.1), replica(1, 2, 1, 0.7)), 2),
        ((replica(3, 8, 1),), 1),
    ),
    "2|3, idle at the end": plan_of(
        ((replica(0, 2, 2), replica(1, 4, 1)), 2),
        ((replica(2, 4, 2, 0.5), replica(3, 1, 0, 2.0), replica(4, 1, 0, 0.0)), 2),
    ),
}  # fmt: skip


def run_from_norm(spans: Sequence[Span], step: int) -> list[str]:
    """Actions that were run in a step, in the order in which the simulator has an iteration."""
    actions = [parse_action(span.action) for span in spans if span.step == step]
    return [str(action) for action in from_norm(actions)]
