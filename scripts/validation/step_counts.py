"""What a step does under a plan and under stock's own schedule, where both can do the same.

    python -m scripts.validation.step_counts
    python -m scripts.validation.step_counts --stages 2 --replicas 2 --tensor-parallel 1

Two jobs with the same flags, on the CPU: operations of torch, messages, Python calls, threads, and
the CPU time of the main thread by what it is for, as the rows of a table. The counts do not depend
on what else the machine does; times do. It runs on what the tests run on (`tests/megatron`), so
from a checkout.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean

from scripts.bench_executor_overhead import add_layout, job_flags, layout_of
from tests.megatron.launch import ONE_QUEUE, default_server, run_ranks
from tests.megatron.profiled_entry import iterations

STEPS = 4
_MAIN = ", main thread"


def counts_of(flags: list[str], world_size: int, scratch: Path, *, steps: int) -> dict[str, float]:
    """Name -> count in a step, or seconds; the mean over ranks. See `profiled_entry.iterations`."""
    with tempfile.TemporaryDirectory(dir=scratch) as counts:
        env = {"ZORSE_COUNTS": counts, "ZORSE_COUNTED_STEPS": str(steps), **ONE_QUEUE}
        entry = "tests.megatron.profiled_entry"
        run_ranks(flags, world_size, entry=entry, timeout_s=500, env=env).check()
        ranks = [
            json.loads(Path(counts, f"rank{rank}.json").read_text()) for rank in range(world_size)
        ]
    names = dict.fromkeys(name for rank in ranks for name in rank)
    found = {name: mean(rank.get(name, 0.0) for rank in ranks) for name in names}
    # Stock logs after the step.
    apart = (f"step{_MAIN}", f"log{_MAIN}")
    parts_s = [s for name, s in found.items() if name.endswith(_MAIN) and name not in apart]
    found[f"all else in the step{_MAIN}"] = found[f"step{_MAIN}"] - sum(parts_s)
    return found


def shown(name: str, value: float) -> str:
    """A count, or seconds as milliseconds."""
    return f"{1e3 * value:,.1f} ms" if name.endswith(_MAIN) else f"{value:,.0f}"


def rows(stock: dict[str, float], plan: dict[str, float]) -> list[str]:
    """The table; names in the order in which they are found, the step's parts last."""
    names = sorted({**stock, **plan}, key=lambda name: name.endswith(_MAIN))
    return [
        "| In a step of a rank, on CPU | stock | plan |",
        "|---|---|---|",
        *(
            f"| {name} | {shown(name, stock.get(name, 0))} | {shown(name, plan.get(name, 0))} |"
            for name in names
        ),
    ]


def main() -> None:
    """Run both jobs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_layout(parser)
    layout = layout_of(parser.parse_args())
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        flags = job_flags(default_server(), layout, scratch, iterations(STEPS))
        found = {
            job: counts_of(flags[job], layout.world_size, scratch, steps=STEPS) for job in flags
        }
    print("\n".join(rows(found["stock"], found["plan"])))


if __name__ == "__main__":
    main()
