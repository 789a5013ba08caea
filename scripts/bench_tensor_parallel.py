"""Tables of docs/planner.md: plans with and without tensor-parallel groups.

    python -m scripts.bench_tensor_parallel [--emulate] [--measured DIR] [--json OUT]

Two A100 and two T4 in one machine train GPT-3 1B (the case of Baton, FAST 2025): stock Megatron's
best even layout and its best of all, the best plan with equal parts in TP groups, and the best of
all. Then a model of which no GPU holds a layer. With --measured, the clusters of the Zorse paper,
with TP groups and without. All times are simulated; with --emulate, those of Baton's case are
emulated too.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench_planner import cases, paper_inputs, recomputed_work_s
from zorse_megatron.emulate.emulator import System, emulator, flags_of_grid
from zorse_megatron.emulate.tiny_model import TinyShape, TinyTraining
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.planner.baselines.lower_bounds import lower_bound_s
from zorse_megatron.planner.baselines.stock_best import stock_at_best
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, SearchSpace, make_inputs, on_ranks
from zorse_megatron.planner.outcome import NoPlanError, Outcome, describe_plan

BATON = b"nodes: [{gpus: [2 x A100-40, 2 x T4], link: PCIe 12 GB/s, host_memory: 256GiB}]"
LARGE_LAYERS = b"nodes: [{gpus: 4 x T4, link: PCIe 12 GB/s, host_memory: 256GiB}]"
MODEL = dataclasses.replace(MODELS["gpt-1.3b"], seq_length=1024)
GIB = 2**30
BATCH = 64
FASTEST = (0, 1)
"""The A100s."""


def main() -> int:
    """Make the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--emulate", action="store_true", help="Emulate Baton's case too.")
    parser.add_argument("--measured", type=Path, metavar="DIR")
    parser.add_argument("--cases", nargs="+", metavar="CLUSTER-MODEL", help="for example b-33b")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    rows: dict[str, Any] = {
        "baton": list(baton_rows(emulate=arguments.emulate)),
        "large layers": list(large_layer_rows()),
    }
    if arguments.measured:
        rows["paper"] = list(paper_rows(arguments.measured, arguments.cases))
    for title, table in rows.items():
        print(title)
        for row in table:
            print("  ", json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def baton_rows(*, emulate: bool) -> Iterator[dict[str, Any]]:
    """Two A100 and two T4; each takes the GPUs that it is fastest on."""
    for batch in (BATCH, 4):
        inputs = _inputs(BATON, batch=batch)
        yield {"batch": batch, "what": "bound", "iteration_s": round(lower_bound_s(inputs), 4)}
        rows, systems = [], []
        stock = stock_at_best(inputs)
        for what, each in (("best even layout", stock.even), ("best layout", stock.best)):
            layout = each.fitting
            assert layout is not None
            told = f"stock, {what}: {layout.description}"
            rows.append({"what": told, "iteration_s": round(layout.iteration_s, 4)})
            flags = flags_of_grid(layout.inputs, layout.grid)
            systems.append(
                System(name=what, gpus=layout.ranks, flags=flags, stock_layout=layout.plan)
            )
        for what, space in (
            ("no TP groups", SearchSpace(max_tensor_parallel=1)),
            ("equal parts", SearchSpace(uneven_tp_shards=False)),
            ("any TP groups", SearchSpace()),
        ):
            found = {
                ranks: find_plan(on_ranks(dataclasses.replace(inputs, space=space), ranks))
                for ranks in (tuple(range(inputs.world_size)), FASTEST)
            }
            ranks, outcome = min(found.items(), key=lambda each: each[1].iteration_s)
            rows.append(_told(what, on_ranks(inputs, ranks), outcome))
            systems.append(System(name=what, gpus=ranks, plan=outcome.plan))
        emulated = _emulated(inputs, systems) if emulate else [{}] * len(rows)
        for row, more in zip(rows, emulated, strict=True):
            yield {"batch": batch, **row, **more}


def _emulated(inputs: Inputs, systems: list[System]) -> list[dict[str, Any]]:
    rows = []
    training = TinyTraining(model=MODEL, global_batch_size=inputs.global_batch_size, iterations=2)
    with emulator(inputs, training) as emulated:
        for system in systems:
            layout = system.plan or system.stock_layout
            assert layout is not None
            emulated.training = dataclasses.replace(training, shape=TinyShape.of(MODEL, [layout]))
            run = emulated.run(system)
            peaks = [round(peak / GIB, 2) for peak in run.peak_bytes]
            rows.append({"emulated_s": round(run.iteration_s, 4), "emulated_gib": peaks})
    return rows


def large_layer_rows() -> Iterator[dict[str, Any]]:
    """A layer's parameters and gradients in 16 bits are more than a T4 has."""
    model = dataclasses.replace(
        MODELS["gpt-1.3b"],
        name="wide",
        num_layers=1,
        hidden_size=8192,
        ffn_hidden_size=163840,
        num_attention_heads=64,
        num_query_groups=64,
        seq_length=1024,
    )
    for what, space in (
        ("no TP groups", SearchSpace(max_tensor_parallel=1)),
        ("any", SearchSpace()),
    ):
        inputs = make_inputs(
            parse_cluster(LARGE_LAYERS),
            model,
            None,
            global_batch_size=8,
            dtype="float16",
            space=space,
        )
        yield _row(what, inputs)


def paper_rows(measured: Path, wanted: list[str] | None) -> Iterator[dict[str, Any]]:
    """The clusters of the paper."""
    for cluster, model in cases(wanted):
        inputs = paper_inputs(measured, cluster, model)
        work_s = recomputed_work_s(inputs)
        for what, space in (
            ("no TP groups", SearchSpace(max_tensor_parallel=1)),
            ("any", inputs.space),
        ):
            row = _row(what, dataclasses.replace(inputs, space=space))
            ratio = row["iteration_s"] and round(row["iteration_s"] / work_s, 3)
            yield {"cluster": cluster, "model": model, **row, "over_work": ratio}


def _row(what: str, inputs: Inputs) -> dict[str, Any]:
    try:
        outcome = find_plan(inputs)
    except NoPlanError as error:
        return {"what": what, "iteration_s": None, "missing_gib": error.missing_bytes / GIB}
    return _told(what, inputs, outcome)


def _told(what: str, inputs: Inputs, outcome: Outcome) -> dict[str, Any]:
    peaks = outcome.plan.predictions and outcome.plan.predictions.peak_memory_bytes
    return {
        "what": what,
        "iteration_s": round(outcome.iteration_s, 4),
        "plan": describe_plan(outcome.plan, inputs.kinds),
        "parts": [
            dataclasses.asdict(each.tp_shards)
            for group in outcome.plan.groups
            for each in group.replicas
            if each.tp_shards is not None
        ],
        "peak_gib": [round(peak / GIB, 2) for peak in peaks or ()][:4],
        "plan_time_s": round(outcome.plan_time_s, 1),
    }


def _inputs(cluster: bytes, *, batch: int) -> Inputs:
    return make_inputs(
        parse_cluster(cluster), MODEL, None, global_batch_size=batch, dtype="float16"
    )


if __name__ == "__main__":
    raise SystemExit(main())
