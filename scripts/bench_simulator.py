"""How long it takes to simulate one iteration of plans for 8, 128 and 1,024 ranks.

    python scripts/bench_simulator.py --json

Each plan has equal stages of equal replicas, 8 GPUs to a node that share a NIC, once with NICs
that carry everything at full speed and once with NICs that eight transfers at once overload. The
time to lower the plan is given apart. `merged`: one of several equal ranks is simulated (time with
lowering).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from zorse_megatron.costs.interface import JobCosts, ModelSection, PassTimes, RecomputeMode
from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.iteration import simulate

SHAPES = {8: (4, 2), 128: (8, 16), 1024: (16, 64)}
"""Ranks -> (stages, replicas in each)."""
NUM_MICRO_BATCHES = 32
LAYERS_PER_STAGE = 2
GPUS_PER_NODE = 8
WIDE_NIC_BYTES_PER_S = 400e9
NARROW_NIC_BYTES_PER_S = 25e9


class BenchCosts:
    """Round numbers of the size that a layer of a 7B model has on an A100."""

    def __init__(self, nic_bytes_per_s: float) -> None:
        self.nic_bytes_per_s = nic_bytes_per_s

    # Computation.

    def layer(self, kind: str, micro_batch_size: int) -> PassTimes:
        return PassTimes(forward_s=10e-3 * micro_batch_size, backward_s=20e-3 * micro_batch_size)

    def embedding(self, kind: str, micro_batch_size: int) -> PassTimes:
        return PassTimes(forward_s=1e-3, backward_s=1e-3)

    def head(self, kind: str, micro_batch_size: int) -> PassTimes:
        return PassTimes(forward_s=5e-3, backward_s=10e-3)

    def recompute_s(self, kind: str, micro_batch_size: int, mode: RecomputeMode) -> float:
        return 10e-3 * micro_batch_size

    def weight_gradients_s(self, kind: str, micro_batch_size: int) -> float:
        return 8e-3 * micro_batch_size

    def step_s(self, kind: str, num_parameters: int) -> float:
        return 1e-11 * num_parameters

    # Memory.

    def layer_parameters(self) -> int:
        return 202_383_360

    def embedding_parameters(self) -> int:
        return 131_072_000

    def head_parameters(self, *, tied_on_same_rank: bool) -> int:
        return 0 if tied_on_same_rank else 131_076_096

    def frozen_parameters(self, section: ModelSection, *, tied_on_same_rank: bool = False) -> int:
        return 0

    def parameter_bytes(self, num_parameters: int) -> int:
        return 2 * num_parameters

    def gradient_bytes(self, num_parameters: int) -> int:
        return 4 * num_parameters

    def state_bytes(self, num_parameters: int) -> int:
        return 12 * num_parameters

    def activation_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> int:
        return micro_batch_size * (33_554_432 if mode == "full" else 570_425_344)

    def saved_tensor_bytes(
        self, micro_batch_size: int, mode: RecomputeMode, kind: str | None = None
    ) -> tuple[int, ...]:
        return (self.activation_bytes(micro_batch_size, mode, kind),)

    def delayed_bytes(self, micro_batch_size: int) -> int:
        return micro_batch_size * 400_000_000

    def arriving_bytes(self, micro_batch_size: int) -> int:
        """As sent: these layers have no experts."""
        return self.boundary_bytes(micro_batch_size)

    def boundary_bytes(self, micro_batch_size: int) -> int:
        return micro_batch_size * 33_554_432

    def head_bytes(self, micro_batch_size: int) -> int:
        return micro_batch_size * 786_432_000

    # Communication.

    def transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        return 20e-6 + num_bytes / 25e9

    def shared_links(self, source: int, target: int) -> tuple[tuple[str, float], ...]:
        here, there = source // GPUS_PER_NODE, target // GPUS_PER_NODE
        if here == there:
            return ()
        return ((f"{here}>", self.nic_bytes_per_s), (f"{there}<", self.nic_bytes_per_s))

    def reduce_scatter_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        return 50e-6 * len(ranks) + sum(shard_bytes) * (1 - 1 / len(ranks)) / 25e9

    def all_gather_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        return self.reduce_scatter_s(ranks, shard_bytes)

    def exchange_s(self, ranks: tuple[int, ...], shard_bytes: tuple[int, ...]) -> float:
        return self.reduce_scatter_s(ranks, shard_bytes)

    def all_reduce_s(self, ranks: tuple[int, ...], num_bytes: int) -> float:
        return 100e-6

    def host_link_bytes_per_s(self, rank: int) -> float:
        return 16e9


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan, the fastest of all repetitions."""

    ranks: int
    links: str
    actions: int
    lower_s: float
    simulate_s: float
    merged_s: float
    merged_ranks: int
    iteration_s: float


