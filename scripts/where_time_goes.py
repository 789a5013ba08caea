"""Where a plan loses what its GPUs could do alone.

    python scripts/where_time_goes.py

Plans the emulated comparisons of docs/emulation.md (float16, layer times of
`examples/mini-profile.json`), each without and with `--split-backward`, and prints how long an
iteration would take if it lost nothing, and with each loss; then the share of aggregate of mini-b's
plan with as many times more micro-batches.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zorse_megatron.costs.interface import PassTimes
from zorse_megatron.emulate.compare.comparison import aggregate_tokens_per_s
from zorse_megatron.planner.evaluate.simulate_plan import simulate_plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, make_inputs
from zorse_megatron.planner.inputs.search_space import SearchSpace
from zorse_megatron.schedules.actions import ON_LAYERS, parse_action
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster, parse_cluster
from zorse_megatron.schema.model.model_presets import MODELS
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.profile.profile_json import load_profile
from zorse_megatron.simulate.result import SimulationResult

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TIMES = (1, 2, 4, 8)
EQUAL = b"""
nodes:
  - {name: a, gpus: 2 x A100-40, link: NVSwitch 220 GB/s, nics: 400 Gb/s}
  - {name: b, gpus: 2 x A100-40, link: NVSwitch 220 GB/s, nics: 400 Gb/s}
"""
NO_LOSS = "no loss"
LOSSES = ("micro-batch sizes, recomputation", "imbalance", "fill, drain, waits", "update")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the comparison."""

    cluster: str
    model: str
    samples: int
    tokens: int

    def inputs(self, samples: int, *, split_backward: bool) -> Inputs:
        """What the planner is given."""
        path = EXAMPLES / f"{self.cluster}.yaml"
        return make_inputs(
            load_cluster(path) if path.exists() else parse_cluster(EQUAL),
            replace(MODELS[self.model], seq_length=self.tokens),
            load_profile(EXAMPLES / "mini-profile.json"),
            global_batch_size=samples,
            dtype="float16",
            space=SearchSpace(split_backward=split_backward),
        )


MINI_B = Case(cluster="mini-b", model="llama-3b", samples=128, tokens=1024)
CASES = (
    MINI_B,
    Case(cluster="mini-b", model="llama-7b", samples=128, tokens=1024),
    Case(cluster="mini-a", model="llama-13b", samples=32, tokens=4096),
    Case(cluster="mini-c", model="llama-3b", samples=128, tokens=512),
    Case(cluster="4 equal A100-40", model="llama-3b", samples=64, tokens=1024),
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


def seconds(plan: Plan, inputs: Inputs, result: SimulationResult) -> Iterator[float]:
    """An iteration without any loss, and with one of LOSSES after the other (s).

    The second is as if the ranks, each as fast as it is under the plan, shared the work to the last
    bit; the third is the busiest rank's computations.
    """
    ideal_s = plan.global_batch_size * inputs.sequence_length / aggregate_tokens_per_s(inputs)
    yield ideal_s
    spans = [
        [span for span in result.spans(rank) if parse_action(span.action).kind in ON_LAYERS]
        for rank in range(plan.world_size)
    ]
    busy_s = [sum(span.end_s - span.start_s - span.waited_s for span in each) for each in spans]
    yield shared_evenly_s(plan, inputs, busy_s)
    yield max(busy_s)
    yield max(each[-1].end_s for each in spans) - min(each[0].start_s for each in spans)
    yield result.iteration_s


def shared_evenly_s(plan: Plan, inputs: Inputs, busy_s: list[float]) -> float:
    """How long all ranks would be busy if they shared the batch at the speeds they have."""
    rates = []
    for rank, took_s in enumerate(busy_s):
        size, whole_s = best(inputs, inputs.kinds[rank])
        rates.append(size / whole_s * at_best_s(plan, inputs, rank) / took_s)
    return plan.global_batch_size / sum(rates)


def at_best_s(plan: Plan, inputs: Inputs, rank: int) -> float:
    """How long the rank's work would take it at its best micro-batch size; its part of a set's."""
    number, index = plan.replica_of_rank(rank)
    replica, kind = plan.groups[number].replicas[index], inputs.kinds[rank]
    size, _ = best(inputs, kind)
    sample_s = 0.0
    for chunk in plan.chunks_of_group(number):
        first, stop = plan.chunks[chunk].layers
        sample_s += (stop - first) * both_s(inputs.compute.layer(kind, size))
        sample_s += both_s(inputs.compute.embedding(kind, size)) if chunk == 0 else 0.0
        is_last = chunk == len(plan.chunks) - 1
        sample_s += both_s(inputs.compute.head(kind, size)) if is_last else 0.0
    return (
        sample_s / size * replica.micro_batch_size * replica.num_microbatches / len(replica.ranks)
    )


def best(inputs: Inputs, kind: str) -> tuple[int, float]:
    """The micro-batch size at which a kind is fastest, and the seconds of one through the model."""
    compute = inputs.compute

    def whole_s(size: int) -> float:
        ends_s = both_s(compute.embedding(kind, size)) + both_s(compute.head(kind, size))
        return inputs.num_layers * both_s(compute.layer(kind, size)) + ends_s

    size = min(inputs.best_sizes[kind], key=lambda each: whole_s(each) / each)
    return size, whole_s(size)


def both_s(times: PassTimes) -> float:
    """Forward and backward."""
    return times.forward_s + times.backward_s


def print_case(case: Case, *, split_backward: bool) -> None:
    """Plan, simulate, and print a row."""
    inputs = case.inputs(case.samples, split_backward=split_backward)
    plan = find_plan(inputs).plan
    found = list(seconds(plan, inputs, simulate_plan(inputs, plan)))
    cells = " | ".join(f"{each:.3f}" for each in found)
    name = f"{case.cluster}, {case.model}, {case.samples} x {case.tokens}"
    split = "yes" if split_backward else "no"
    print(f"| {name} | {split} | {cells} | {found[0] / found[-1]:.3f} |", flush=True)


def print_larger_batches(case: Case) -> None:
    """Print the share of aggregate by batch."""
    plan = find_plan(case.inputs(case.samples, split_backward=False)).plan
    for times in TIMES:
        more = longer(plan, times)
        inputs = case.inputs(more.global_batch_size, split_backward=False)
        tokens = more.global_batch_size * inputs.sequence_length
        tokens_per_s = tokens / simulate_plan(inputs, more).iteration_s
        share = tokens_per_s / aggregate_tokens_per_s(inputs)
        print(f"{more.global_batch_size} samples: {share:.2f} of aggregate")


def main() -> None:
    """Print both."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    header = " | ".join(["Case", "`--split-backward`", NO_LOSS, *LOSSES, "of aggregate"])
    print(f"| {header} |\n|{'---|' * (4 + len(LOSSES))}")
    for case in CASES:
        for split_backward in (False, True):
            print_case(case, split_backward=split_backward)
    print_larger_batches(MINI_B)


if __name__ == "__main__":
    main()
