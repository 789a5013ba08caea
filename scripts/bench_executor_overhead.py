"""What a plan costs beside stock's own schedule, where both can do the same, on the CPU.

    python -m scripts.bench_executor_overhead
    python -m scripts.bench_executor_overhead --stages 2 --replicas 2 --tensor-parallel 1
    python -m scripts.bench_executor_overhead --stages 2 --replicas 2 --tensor-parallel 1 --watched

One set of two equal ranks unless told otherwise; the same flags. The two jobs run at the same time
and take turns step by step, each first in every second pair, so the machine's speed is the same for
both steps of a pair. Prints stock / plan, of CPU time over all threads of all ranks and of the
step's time: 1 is no overhead. With `--watched`, the plan takes stock's place, and the other job is
the same with `--zorse-rebalance on --zorse-status`: what these cost when nothing happens. It runs
on what the tests run on (`tests/megatron`), so from a checkout.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

from tests.megatron.launch import ONE_QUEUE, MegatronServer
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.megatron.turns import Board
from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule
from zorse_megatron.plan.plan_file import save_plan

MICRO_BATCH_SIZE = 4
NUM_MICRO_BATCHES = 8
NUM_LAYERS = 4
SEQ_LENGTH = 128
WARM_UP = 3
CORPUS_BYTES = 300_000
JOBS = ("stock", "plan")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An even one, which stock and a plan can have."""

    stages: int
    replicas: int
    degree: int
    """Ranks of each replica."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.stages * self.replicas * self.degree

    @property
    def global_batch_size(self) -> int:
        """Samples of a step."""
        return self.replicas * MICRO_BATCH_SIZE * NUM_MICRO_BATCHES

    def plan(self) -> Plan:
        """What stock takes the flags for."""
        groups = [
            Group(replicas=tuple(self._replica(stage, index) for index in range(self.replicas)))
            for stage in range(self.stages)
        ]
        bounds = [NUM_LAYERS * stage // self.stages for stage in range(self.stages + 1)]
        return Plan(
            schema_version=2,
            global_batch_size=self.global_batch_size,
            model=ModelFingerprint(num_layers=NUM_LAYERS),
            groups=tuple(groups),
            chunks=tuple(
                Chunk(group=stage, layers=layers) for stage, layers in enumerate(pairwise(bounds))
            ),
            schedule=Schedule(name="1f1b"),
        )

    def _replica(self, stage: int, index: int) -> Replica:
        first = (stage * self.replicas + index) * self.degree
        return Replica(
            ranks=tuple(range(first, first + self.degree)),
            micro_batch_size=MICRO_BATCH_SIZE,
            num_microbatches=NUM_MICRO_BATCHES,
            shard_weight=1.0,
        )


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a job."""

    cpu_s: float
    """Of all ranks."""
    main_cpu_s: float
    """Of that, the main threads'."""
    wall_s: float
    """Of the slowest rank."""


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Options of the layout that both jobs have."""
    for name, default in (("stages", 1), ("replicas", 1), ("tensor-parallel", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")


def layout_of(options: argparse.Namespace) -> Layout:
    """The layout that they say."""
    return Layout(stages=options.stages, replicas=options.replicas, degree=options.tensor_parallel)


def common_flags(layout: Layout, corpus: Path, iterations: int) -> list[str]:
    """Megatron's flags of both jobs; `--use-distributed-optimizer` as a plan always shards."""
    return [
        *("--num-layers", str(NUM_LAYERS), "--hidden-size", "128", "--num-attention-heads", "4"),
        *("--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH)),
        *(*WITHOUT_DROPOUT, *WITHOUT_EVALUATION, *WITHOUT_WORKERS, "--log-interval", "1"),
        *("--micro-batch-size", str(MICRO_BATCH_SIZE)),
        *("--global-batch-size", str(layout.global_batch_size), "--use-distributed-optimizer"),
        *("--pipeline-model-parallel-size", str(layout.stages)),
        *("--tensor-model-parallel-size", str(layout.degree)),
        *("--train-iters", str(iterations), "--lr", "1e-3", "--lr-decay-style", "constant"),
        *("--data-path", str(corpus), "--split", "100,0,0"),
        *("--calculate-per-token-loss", "--distributed-timeout-minutes", "1"),
        *TOKENIZER_FLAGS,
    ]


def job_flags(
    server: MegatronServer,
    layout: Layout,
    scratch: Path,
    iterations: int,
    *,
    watched: bool = False,
) -> dict[str, list[str]]:
    """Job -> its flags; writes a corpus and a plan. `watched`: see the top."""
    corpus, entry = scratch / "text", "zorse_megatron.adapter.corpus"
    server.run_ranks([str(corpus), str(CORPUS_BYTES)], 1, entry=entry, timeout_s=120).check()
    save_plan(layout.plan(), scratch / "plan.json")
    flags = common_flags(layout, corpus, iterations)
    own = {"stock": [], "plan": ["--zorse-plan", str(scratch / "plan.json")]}
    if watched:
        watching = ["--zorse-rebalance", "on", "--zorse-status", str(scratch / "status")]
        own = {"stock": own["plan"], "plan": [*own["plan"], *watching]}
    # The order of samples is looked up in a file where another job has written it.
    return {
        job: [*flags, *more, "--data-cache-path", str(scratch / f"{job}-index")]
        for job, more in own.items()
    }


def take_turns(board: Board, iterations: int, runs: Sequence[Future[Any]]) -> None:
    """Let both jobs make their steps, and end; at once when one of them has failed."""

    def one_has_ended() -> bool:
        return any(run.done() for run in runs)

    for job in range(len(JOBS)):
        board.await_ranks(job, one_has_ended)
    for number in range(iterations - 1):
        for job in (0, 1) if number % 2 == 0 else (1, 0):
            board.let_step(job, one_has_ended)
    for job in range(len(JOBS)):
        board.let_end(job)


def steps_in(times: Path, ranks: int) -> list[Step]:
    """What the ranks of a job wrote, without the warm-up."""
    found = [json.loads((times / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return [
        Step(
            cpu_s=sum(rank["cpu_s"] for rank in step),
            main_cpu_s=sum(rank["main_cpu_s"] for rank in step),
            wall_s=max(rank["wall_s"] for rank in step),
        )
        for step in list(zip(*found, strict=True))[WARM_UP:]
    ]


def paired_steps(
    layout: Layout, scratch: Path, iterations: int, *, watched: bool = False
) -> list[tuple[Step, Step]]:
    """Steps of stock and of the plan, pair by pair."""
    servers = [MegatronServer() for _ in JOBS]
    flags = job_flags(servers[0], layout, scratch, iterations, watched=watched)
    ranks = layout.world_size
    board = Board(scratch / "turns", jobs=len(JOBS), ranks=ranks)

    def run(number: int) -> list[Step]:
        times = scratch / f"{JOBS[number]}-times"
        times.mkdir()
        env = {
            "ZORSE_TIMES": str(times),
            "ZORSE_TURNS": str(scratch / "turns"),
            "ZORSE_JOB": str(number),
            **ONE_QUEUE,
        }
        servers[number].run_ranks(
            flags[JOBS[number]],
            ranks,
            entry="tests.megatron.timed_entry",
            timeout_s=60 + 10 * iterations,
            env=env,
        ).check()
        return steps_in(times, ranks)

    with ThreadPoolExecutor(len(JOBS)) as pool:
        runs = [pool.submit(run, number) for number in range(len(JOBS))]
        take_turns(board, iterations, runs)
        stock, plan = (each.result() for each in runs)
    for server in servers:
        server.close()
    return list(zip(stock, plan, strict=True))


def row(layout: Layout, pairs: list[tuple[Step, Step]]) -> str:
    """Medians and quartiles of stock / plan over all pairs, as a row of the table in the docs."""
    cells = [f"{layout.stages} x {layout.replicas} x {layout.degree}", str(len(pairs))]
    for name in ("cpu_s", "main_cpu_s", "wall_s"):
        low, middle, high = quantiles(
            [getattr(stock, name) / getattr(plan, name) for stock, plan in pairs]
        )
        cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run both jobs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_layout(parser)
    parser.add_argument("--iterations", type=int, default=104, help="of each job (default: 104)")
    parser.add_argument("--watched", action="store_true", help="what watching a plan costs it")
    args = parser.parse_args()
    layout = layout_of(args)
    with tempfile.TemporaryDirectory() as name:
        pairs = paired_steps(layout, Path(name), args.iterations, watched=args.watched)
    print(
        "| Stages x replicas x degree, on CPU | Pairs of steps | CPU time | Main threads | Step |"
    )
    print("|---|---|---|---|---|")
    print(row(layout, pairs))


if __name__ == "__main__":
    main()