def bench_plan(num_ranks: int) -> Plan:
    """Equal stages of equal replicas."""
    stages, replicas = SHAPES[num_ranks]
    return Plan(
        schema_version=2,
        global_batch_size=replicas * NUM_MICRO_BATCHES,
        model=ModelFingerprint(num_layers=LAYERS_PER_STAGE * stages),
        groups=tuple(
            Group(
                replicas=tuple(
                    Replica(
                        ranks=(stage * replicas + index,),
                        micro_batch_size=1,
                        num_microbatches=NUM_MICRO_BATCHES,
                        shard_weight=1.0,
                    )
                    for index in range(replicas)
                )
            )
            for stage in range(stages)
        ),
        chunks=tuple(
            Chunk(group=s, layers=(s * LAYERS_PER_STAGE, (s + 1) * LAYERS_PER_STAGE))
            for s in range(stages)
        ),
        schedule=Schedule(name="1f1b"),
    )


def fastest(repeat: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of the fastest run, and what the last one returned."""
    times, found = [], None
    for _ in range(repeat):
        start_s = time.perf_counter()
        found = work()
        times.append(time.perf_counter() - start_s)
    return min(times), found


def measure(num_ranks: int, links: str, repeat: int) -> Row:
    """Time one plan."""
    plan = bench_plan(num_ranks)
    costs = BenchCosts(WIDE_NIC_BYTES_PER_S if links == "wide" else NARROW_NIC_BYTES_PER_S)
    kinds = ["A100"] * num_ranks
    job = JobCosts(compute=costs, memory=costs, comm=costs, kinds=kinds, sequence_length=4096)

    def run(**options: Any) -> Any:
        return simulate(plan, job, **options)

    lower_s, lists = fastest(repeat, lambda: lower_plan(plan))
    simulate_s, whole = fastest(repeat, lambda: run(lists=lists))
    merged_s, merged = fastest(repeat, lambda: run(merge_equal_ranks=True))
    if abs(merged.iteration_s - whole.iteration_s) > 1e-9 * whole.iteration_s:
        raise AssertionError(f"merged: {merged.iteration_s} s, whole: {whole.iteration_s} s")
    return Row(
        ranks=num_ranks,
        links=links,
        actions=sum(map(len, lists.ranks)),
        lower_s=lower_s,
        simulate_s=simulate_s,
        merged_s=merged_s,
        merged_ranks=len(merged.simulated_ranks),
        iteration_s=whole.iteration_s,
    )


def main() -> int:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the fastest counts")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error("expected --repeat of at least 1")
    rows = [measure(n, links, options.repeat) for n in SHAPES for links in ("wide", "narrow")]
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
        return 0
    print("ranks  links   actions  lower_s  simulate_s  merged_s")
    for row in rows:
        print(
            f"{row.ranks:5}  {row.links:6}  {row.actions:7}  {row.lower_s:7.3f}  "
            f"{row.simulate_s:10.3f}  {row.merged_s:8.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
