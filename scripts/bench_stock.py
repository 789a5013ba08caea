"""Stock Megatron in its best even layout, in its best layout of all, and ours, on 24 clusters.

    python -m scripts.bench_stock --out DIR [--only NAME ...] [--emulate [NAME ...]] [--write-docs]
    python -m scripts.bench_stock --out DIR --free-state

The clusters are those of `bench_stock_clusters.yaml`. Each is planned as `zorse plan` does it, GPUs
that slow others left out, and all is simulated. A cluster's results are in DIR as soon as there are
any; those whose cluster, profile and planner are the same are not computed again. `--emulate`:
train stock's best layout and our plan on CPUs, where the file says so or a NAME does.
`--write-docs`: the tables of docs/performance.md, and docs/images/bench-stock.png and .json.

`--free-state`: how much is left of the published gains if the optimizer's state took no memory of
stock, and no time to bring: more than `--optimizer-cpu-offload` can do, which is not searched.

Ends with status 1 where our plan is slower than the best layout of stock.
"""

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from scripts.bench_stock_tables import Row, draw, gain, tables, with_tables
from scripts.validation.peaks import peaks_without
from scripts.where_time_goes import ideal_s, lost_s
from zorse_megatron.cli.gpu_selection import Found, GpuSearches
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import WorkloadCosts, costs_of_workload
from zorse_megatron.costs.model_memory import TransformerMemory
from zorse_megatron.emulate.emulator import flags_of_grid
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import dump_plan, parse_plan
from zorse_megatron.planner.baselines.lower_bounds import link_bound
from zorse_megatron.planner.baselines.stock_best import Stock, stock_at_best
from zorse_megatron.planner.baselines.stock_search import framework_of
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace
from zorse_megatron.planner.outcome import describe_plan
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.simulate.assumptions import RUNTIME, Framework
from zorse_megatron.simulate.memory_ledger import Category

ROOT = Path(__file__).resolve().parents[1]
CLUSTERS = Path(__file__).with_name("bench_stock_clusters.yaml")
PUBLISHED = ROOT / "docs" / "images" / "bench-stock.json"
DOCUMENT = ROOT / "docs" / "performance.md"
# Whoever changes these may change the results.
_PLANNER = ("cli/gpu_selection.py", "costs", "inputs", "plan", "planner", "schedule", "simulate")
_ITERATIONS = 4
_MOST_EMULATED = 32  # ranks, each a process


@dataclass(frozen=True, kw_only=True)
class Case:
    """A cluster, and what it trains; as the file has it."""

    name: str
    what: str
    """For people."""
    train: dict[str, Any]
    """Options of `zorse plan`."""
    cluster: str | None = None
    nodes: list[Any] | None = None
    between_regions: list[Any] | None = None
    profile: str | None = None
    emulated: bool = False

    @property
    def cluster_file(self) -> bytes:
        """The cluster file."""
        if self.cluster is not None:
            return (ROOT / self.cluster).read_bytes()
        keys = {"name": self.name, "nodes": self.nodes, "between_regions": self.between_regions}
        return yaml.safe_dump({key: value for key, value in keys.items() if value}).encode()

    @property
    def digest(self) -> str:
        """Of all that the result depends on."""
        profile = (ROOT / self.profile).read_bytes() if self.profile else b""
        parts = (self.cluster_file, json.dumps(self.train).encode(), profile, _digest_of_planner())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()

    def costs(self) -> tuple[WorkloadCosts, Callable[..., WorkloadCosts]]:
        """On the whole cluster, and on any; as in `zorse plan`."""
        workload = workload_of(flags=None, **self.train)
        costs_of = partial(
            costs_of_workload,
            workload=workload,
            profiles=[ROOT / self.profile] if self.profile else [],
            global_batch_size=self.train["global_batch_size"],
            space=SearchSpace(),
        )
        return costs_of(parse_cluster(self.cluster_file)), costs_of


