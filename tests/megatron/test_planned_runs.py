"""What the planner writes runs: its plans train as stock does, in the order that was simulated."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.megatron.comparison import (
    assert_follows,
    flags_for,
    plan_run,
    run_from_norm,
    stock_run,
)
from tests.traces import load_trace
from tests.unit.planner_cases import fits, random_case, simulated
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace

STEPS = 2


def case(seed: int, schedule: str) -> Inputs:
    """A random cluster of up to 6 GPUs, and a model of 3 to 6 layers."""
    inputs = random_case(seed, most_layers=6)
    space = SearchSpace(schedules=(schedule,), recompute=("none", "full"), max_micro_batch_size=4)
    return dataclasses.replace(inputs, space=space)


def waits_and_keeps_state_in_the_host(plan: Plan) -> bool:
    return len(plan.groups) == 3 and any(c.transfer for c in plan.chunks) and any(offloads(plan))


def has_two_chunks_per_group(plan: Plan) -> bool:
    return [chunk.group for chunk in plan.chunks] == [0, 1, 0, 1]


def has_unequal_shards(plan: Plan) -> bool:
    return any(len({r.shard_weight for r in group.replicas}) > 1 for group in plan.groups)


def lends_memory_layer_by_layer(plan: Plan) -> bool:
    idle = any(r.num_microbatches == 0 for group in plan.groups for r in group.replicas)
    return idle and len(plan.chunks) == plan.model.num_layers


def offloads(plan: Plan) -> Iterator[bool]:
    return (group.offload is not None and group.offload.optimizer_state for group in plan.groups)


@pytest.mark.parametrize(
    ("seed", "schedule", "is_wanted"),
    [
        (7, "1f1b", waits_and_keeps_state_in_the_host),
        (26, "interleaved", has_two_chunks_per_group),
        (22, "breadth_first", has_unequal_shards),
        (51, "breadth_first", lends_memory_layer_by_layer),
    ],
)
def test_a_plan_runs_as_it_was_simulated(
    seed: int, schedule: str, is_wanted: Callable[[Plan], bool], corpus: Path, tmp_path: Path
) -> None:
    inputs = case(seed, schedule)
    plan = find_plan(inputs).plan
    assert is_wanted(plan), "another seed is needed for what is to be shown"
    flags = flags_for(
        corpus,
        *("--num-layers", str(inputs.num_layers)),
        *("--global-batch-size", str(inputs.global_batch_size)),
        "--untie-embeddings-and-output-weights",
        steps=STEPS,
    )
    run = plan_run(plan, [*flags, "--zorse-trace", str(tmp_path)])
    assert_follows(run, stock_run(flags))
    result = simulated(inputs, plan)
    assert fits(inputs, result)
    for rank in range(plan.world_size):
        _, spans = load_trace(tmp_path / f"trace-rank{rank}.json")
        planned = [span.action for span in result.spans(rank)]
        for step in range(STEPS):
            assert run_from_norm(spans, step) == planned
