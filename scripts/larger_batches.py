"""Where a plan loses what its GPUs could do alone, and how that shrinks with the batch.

    python scripts/larger_batches.py

Simulates our plan of `mini-b` for llama-3b (128 samples of 1024 tokens, float16, layer times of
`examples/mini-profile.json`), and the same plan with as many times more micro-batches. Prints the
table of docs/emulation.md, "Where the remaining ... goes", and the share of aggregate by batch.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zorse_megatron.emulate.compare.comparison import aggregate_tokens_per_s
from zorse_megatron.planner.evaluate.simulate_plan import simulate_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, make_inputs
from zorse_megatron.schedules.actions import COMPUTE, parse_action
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.model.model_presets import MODELS
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import load_plan
from zorse_megatron.schema.profile.profile_json import load_profile
from zorse_megatron.simulate.result import SimulationResult

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LENGTH, TIMES = 1024, (1, 2, 4, 8)


def inputs_of(batch: int) -> Inputs:
    """What the planner was given."""
    return make_inputs(
        load_cluster(EXAMPLES / "mini-b.yaml"),
        replace(MODELS["llama-3b"], seq_length=LENGTH),
        load_profile(EXAMPLES / "mini-profile.json"),
        global_batch_size=batch,
        dtype="float16",
    )


def longer(plan: Plan, times: int) -> Plan:
    """The plan with so many times the micro-batches."""
    groups = tuple(
        replace(
            group,
            replicas=tuple(
                replace(replica, num_microbatches=times * replica.num_microbatches)
                for replica in group.replicas
            ),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups, global_batch_size=times * plan.global_batch_size)


def sample_s(inputs: Inputs, kind: str, size: int) -> float:
    """One sample through the whole model on one GPU, at a micro-batch size, nothing recomputed."""
    compute = inputs.compute
    layer = compute.layer(kind, size)
    ends = (compute.embedding(kind, size), compute.head(kind, size))
    whole_s = inputs.num_layers * (layer.forward_s + layer.backward_s)
    return (whole_s + sum(end.forward_s + end.backward_s for end in ends)) / size


def losses(plan: Plan, inputs: Inputs, result: SimulationResult) -> Iterator[tuple[str, float]]:
    """What is lost, and how long an iteration takes with that and all before it (s)."""
    samples = plan.global_batch_size
    yield (
        "Every GPU at its best micro-batch size, no bubble, no communication",
        samples * inputs.sequence_length / aggregate_tokens_per_s(inputs),
    )
    rates = (
        1 / sample_s(inputs, inputs.kinds[rank], replica.micro_batch_size)
        for group in plan.groups
        for replica in group.replicas
        for rank in replica.ranks
    )
    yield "The plan's micro-batch sizes", samples / sum(rates)
    spans = [
        [span for span in result.spans(rank) if parse_action(span.action).kind in COMPUTE]
        for rank in range(plan.world_size)
    ]
    busy_s = [sum(span.end_s - span.start_s - span.waited_s for span in each) for each in spans]
    yield "Imbalance from whole layers and samples", max(busy_s)
    yield "Fill/drain bubble, and waiting for transfers", max(each[-1].end_s for each in spans)
    yield "Last reduction, norm, optimizer step, all-gathers", result.iteration_s


def main() -> None:
    """Print both."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    plan = load_plan(EXAMPLES / "mini-b-llama-3b-plan.json")
    inputs = inputs_of(plan.global_batch_size)
    rows = list(losses(plan, inputs, simulate_plan(inputs, plan)))
    print("| | Seconds | Of aggregate |\n|---|---|---|")
    for name, seconds in rows:
        print(f"| {name} | {seconds:.2f} | {rows[0][1] / seconds:.2f} |")
    for times in TIMES:
        more = longer(plan, times)
        inputs = inputs_of(more.global_batch_size)
        tokens_per_s = more.global_batch_size * LENGTH / simulate_plan(inputs, more).iteration_s
        share = tokens_per_s / aggregate_tokens_per_s(inputs)
        print(f"{more.global_batch_size} samples: {share:.2f} of aggregate")


if __name__ == "__main__":
    main()
