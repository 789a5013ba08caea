"""What the planner writes runs: its plans train as stock does, in the order that was simulated."""

import dataclasses
from pathlib import Path

import pytest

from tests.megatron.comparison import plan_run, stock_run
from tests.megatron.test_exactness import assert_equal_runs, flags_for
from tests.unit.planner_cases import fits, random_case, simulated
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace
from zorse_megatron.trace import load_trace

STEPS = 2


def case(seed: int, schedules: tuple[str, ...]) -> Inputs:
    """A random cluster of up to 6 GPUs, and a model of 3 to 6 layers."""
    inputs = random_case(seed, most_layers=6)
    space = SearchSpace(schedules=schedules, recompute=("none", "full"), max_micro_batch_size=4)
    return dataclasses.replace(inputs, space=space)


@pytest.mark.parametrize(
    ("seed", "schedules"),
    [
        (5, ("1f1b",)),  # three groups, samples in flight for time on the way, state in the host
        (10, ("interleaved",)),  # two chunks per group, unequal shards
        (6, ("breadth_first",)),  # layer by layer, a rank that only lends memory
    ],
)
def test_a_plan_runs_as_it_was_simulated(
    seed: int, schedules: tuple[str, ...], corpus: Path, tmp_path: Path
) -> None:
    inputs = case(seed, schedules)
    plan = find_plan(inputs).plan
    flags = flags_for(
        corpus,
        *("--num-layers", str(inputs.num_layers)),
        *("--global-batch-size", str(inputs.global_batch_size)),
        "--untie-embeddings-and-output-weights",
        steps=STEPS,
    )
    run = plan_run(plan, [*flags, "--zorse-trace", str(tmp_path)])
    assert_equal_runs(run, stock_run(flags))
    result = simulated(inputs, plan)
    assert fits(inputs, result)
    for rank in range(plan.world_size):
        _, spans = load_trace(tmp_path / f"trace-rank{rank}.json")
        planned = [span.action for span in result.spans(rank)]
        for step in range(STEPS):
            assert [span.action for span in spans if span.step == step] == planned
