"""Plan the clusters of the Zorse paper with all strategies, and clusters that grow.

    python -m scripts.bench_planner --measured DIR --json OUT [--tokens 4194304]
    python -m scripts.bench_planner --growth [--gpus 128 1024 10000]

DIR holds `layer_latency.csv` (times of one layer by model, GPU, sequence length, dtype and
micro-batch size). One row for each cluster, model and strategy: the simulated iteration, tokens per
second, the bound that no plan beats, the work of all layers with each recomputed at the best
measured rates, memory and planning time. The growth table times the search on made-up clusters.
"""

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.import_profile import import_tables
from zorse_megatron.inputs.cluster import Cluster
from zorse_megatron.inputs.cluster_yaml import load_cluster, parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.inputs.profile import Profile
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.baselines.lower_bounds import (
    best_layers_per_s,
    link_bound,
    lower_bound_s,
)
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, make_inputs
from zorse_megatron.planner.outcome import STRATEGIES, NoPlanError

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
TOKENS_PER_STEP = 2**20
# Cluster -> sequence length, models.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "a": (4096, ("llama-7b", "llama-13b", "llama-33b", "llama-65b")),
    "b": (1024, ("llama-7b", "llama-13b", "llama-33b")),
    "c": (512, ("llama-3b", "llama-7b", "llama-13b", "llama-33b")),
}
# Of every 16 nodes with 8 GPUs: kind, link inside, NICs.
GROWTH_NODES = (
    (2, "A100-40", "NVSwitch 220 GB/s", "400 Gb/s"),
    (4, "A10G", "PCIe 10 GB/s", "40 Gb/s"),
    (4, "V100-16", "NVLink 40 GB/s", "25 Gb/s"),
    (6, "T4", "PCIe 6 GB/s", "50 Gb/s"),
)


def main() -> int:
    """Run what the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measured", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--cases", nargs="+", metavar="CLUSTER-MODEL", help="for example b-7b")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--tokens", type=int, default=TOKENS_PER_STEP, help="per iteration")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--gpus", type=int, nargs="+", default=[128, 256, 512, 1024, 10000])
    arguments = parser.parse_args()
    if arguments.growth:
        rows = [growth_row(count, arguments.measured) for count in arguments.gpus]
        _print_growth(rows)
    elif arguments.measured:
        rows = list(_rows(arguments))
        _print_table(rows)
        _print_ratios(rows)
    else:
        parser.error("give --measured DIR or --growth")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def _rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for cluster, model in cases(arguments.cases):
        inputs = paper_inputs(arguments.measured, cluster, model, arguments.tokens)
        for strategy in arguments.strategies:
            row = bench_row(inputs, cluster, model, strategy)
            _print_row(row)
            yield row


def cases(wanted: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """(cluster, model) of all cases, or of those called like b-7b."""
    found = [(cluster, model) for cluster, (_, models) in CASES.items() for model in models]
    if wanted is None:
        return found
    return [case for case in found if f"{case[0]}-{case[1].removeprefix('llama-')}" in wanted]


def profile_from(measured: Path) -> Profile:
    """The measured layer times."""
    name = "layer_latency.csv"
    return import_tables({name: (measured / name).read_bytes()}).profile


def paper_inputs(measured: Path, cluster: str, model: str, tokens: int = TOKENS_PER_STEP) -> Inputs:
    """A cluster of the paper with a model, fp16; a million tokens per step if nothing is said."""
    seq_length, _ = CASES[cluster]
    return make_inputs(
        load_cluster(EXAMPLES / f"zorse-paper-cluster-{cluster}.yaml"),
        dataclasses.replace(MODELS[model], seq_length=seq_length),
        profile_from(measured),
        global_batch_size=tokens // seq_length,
        dtype="float16",
    )


def bench_row(inputs: Inputs, cluster: str, model: str, strategy: str) -> dict[str, Any]:
    """One strategy on one case."""
    row: dict[str, Any] = {"cluster": cluster, "model": model, "strategy": strategy}
    bounds = {
        "bound_s": lower_bound_s(inputs),
        "link_bound_s": link_bound(inputs).bound_s,
        "recomputed_work_s": recomputed_work_s(inputs),
    }
    started_s = time.perf_counter()
    try:
        outcome = find_plan(inputs, strategy=strategy)  # type: ignore[arg-type]
    except NoPlanError:
        names = ("iteration_s", "tokens_per_s", "efficiency", "peak_memory_fraction")
        return row | {
            "feasible": False,
            **dict.fromkeys(names),
            **bounds,
            "plan_time_s": time.perf_counter() - started_s,
            "num_groups": None,
            "recompute": None,
        }
    return row | {
        "feasible": True,
        "iteration_s": outcome.iteration_s,
        "tokens_per_s": outcome.tokens_per_s,
        **bounds,
        "efficiency": outcome.efficiency,
        "peak_memory_fraction": outcome.peak_memory_fraction,
        "plan_time_s": outcome.plan_time_s,
        "num_groups": len(outcome.plan.groups),
        "recompute": recompute_words(outcome.plan),
    }


def recomputed_work_s(inputs: Inputs) -> float:
    """All layers of all samples, each recomputed, shared out among the GPUs without rest."""
    rate = sum(best_layers_per_s(inputs, kind) for kind in inputs.kinds)
    return inputs.global_batch_size * inputs.num_layers / rate


def recompute_words(plan: Plan) -> str:
    """How many of the model's layers are recomputed, and how."""
    layers = {"none": 0, "selective": 0, "full": 0}
    for chunk in plan.chunks:
        count = chunk.layers[1] - chunk.layers[0]
        setting = plan.groups[chunk.group].recompute
        again = 0 if setting is None else min(count, setting.num_layers or count)
        layers["none"] += count - again
        layers["full" if setting is None else setting.mode] += again
    return ", ".join(f"{mode} {count}" for mode, count in layers.items() if count)


