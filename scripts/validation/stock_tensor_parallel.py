"""What a plan with one set of equal ranks costs beside stock's own tensor parallelism, on the CPU.

    python -m scripts.validation.stock_tensor_parallel

Two ranks, the same flags, alternating runs; the CPU time of steps, summed over both ranks, depends
least on what else the machine does. Prints stock / plan for each pair of runs, and the medians: 1
is no overhead. It runs on what the tests run on (`tests/megatron`), so from a checkout.
"""

import argparse
import json
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from scripts.bench_executor_overhead import Layout, common_flags
from tests.megatron.launch import run_ranks
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.schema.plan.plan_json import save_plan

DEGREE = 2
WARM_UP = 2
CORPUS_BYTES = 300_000


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a run, after the warm-up."""

    cpu_s: float
    """In the mean, summed over ranks."""
    wall_s: float
    """The fastest."""


def step_of(flags: list[str], scratch: Path, *, iterations: int) -> Step:
    """Run a job."""
    with tempfile.TemporaryDirectory(dir=scratch) as times:
        env = {"ZORSE_TIMES": times}
        entry = "tests.megatron.timed_entry"
        run_ranks(flags, DEGREE, entry=entry, timeout_s=300, env=env).check()
        ranks = [
            json.loads(Path(times, f"rank{rank}.json").read_text())[WARM_UP:iterations]
            for rank in range(DEGREE)
        ]
    steps = iterations - WARM_UP - 1
    return Step(
        cpu_s=sum(rank[-1][0] - rank[0][0] for rank in ranks) / steps,
        wall_s=max(min(end[1] - start[1] for start, end in pairwise(rank)) for rank in ranks),
    )


def main() -> None:
    """Run all pairs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=10)
    args = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        corpus, entry = scratch / "text", "tests.megatron.corpus_entry"
        run_ranks([str(corpus), str(CORPUS_BYTES)], 1, entry=entry, timeout_s=60).check()
        layout = Layout(stages=1, replicas=1, degree=DEGREE)
        save_plan(layout.plan(), scratch / "plan.json")
        flags = common_flags(layout, corpus, TOKENIZER_FLAGS, args.iterations)
        own = {"stock": [], "plan": ["--zorse-plan", str(scratch / "plan.json")]}
        for number in range(args.pairs):
            order = ("stock", "plan") if number % 2 == 0 else ("plan", "stock")
            found = {
                name: step_of([*flags, *own[name]], scratch, iterations=args.iterations)
                for name in order
            }
            stock, plan = found["stock"], found["plan"]
            ratios.append((stock.cpu_s / plan.cpu_s, stock.wall_s / plan.wall_s))
            print(
                f"pair {number + 1}: CPU {stock.cpu_s:.3f} s and {plan.cpu_s:.3f} s a step, "
                f"ratio {ratios[-1][0]:.3f}; fastest step {ratios[-1][1]:.3f}; {order[0]} first",
                flush=True,
            )
    cpu, wall = (median(each) for each in zip(*ratios, strict=True))
    print(f"median stock / plan: {cpu:.3f} of CPU time, {wall:.3f} of the fastest step's time")


if __name__ == "__main__":
    main()
