"""Compares simulator and emulation on plans with tensor-parallel groups: time, and memory by rank.

    python -m scripts.validation.emulated_tp

Prints a row for each plan, with and without sequence parallelism, and ends with status 1 where they
are further apart than 2 % in the median or 5 % at most. Each row takes some seconds on two cores.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.validation.peaks import peaks_without
from zorse_megatron.emulate.emulator import EmulatedRun, Emulator, System, emulator
from zorse_megatron.emulate.tiny_model import TinyShape, TinyTraining
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import MODELS, Computing
from zorse_megatron.plan.plan import (
    Chunk,
    Group,
    Offload,
    Plan,
    Recompute,
    Replica,
    Schedule,
    TpShards,
)
from zorse_megatron.planner.inputs.search_inputs import Inputs, make_inputs
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.simulate.memory_ledger import Category

LAYERS, SAMPLES = 8, 16
MODEL = replace(MODELS["llama-3b"], num_layers=LAYERS, num_query_groups=8)
CLUSTER = """
nodes:
  - {gpus: 4 x A100-40, nics: 100 Gb/s}
  - {gpus: 2 x T4, nics: 25 Gb/s}
"""
MIXED_NODE = """
nodes:
  - {gpus: [1 x A100-40, 1 x T4], nics: 100 Gb/s}
  - {gpus: 2 x T4, nics: 25 Gb/s}
"""
COLUMNS = MODEL.ffn_hidden_size
THREE_TO_ONE = TpShards(kv_groups=(6, 2), mlp_columns=(COLUMNS * 3 // 4, COLUMNS // 4))
ALL_UNEQUAL = TpShards(
    kv_groups=(5, 3), mlp_columns=(COLUMNS * 4 // 5, COLUMNS // 5), vocabulary_rows=(24000, 8000)
)
OF_THREE = TpShards(
    kv_groups=(4, 3, 1), mlp_columns=(COLUMNS, 0, 0), vocabulary_rows=(20000, 11999, 1)
)
ALL_OR_NONE = TpShards(
    kv_groups=(8, 0), mlp_columns=(COLUMNS // 2, COLUMNS // 2), vocabulary_rows=(0, 32000)
)
MEDIAN, WORST = 0.02, 0.05


def tp_replica(ranks: tuple[int, ...], size: int, count: int, **more: Any) -> Replica:
    """A replica of these ranks."""
    return Replica(
        ranks=ranks,
        micro_batch_size=size,
        num_microbatches=count,
        shard_weight=more.pop("weight", 1.0),
        **more,
    )


def plan_of(
    *groups: tuple[Replica, ...], rounds: int = 1, name: Any = "1f1b", **settings: Any
) -> Plan:
    """The groups one after the other, `rounds` times over all layers; `settings`: of all groups."""
    parameters = settings.pop("parameters", None)
    order = list(range(len(groups))) * rounds
    bounds = [LAYERS * n // len(order) for n in range(len(order) + 1)]
    return Plan(
        schema_version=2,
        model=MODEL.fingerprint(),
        global_batch_size=SAMPLES,
        groups=tuple(Group(replicas=replicas, **settings) for replicas in groups),
        chunks=tuple(
            Chunk(group=group, layers=layers)
            for group, layers in zip(order, pairwise(bounds), strict=True)
        ),
        schedule=Schedule(name=name, parameters=parameters or {}),
    )


TWO, FOUR = tp_replica((0, 1), 2, 8), tp_replica((0, 1, 2, 3), 2, 8)
UNLIKE = (tp_replica((0, 1), 2, 6, weight=2.0), tp_replica((2,), 1, 4))
IN_THE_HOST: dict[str, Any] = {
    "recompute": Recompute(mode="full"),
    "offload": Offload(optimizer_state=True, activations=True),
}
PER_PASS = {"parameters": "per_pass"}
PLANS: dict[str, Plan] = {
    "2": plan_of((TWO,)),
    "4": plan_of((FOUR,)),
    "2+2": plan_of((tp_replica((0, 1), 2, 5), tp_replica((2, 3), 2, 3, weight=0.5))),
    "2\\|2": plan_of((TWO,), (tp_replica((2, 3), 2, 8),)),
    "4\\|2": plan_of((FOUR,), (tp_replica((4, 5), 4, 4),)),
    "2\\|1": plan_of((TWO,), (tp_replica((2,), 1, 16),)),
    "2+1\\|1": plan_of(UNLIKE, (tp_replica((3,), 4, 4),)),
    "1\\|2+1": plan_of((tp_replica((3,), 4, 4),), UNLIKE),
    "2\\|2, interleaved": plan_of(
        (TWO,), (tp_replica((2, 3), 1, 16),), rounds=2, name="interleaved"
    ),
    "2+2, breadth first": plan_of(
        (tp_replica((0, 1), 2, 5), tp_replica((2, 3), 2, 3)),
        (tp_replica((4, 5), 4, 4),),
        rounds=2,
        name="breadth_first",
        parameters=PER_PASS,
        recompute=Recompute(mode="full"),
    ),
    "2+1 1, breadth first, in the host": plan_of(
        UNLIKE,
        (tp_replica((3,), 4, 4),),
        rounds=2,
        name="breadth_first",
        parameters=PER_PASS,
        **IN_THE_HOST,
    ),
}
ON_MIXED_NODE: dict[str, Plan] = {
    "2 unequal": plan_of((tp_replica((0, 1), 2, 8, tp_shards=THREE_TO_ONE),)),
    "2 unequal\\|2": plan_of(
        (tp_replica((0, 1), 2, 8, tp_shards=ALL_UNEQUAL),), (tp_replica((2, 3), 4, 4),)
    ),
    "2 all or none\\|2": plan_of(
        (tp_replica((0, 1), 2, 8, tp_shards=ALL_OR_NONE),), (tp_replica((2, 3), 4, 4),)
    ),
    "2 unequal+1+1": plan_of(
        (
            tp_replica((0, 1), 2, 6, weight=4.0, tp_shards=ALL_UNEQUAL),
            tp_replica((2,), 1, 2),
            tp_replica((3,), 1, 2),
        ),
        recompute=Recompute(mode="full"),
    ),
    "3 unequal\\|1": plan_of(
        (tp_replica((0, 1, 2), 2, 8, tp_shards=OF_THREE),),
        (tp_replica((3,), 2, 8),),
        recompute=Recompute(mode="full"),
    ),
}
CASES = {**dict.fromkeys(PLANS, CLUSTER), **dict.fromkeys(ON_MIXED_NODE, MIXED_NODE)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan."""

    name: str
    sequence_parallel: bool
    run: EmulatedRun
    simulated_s: float
    simulated_bytes: tuple[int, ...]
    """Rank -> peak, without messages, which emulated GPUs do not count."""

    @property
    def time_error(self) -> float:
        """Of the simulator, relative."""
        return self.simulated_s / self.run.iteration_s - 1

    @property
    def memory_error(self) -> float:
        """The largest of all ranks, relative."""
        pairs = zip(self.simulated_bytes, self.run.peak_bytes, strict=True)
        return max((said / found - 1 for said, found in pairs), key=abs)

    def __str__(self) -> str:
        peaks = ", ".join(f"{peak / 2**30:.2f}" for peak in self.run.peak_bytes)
        return (
            f"| {self.name} | {'yes' if self.sequence_parallel else 'no'} | "
            f"{self.run.iteration_s:.4f} s | {100 * self.time_error:+.2f} % | {peaks} | "
            f"{100 * self.memory_error:+.2f} % |"
        )


