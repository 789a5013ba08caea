"""Some nodes of the cluster, and the best plan for them."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.cli.workload import workload_of
from zorse_megatron.costs.own_speeds import GpuSpeed, with_own_speeds
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import load_cluster, nodes_without, with_gpus
from zorse_megatron.inputs.profile import Profile, load_profile
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, make_inputs
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.simulate.assumptions import Perturbation

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROFILE = EXAMPLES / "mini-profile.json"
FLAGS = (
    *("--num-layers", "26", "--hidden-size", "3200", "--ffn-hidden-size", "8640"),
    *("--num-attention-heads", "32", "--seq-length", "1024", "--max-position-embeddings", "2048"),
    *("--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--vocab-size", "32000"),
    *("--tokenizer-type", "NullTokenizer", "--micro-batch-size", "1", "--global-batch-size", "128"),
    *("--train-iters", "300", "--lr", "1e-3", "--fp16"),
)
"""Of llama-3b."""
WORKLOAD = workload_of(model=None, flags=FLAGS)
SAMPLES = 128


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Nodes, and what is known of them."""

    cluster: Cluster
    inputs: Inputs
    plan: Plan
    planned_in_s: float

    @classmethod
    def without(cls, names: Collection[str]) -> "Machines":
        """All nodes of mini-b but these."""
        path = EXAMPLES / "mini-b.yaml"
        whole = load_cluster(path)
        cluster = with_gpus(whole, nodes_without(whole, names, source=str(path)))
        inputs = _inputs(cluster, load_profile(PROFILE))
        found = find_plan(inputs)
        return cls(cluster=cluster, inputs=inputs, plan=found.plan, planned_in_s=found.plan_time_s)

    def best_plan(self, slow_ranks: dict[int, float]) -> Plan:
        """The plan of somebody who knows how slow these ranks are."""
        speeds = [
            GpuSpeed(factor=slow_ranks.get(rank, 1.0), noise=0.0)
            for rank in range(self.plan.world_size)
        ]
        slower = with_own_speeds(self.cluster, load_profile(PROFILE), speeds, origin="known")
        return find_plan(_inputs(slower.cluster, slower.profile)).plan

    def iteration_s(self, plan: Plan, slow_ranks: dict[int, float]) -> float:
        """Simulated, with the counts of the plan."""
        perturbation = Perturbation(rank_factors=slow_ranks)
        return simulate_plan(self.inputs, plan, perturbation=perturbation).iteration_s


def _inputs(cluster: Cluster, profile: Profile | None) -> Inputs:
    return make_inputs(
        cluster,
        WORKLOAD.model,
        profile,
        global_batch_size=SAMPLES,
        dtype="float16",
        computing=WORKLOAD.computing,
    )
