"""How far the simulator is from the training runs that Sailor published.

    python -m scripts.validation.sailor --measured DIR [--json OUT]

DIR has Sailor's (SOSP 2025) runs on GH200 nodes and what they measured of layers, memory and links:
gh200_runs.csv, layer_latency_tp.csv, model_memory_tp.csv, link_bandwidth.csv. docs/simulator.md
describes the method.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from scripts.validation.sailor_runs import (
    PARTS,
    RUNS,
    Comparison,
    compare_runs,
    mean_absolute,
)
from zorse_megatron.errors import ProfileError

_GB = 1e9


def table(rows: tuple[Comparison, ...]) -> str:
    """For people: one line for each run, then the means."""
    lines = [
        "model        nodes  layout                        iteration (s)            "
        "peak memory (GB)",
        "                                                  real    simulated  error  "
        "real   simulated  error",
    ]
    for row in rows:
        run = row.run
        lines.append(
            f"{run.model:12} {run.num_nodes:5}  {run.layout:28}  "
            f"{run.iteration_s:7.3f}  {row.iteration_s:7.3f}  {row.time_error:+6.1%}  "
            f"{run.max_memory_bytes / _GB:5.1f}  {row.peak_memory_bytes / _GB:9.1f}  "
            f"{row.memory_error:+6.1%}"
        )
    means = summary(rows)
    lines.append(
        f"mean absolute error: iteration time {means['time_error']:.1%}, "
        f"peak memory {means['memory_error']:.1%}"
    )
    return "\n".join(lines)


def summary(rows: tuple[Comparison, ...]) -> dict[str, float]:
    """Mean absolute errors, and means with their signs."""
    times = [row.time_error for row in rows]
    memory = [row.memory_error for row in rows]
    return {
        "time_error": mean_absolute(times),
        "memory_error": mean_absolute(memory),
        "time_bias": sum(times) / len(times),
        "memory_bias": sum(memory) / len(memory),
    }


def as_json(row: Comparison) -> dict[str, Any]:
    """For programs."""
    run = row.run
    return {
        "model": run.model,
        "num_nodes": run.num_nodes,
        "layout": run.layout,
        "measured_iteration_s": run.iteration_s,
        "simulated_iteration_s": row.iteration_s,
        "time_error": row.time_error,
        "measured_memory_bytes": run.max_memory_bytes,
        "simulated_memory_bytes": row.peak_memory_bytes,
        "memory_error": row.memory_error,
    }


def main() -> int:
    """Compare, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, required=True, help="directory of the tables")
    parser.add_argument("--json", type=Path, help="write the rows and the means to this file")
    parser.add_argument(
        "--rebuild-gb-per-s",
        type=float,
        help="another rate for rebuilding received activations, for a sensitivity check",
    )
    options = parser.parse_args()
    if options.rebuild_gb_per_s is not None and not options.rebuild_gb_per_s > 0:
        parser.error("expected --rebuild-gb-per-s above 0")
    rate = options.rebuild_gb_per_s * _GB if options.rebuild_gb_per_s else None
    try:
        tables = {name: (options.measured / name).read_bytes() for name in (RUNS, *PARTS)}
        rows = compare_runs(tables, rebuild_bytes_per_s=rate)
    except (OSError, ProfileError) as error:
        print(error, file=sys.stderr)
        return 1
    print(table(rows))
    if options.json:
        content = {"rows": [as_json(row) for row in rows], **summary(rows)}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
