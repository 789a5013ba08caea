"""What a plan costs beside stock's own schedule, where both can do the same, on the CPU.

    python -m scripts.validation.stock_tensor_parallel
    python -m scripts.validation.stock_tensor_parallel --stages 2 --replicas 2 --tensor-parallel 1

One set of two equal ranks unless told otherwise; the same flags, alternating runs. Prints stock /
plan for each pair of runs, and as a row of a table their medians: 1 is no overhead. CPU time of
steps, summed over all threads of all ranks, depends least on what else the machine does; a step's
time is to be trusted where other work had little of the machine, which is printed, too. It runs on
what the tests run on (`tests/megatron`), so from a checkout, on Linux.
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
from zorse_megatron.processors import num_processors
from zorse_megatron.schema.plan.plan_json import save_plan

WARM_UP = 3
CORPUS_BYTES = 300_000


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of a run, after the warm-up."""

    cpu_s: float
    """Of all ranks, in the median step."""
    main_cpu_s: float
    """Of that, the main threads'."""
    wall_s: float
    """Of the slowest rank, in the median step."""
    fastest_s: float
    """Of the slowest rank, in the fastest step."""
    other_share: float
    """What anything else had of the machine's cores."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs, one right after the other."""

    stock: Steps
    plan: Steps

    @property
    def ratios(self) -> tuple[float, float, float]:
        """Stock / plan: of CPU time, of the median step, of the fastest step."""
        return (
            self.stock.cpu_s / self.plan.cpu_s,
            self.stock.wall_s / self.plan.wall_s,
            self.stock.fastest_s / self.plan.fastest_s,
        )

    @property
    def other_share(self) -> float:
        """The larger one."""
        return max(self.stock.other_share, self.plan.other_share)


def steps_of(
    flags: list[str], world_size: int, scratch: Path, *, iterations: int, idle_groups: int = 0
) -> Steps:
    """Run a job. `idle_groups`: see the option."""
    with tempfile.TemporaryDirectory(dir=scratch) as times:
        env = {"ZORSE_TIMES": times, "ZORSE_IDLE_GROUPS": str(idle_groups)}
        entry = "tests.megatron.timed_entry"
        run_ranks(flags, world_size, entry=entry, timeout_s=600, env=env).check()
        ranks = [
            json.loads(Path(times, f"rank{rank}.json").read_text())[WARM_UP:iterations]
            for rank in range(world_size)
        ]
    steps = [
        [{name: end[name] - start[name] for name in end} for start, end in pairwise(rank)]
        for rank in ranks
    ]
    by_step = list(zip(*steps, strict=True))
    walls_s = [max(rank["wall_s"] for rank in step) for step in by_step]
    cpus_s = [sum(rank["cpu_s"] for rank in step) for step in by_step]
    machine_s = sum(rank["machine_cpu_s"] for rank in steps[0])
    elapsed_s = sum(rank["wall_s"] for rank in steps[0])
    return Steps(
        cpu_s=median(cpus_s),
        main_cpu_s=median(sum(rank["main_cpu_s"] for rank in step) for step in by_step),
        wall_s=median(walls_s),
        fastest_s=min(walls_s),
        other_share=max(0.0, machine_s - sum(cpus_s)) / (elapsed_s * num_processors()),
    )


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Options of the layout that both jobs have."""
    for name, default in (("stages", 1), ("replicas", 1), ("tensor-parallel", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")


def layout_of(options: argparse.Namespace) -> Layout:
    """The layout that they say."""
    return Layout(stages=options.stages, replicas=options.replicas, degree=options.tensor_parallel)


def job_flags(layout: Layout, scratch: Path, iterations: int) -> dict[str, list[str]]:
    """Job -> its flags; writes a corpus and a plan."""
    corpus, entry = scratch / "text", "tests.megatron.corpus_entry"
    run_ranks([str(corpus), str(CORPUS_BYTES)], 1, entry=entry, timeout_s=120).check()
    save_plan(layout.plan(), scratch / "plan.json")
    flags = common_flags(layout, corpus, TOKENIZER_FLAGS, iterations)
    own = {"stock": [], "plan": ["--zorse-plan", str(scratch / "plan.json")]}
    # The order of samples is looked up in a file where another job has written it.
    return {
        job: [*flags, *more, "--data-cache-path", str(scratch / f"{job}-index")]
        for job, more in own.items()
    }


def row(layout: Layout, pairs: list[Pair]) -> str:
    """Medians with the lowest and the highest pair, as a row of the table in the docs."""
    cells = [f"{layout.stages} x {layout.replicas} x {layout.degree}", str(len(pairs))]
    for ratios in zip(*(pair.ratios for pair in pairs), strict=True):
        cells.append(f"{median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
    cells.append(f"{median(pair.other_share for pair in pairs):.0%}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run all pairs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_layout(parser)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs (default: 7)")
    parser.add_argument("--iterations", type=int, default=20, help="of each run (default: 20)")
    parser.add_argument(
        "--idle-groups",
        type=int,
        default=0,
        help="process groups that the plan's job makes and never uses (default: 0); over gloo "
        "each is a thread that wakes every 10 ms, of which stock has some 20 more than a plan",
    )
    args = parser.parse_args()
    layout, pairs = layout_of(args), []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        flags = job_flags(layout, scratch, args.iterations)
        for number in range(args.pairs):
            order = ("stock", "plan") if number % 2 == 0 else ("plan", "stock")
            found = {
                job: steps_of(
                    flags[job],
                    layout.world_size,
                    scratch,
                    iterations=args.iterations,
                    idle_groups=args.idle_groups if job == "plan" else 0,
                )
                for job in order
            }
            pairs.append(pair := Pair(stock=found["stock"], plan=found["plan"]))
            cpu, wall, fastest = pair.ratios
            print(
                f"pair {number + 1}: CPU {pair.stock.cpu_s:.3f} s ({pair.stock.main_cpu_s:.3f} "
                f"main threads) and {pair.plan.cpu_s:.3f} s ({pair.plan.main_cpu_s:.3f}) a step, "
                f"ratio {cpu:.3f}; median step {wall:.3f}; fastest step {fastest:.3f}; other work "
                f"{pair.stock.other_share:.0%} and {pair.plan.other_share:.0%}; {order[0]} first",
                flush=True,
            )
    print("| Stages x replicas x degree | Pairs | CPU time | Median step | Fastest | Other work |")
    print("|---|---|---|---|---|---|")
    print(row(layout, pairs))


if __name__ == "__main__":
    main()