def growth_row(num_gpus: int, measured: Path | None) -> dict[str, Any]:
    """Time a full search on about this many GPUs, with as many samples as keep them busy."""
    cluster = growth_cluster(num_gpus)
    inputs = make_inputs(
        cluster,
        dataclasses.replace(MODELS["llama-13b"], seq_length=1024),
        profile_from(measured) if measured else None,
        global_batch_size=8 * cluster.world_size,
        dtype="float16",
    )
    outcome = find_plan(inputs)
    row = {
        "gpus": cluster.world_size,
        "plan_time_s": outcome.plan_time_s,
        "groupings": outcome.considered.groupings,
        "estimated": outcome.considered.estimated,
        "simulated": outcome.considered.simulated,
        "efficiency": outcome.efficiency,
        "num_groups": len(outcome.plan.groups),
        "extrapolated": outcome.extrapolated,
    }
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def growth_cluster(num_gpus: int) -> Cluster:
    """Nodes of 8 GPUs of four kinds."""
    num_nodes = max(4, num_gpus // 8)
    share = num_nodes / sum(weight for weight, *_ in GROWTH_NODES)
    lines, left = ["nodes:"], num_nodes
    for index, (weight, kind, link, nics) in enumerate(GROWTH_NODES):
        count = left if index == len(GROWTH_NODES) - 1 else max(1, round(weight * share))
        left -= count
        text = f"name: n{index}, count: {count}, gpus: 8 x {kind}, link: {link}, nics: {nics}"
        lines.append(f"  - {{{text}}}")
    return parse_cluster("\n".join(lines).encode())


def _print_row(row: dict[str, Any]) -> None:
    said = f"{row['cluster']} {row['model']:10} {row['strategy']:12}"
    if row["feasible"]:
        said += f" {row['iteration_s']:8.2f} s = "
        said += f"{row['iteration_s'] / row['recomputed_work_s']:.3f} x recomputed work"
        said += f"  memory {row['peak_memory_fraction']:.2f}  {row['num_groups']} groups"
        said += f"  recompute {row['recompute']}"
    else:
        said += " no plan"
    print(f"{said}  planned in {row['plan_time_s']:.1f} s", flush=True)


def _print_growth(rows: Sequence[dict[str, Any]]) -> None:
    """The table of docs/planner.md, "How long it takes"."""
    for row in rows:
        counts = " | ".join(str(row[name]) for name in ("groupings", "estimated", "simulated"))
        print(f"| {row['gpus']:,} | {row['plan_time_s']:.1f} | {counts} |")


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The table of docs/planner.md, "How good it is", and how long our plans took to find."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["cluster"], row["model"]), {})[row["strategy"]] = row
    for (cluster, model), by_strategy in found.items():
        ours = by_strategy.get("zorse")
        if ours is None or not ours["feasible"]:
            continue
        others = (
            f"{row['iteration_s']:.1f}" if row and row["feasible"] else "\u2013"
            for row in map(by_strategy.get, ("stock", "zorse-paper", "cephalo"))
        )
        print(
            f"| {cluster.upper()} | {model.removeprefix('llama-').upper()} | "
            f"{ours['bound_s']:.1f} | {ours['link_bound_s']:.1f} | "
            f"{ours['recomputed_work_s']:.1f} | "
            f"**{ours['iteration_s']:.1f}** | "
            f"{ours['iteration_s'] / ours['recomputed_work_s']:.3f} | {' | '.join(others)} |"
        )
    for cluster in CASES:
        times_s = [
            row["plan_time_s"]
            for row in rows
            if (row["cluster"], row["strategy"]) == (cluster, "zorse")
        ]
        if times_s:
            print(f"{cluster}: planned in {min(times_s):.0f} to {max(times_s):.0f} s")


def _print_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """Geometric means of our tokens per second over those of each baseline."""
    rate = {
        (row["cluster"], row["model"], row["strategy"]): row["tokens_per_s"]
        for row in rows
        if row["feasible"]
    }
    for other in STRATEGIES[1:]:
        for clusters in (*CASES, "".join(CASES)):
            ratios = [
                rate[cluster, model, "zorse"] / theirs
                for (cluster, model, strategy), theirs in rate.items()
                if strategy == other and cluster in clusters and (cluster, model, "zorse") in rate
            ]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                print(f"zorse / {other} on {clusters}: {mean:.3f} (of {len(ratios)} cases)")


if __name__ == "__main__":
    sys.exit(main())