def cases() -> list[Case]:
    """All of them, in the order of the file."""
    return [Case(**entry) for entry in yaml.safe_load(CLUSTERS.read_text(encoding="utf-8"))]


def main() -> int:
    """Run what the arguments ask for."""
    arguments = _arguments()
    if arguments.free_state:
        _print_with_free_state()
        return 0
    rows = list(_rows(arguments))
    print(tables(rows))
    summary = arguments.out / PUBLISHED.name
    told = [{key: value for key, value in row.items() if key != "digest"} for row in rows]
    summary.write_text(json.dumps(told) + "\n", encoding="utf-8")
    draw(summary.with_suffix(".png"), rows)
    if arguments.write_docs:
        for made in (summary, summary.with_suffix(".png")):
            (PUBLISHED.parent / made.name).write_bytes(made.read_bytes())
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(with_tables(text, rows), encoding="utf-8")
    slower = [f"{row['name']}: {gain(row):.4f}" for row in rows if (gain(row) or 1.0) < 1.0]
    if slower:
        print(f"slower than stock's best layout: {', '.join(slower)}", file=sys.stderr)
    return 1 if slower else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [case.name for case in cases()]
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--emulate", nargs="*", choices=names, metavar="NAME")
    parser.add_argument("--write-docs", action="store_true")
    parser.add_argument("--free-state", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def _print_with_free_state() -> None:
    """Of stock's layouts alone: ours are as published."""
    setattr(TransformerMemory, "state_bytes", lambda _self, _number: 0)  # noqa: B010
    published = {row["name"]: row for row in json.loads(PUBLISHED.read_text(encoding="utf-8"))}
    gains = []
    for case in cases():
        row, layout = published[case.name], stock_at_best(case.costs()[0].inputs).best.fitting
        assert layout is not None, "what fits with its state fits without"
        gains.append(
            min(layout.iteration_s, row["best"]["iteration_s"]) / row["ours"]["iteration_s"]
        )
        print(f"{case.name}: {gains[-1]:.3f}, {layout.description}", flush=True)
    print(f"median {median(gains):.3f}, {min(gains):.3f} to {max(gains):.3f}")


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    wanted = [case for case in cases() if case.name in (arguments.only or [case.name])]
    for case in wanted:
        path = arguments.out / f"{case.name}.json"
        row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if row.get("digest") != case.digest:
            row = measured(case, arguments.out)
        named = case.emulated if arguments.emulate == [] else case.name in (arguments.emulate or ())
        if named and "emulated" not in row:
            row["emulated"] = emulated(case, row, arguments.out)
        path.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
        print(f"{case.name}: done", file=sys.stderr, flush=True)
        yield row


def measured(case: Case, directory: Path) -> Row:
    """Plan and simulate one case; the plans are written into the directory."""
    costs, costs_of = case.costs()
    whole = costs.inputs
    started_s = _cpu_s()
    ours = GpuSearches(
        costs=costs,
        costs_of=costs_of,
        strategy="zorse",
        on_progress=None,
        may_leave_out=True,
        with_stock=True,
    ).find()
    planning_s = _cpu_s() - started_s
    stock = stock_at_best(whole)
    bound = link_bound(whole)
    row: Row = {
        **{"name": case.name, "what": case.what, "train": case.train, "digest": case.digest},
        **{"gpus": whole.world_size, "planning_cpu_s": round(planning_s, 1)},
        "bound_s": ours.outcome.bound_s,
        **{"link_bound_s": bound.bound_s, "link": bound.link, "ideal_s": ideal_s(whole)},
        "even": _of_stock(whole, stock.even),
        "best": _of_stock(whole, stock.best),
        "ours": _of_ours(whole, ours),
    }
    (directory / f"{case.name}.plan.json").write_text(dump_plan(ours.outcome.plan))
    if (layout := stock.best.fitting) is not None:
        same = simulate_plan(layout.inputs, layout.plan, merge_equal_ranks=True)
        row["best_on_our_runtime_s"] = same.iteration_s
        (directory / f"{case.name}.stock.json").write_text(dump_plan(layout.plan))
    return row


def _of_stock(whole: Inputs, stock: Stock) -> Row:
    layout = stock.fitting
    if layout is None:
        return {"iteration_s": None, "layout": stock.reason}
    return {
        "iteration_s": layout.iteration_s,
        "layout": layout.description,
        "ranks": layout.ranks,
        "flags": flags_of_grid(layout.inputs, layout.grid),
        **_looked_at(whole, layout.inputs, layout.plan, framework_of(layout.grid)),
    }


def _of_ours(whole: Inputs, found: Found) -> Row:
    inputs, plan = found.costs.inputs, found.outcome.plan
    said = describe_plan(plan, inputs.kinds)
    kinds = Counter(inputs.kinds)
    gpus = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    return {
        "iteration_s": found.outcome.iteration_s,
        "layout": f"{gpus}: {said}",
        "ranks": found.ranks,
        **_looked_at(whole, inputs, plan, RUNTIME),
    }


def _looked_at(whole: Inputs, inputs: Inputs, plan: Plan, framework: Framework) -> Row:
    few = plan.world_size <= _MOST_EMULATED
    result = simulate_plan(inputs, plan, framework=framework, merge_equal_ranks=not few)
    peaks = zip(result.peak_memory_bytes, inputs.capacities_bytes, strict=True)
    return {
        "lost_s": lost_s(whole, inputs, plan, result),
        "fullest": max(peak / capacity for peak, capacity in peaks),
        # Emulated GPUs count neither messages nor what a process takes.
        "tensor_bytes": peaks_without(result, Category.BUFFERS, Category.FIXED) if few else None,
    }


def _cpu_s() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@cache
def _digest_of_planner() -> bytes:
    package = ROOT / "zorse_megatron"
    found = [path for name in _PLANNER for path in _sources(package / name)]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in found)).digest()