def inputs_on(directory: Path, cluster: str, *, sequence_parallel: bool) -> Inputs:
    """Costs on a cluster."""
    path = directory / "cluster.yaml"
    path.write_text(cluster)
    return make_inputs(
        load_cluster(path),
        MODEL,
        None,
        global_batch_size=SAMPLES,
        dtype="float16",
        computing=Computing(sequence_parallel=sequence_parallel),
    )


def row_of(emulated: Emulator, inputs: Inputs, name: str, plan: Plan, *, splits: bool) -> Row:
    """Emulate and simulate a plan; `splits`: with sequence parallelism."""
    shape = TinyShape.of(MODEL, [plan])
    emulated.inputs = inputs
    emulated.training = replace(emulated.training, shape=shape, sequence_parallel=splits)
    run = emulated.run(System(name=name, gpus=tuple(range(plan.world_size)), plan=plan))
    if run.out_of_memory is not None:
        raise SystemExit(f"{name}: {run.out_of_memory}")
    # As many GPUs as the plan has ranks.
    on_ranks = replace(inputs, kinds=inputs.kinds[: plan.world_size])
    predicted = simulate_plan(on_ranks, plan)
    return Row(
        name=name,
        sequence_parallel=splits,
        run=run,
        simulated_s=predicted.iteration_s,
        simulated_bytes=peaks_without(predicted, Category.BUFFERS, Category.FIXED),
    )


def rows(only: str) -> Iterator[Row]:
    """All of them, or those whose names have `only` in them."""
    training = TinyTraining(model=MODEL, global_batch_size=SAMPLES, iterations=3)
    with tempfile.TemporaryDirectory() as scratch:
        first = inputs_on(Path(scratch), CLUSTER, sequence_parallel=False)
        with emulator(first, training) as emulated:
            for name, plan in (PLANS | ON_MIXED_NODE).items():
                if only not in name:
                    continue
                for splits in (False, True):
                    if splits and not _divides(plan):
                        continue
                    inputs = inputs_on(Path(scratch), CASES[name], sequence_parallel=splits)
                    yield row_of(emulated, inputs, name, plan, splits=splits)


def _divides(plan: Plan) -> bool:
    """Whether all TP groups divide a sequence."""
    sets = (replica for group in plan.groups for replica in group.replicas)
    return all(MODEL.seq_length % len(replica.ranks) == 0 for replica in sets)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="Plans with this in their name.")
    args = parser.parse_args()
    print(
        "| Sets | Sequence parallel | Iteration, emulated on CPU | Simulator | "
        "Peak of ranks, GiB, emulated | Simulator |"
    )
    print("|---|---|---|---|---|---|")
    errors = []
    for row in rows(args.only):
        print(row, flush=True)
        errors.append(abs(row.time_error))
    median, worst = statistics.median(errors), max(errors)
    print(f"\nmedian {100 * median:.2f} %, worst {100 * worst:.2f} %")
    sys.exit(median > MEDIAN or worst > WORST)


if __name__ == "__main__":
    main()
