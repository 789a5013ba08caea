"""What our executor costs where stock's schedule could do the same: a plan equal to a stock layout.

    python scripts/bench_executor_overhead.py --json
    python scripts/bench_executor_overhead.py --stages 1 --replicas 1 --tensor-parallel 2

Pipeline stages of data-parallel ranks, two of two unless told otherwise, or of tensor-parallel sets
of ranks: once by stock's own schedule and once under a plan that says the same, with the same
flags, on the CPU. The jobs run in pairs, in alternating order, and each pair gives one ratio of
throughputs (plan / stock; 1 is no overhead), and one of the CPU time of the whole jobs, start
included.
"""

import argparse
import json
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from zorse_megatron.demo.jobs import DemoJob, run_job
from zorse_megatron.demo.quiet import quiet_imports
from zorse_megatron.errors import ZorseError
from zorse_megatron.schema.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule
from zorse_megatron.schema.plan.plan_json import save_plan

MICRO_BATCH_SIZE = 4
NUM_MICRO_BATCHES = 8
NUM_LAYERS = 4
SEQ_LENGTH = 128
CORPUS_BYTES = 1_000_000


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
            schema_version=1,
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
class Throughput:
    """Tokens per second of one job after its warm-up."""

    median: float
    """In its median iteration."""
    fastest: float
    """In its fastest iteration, which other load on the machine disturbs least."""
    cpu_s: float
    """Of all ranks of the whole job."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two jobs, one right after the other."""

    first: str
    stock: Throughput
    plan: Throughput

    @property
    def ratio(self) -> float:
        """Plan / stock, by the median iterations."""
        return self.plan.median / self.stock.median

    @property
    def ratio_of_fastest(self) -> float:
        """Plan / stock, by the fastest iterations."""
        return self.plan.fastest / self.stock.fastest

    @property
    def ratio_of_cpu(self) -> float:
        """Stock / plan, by the CPU time of the whole jobs."""
        return self.stock.cpu_s / self.plan.cpu_s


def common_flags(
    layout: Layout, corpus: Path, tokenizer: Sequence[str], iterations: int
) -> list[str]:
    """Megatron's flags of both jobs; `--use-distributed-optimizer` as a plan always shards."""
    return [
        *("--num-layers", str(NUM_LAYERS), "--hidden-size", "128", "--num-attention-heads", "4"),
        *("--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH)),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        *("--micro-batch-size", str(MICRO_BATCH_SIZE)),
        *("--global-batch-size", str(layout.global_batch_size), "--use-distributed-optimizer"),
        *("--pipeline-model-parallel-size", str(layout.stages)),
        *("--tensor-model-parallel-size", str(layout.degree)),
        *("--train-iters", str(iterations), "--lr", "1e-3", "--lr-decay-style", "constant"),
        *("--data-path", str(corpus), "--split", "100,0,0", "--num-workers", "0"),
        *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1"),
        *("--calculate-per-token-loss", "--distributed-timeout-minutes", "1"),
        *tokenizer,
    ]


def throughput_in(metrics: Path, warm_up: int, *, samples: int, cpu_s: float) -> Throughput:
    """Read the iterations after the warm-up, of so many samples each."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    durations_s = [record["elapsed_s"] for record in records[warm_up:]]
    tokens = samples * SEQ_LENGTH
    return Throughput(
        median=tokens / median(durations_s), fastest=tokens / min(durations_s), cpu_s=cpu_s
    )


def run_one(
    name: str, number: int, layout: Layout, flags: list[str], *, work: Path, warm_up: int
) -> Throughput:
    """Run one job and return its throughput."""
    metrics = work / f"{name}-{number}.jsonl"
    own = ["--zorse-plan", str(work / "plan.json")] if name == "plan" else []
    job = DemoJob(
        name=f"{name}-{number}",
        num_ranks=layout.world_size,
        arguments=(*flags, *own, "--zorse-metrics", str(metrics)),
        directory=work,
    )
    before_s = cpu_of_children_s()
    run_job(job, lambda _progress: None)
    cpu_s = cpu_of_children_s() - before_s
    return throughput_in(metrics, warm_up, samples=layout.global_batch_size, cpu_s=cpu_s)


def cpu_of_children_s() -> float:
    """CPU time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_pairs(options: argparse.Namespace, work: Path) -> list[Pair]:
    """Run all pairs; every second one the other way round, so that a drift cancels out."""
    with quiet_imports():
        from zorse_megatron.demo.corpus import tokenizer_flags, write_corpus

    corpus = write_corpus(work / "corpus" / "text", max_bytes=CORPUS_BYTES)
    layout = Layout(
        stages=options.stages, replicas=options.replicas, degree=options.tensor_parallel
    )
    flags = common_flags(layout, corpus.prefix, tokenizer_flags(), options.iterations)
    save_plan(layout.plan(), work / "plan.json")
    pairs = []
    for number in range(options.pairs):
        order = ("stock", "plan") if number % 2 == 0 else ("plan", "stock")
        found = {
            name: run_one(name, number, layout, flags, work=work, warm_up=options.warm_up)
            for name in order
        }
        pair = Pair(first=order[0], stock=found["stock"], plan=found["plan"])
        pairs.append(pair)
        print(
            f"pair {number + 1}: stock {pair.stock.median:.0f} tokens/s, "
            f"plan {pair.plan.median:.0f} tokens/s, ratio {pair.ratio:.3f} "
            f"({pair.ratio_of_fastest:.3f} by the fastest iterations, {pair.ratio_of_cpu:.3f} by "
            f"CPU time; {pair.first} first)",
            file=sys.stderr,
            flush=True,
        )
    return pairs


def main() -> int:
    """Run the benchmark and print its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of jobs (default: 5)")
    parser.add_argument(
        "--iterations", type=int, default=30, help="iterations per job (default: 30)"
    )
    parser.add_argument("--warm-up", type=int, default=10, help="warm-up iterations (default: 10)")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages (default: 2)")
    parser.add_argument(
        "--replicas", type=int, default=2, help="replicas in each stage (default: 2)"
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="ranks of each replica (default: 1)"
    )
    options = parser.parse_args()
    if not 1 <= options.warm_up < options.iterations or options.pairs < 1:
        parser.error("expected --pairs of at least 1, and 1 <= --warm-up < --iterations")
    try:
        with tempfile.TemporaryDirectory(prefix="zorse-bench-") as work:
            pairs = run_pairs(options, Path(work))
    except ZorseError as error:
        print(error, file=sys.stderr)
        return 1
    ratio = median(pair.ratio for pair in pairs)
    fastest = median(pair.ratio_of_fastest for pair in pairs)
    by_cpu = median(pair.ratio_of_cpu for pair in pairs)
    if options.json:
        described = [
            asdict(pair)
            | {
                "ratio": pair.ratio,
                "ratio_of_fastest": pair.ratio_of_fastest,
                "ratio_of_cpu": pair.ratio_of_cpu,
            }
            for pair in pairs
        ]
        medians = {
            "median_ratio": ratio,
            "median_ratio_of_fastest": fastest,
            "median_ratio_of_cpu": by_cpu,
        }
        print(json.dumps(medians | {"pairs": described}, indent=1))
    else:
        print(
            f"median ratio plan / stock: {ratio:.3f} over {len(pairs)} pairs "
            f"({fastest:.3f} by the fastest iterations, {by_cpu:.3f} by CPU time)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