def _sources(path: Path) -> list[Path]:
    wanted = (".py", ".yaml")
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in wanted)


def emulated(case: Case, row: Row, directory: Path) -> Row:
    """Train stock's best layout and our plan; how far the simulator was off."""
    # Only here: all else needs neither torch nor Megatron.
    from zorse_megatron.emulate.emulator import EmulatedRun, System, emulator
    from zorse_megatron.emulate.tiny_model import TinyShape, TinyTraining

    costs, _ = case.costs()
    model, plans = costs.workload.model, dict(_plans(case, row, directory))
    training = TinyTraining(
        model=model,
        global_batch_size=case.train["global_batch_size"],
        iterations=_ITERATIONS,
        shape=TinyShape.of(model, plans.values()),
    )

    def run(system: str, plan: Plan) -> EmulatedRun:
        found = row[system]
        gpus, flags = tuple(found["ranks"]), tuple(found.get("flags", ()))
        layout = {"plan" if system == "ours" else "stock_layout": plan}
        return emulator_.run(System(name=system, gpus=gpus, flags=flags, **layout))

    with emulator(costs.inputs, training) as emulator_:
        runs = {system: run(system, plan) for system, plan in plans.items()}
    return {system: _errors(row[system], run) for system, run in runs.items()}


def _plans(case: Case, row: Row, directory: Path) -> Iterator[tuple[str, Plan]]:
    for system, name in (("best", "stock"), ("ours", "plan")):
        if row[system]["iteration_s"] is not None:
            path = directory / f"{case.name}.{name}.json"
            yield system, parse_plan(path.read_bytes(), source=str(path))


def _errors(simulated: Row, run: Any) -> Row:
    if run.out_of_memory is not None:
        return {"iteration_s": None, "out_of_memory": run.out_of_memory}
    pairs = zip(simulated["tensor_bytes"], run.peak_bytes, strict=True)
    return {
        "iteration_s": run.iteration_s,
        "time_error": simulated["iteration_s"] / run.iteration_s - 1,
        "memory_error": max((said / found - 1 for said, found in pairs), key=abs),
    }


if __name__ == "__main__":
    raise SystemExit(main())
