"""Whether 16-bit communication and mixed types train as well as stock: final losses over several
seeds.

    python scripts/compare_precisions.py --json compare.json

A tiny GPT on real text (the sources of Python's standard library), on the CPU, by stock Megatron as
one process and under a plan of two groups of two ranks: gradients sent in fp32, in bf16, and groups
that compute in bf16 and in fp16. The yardstick is how far stock's own final losses are apart from
seed to seed. A final loss is the mean over the last tenth of the iterations.

It takes hours. Each result is in the file as soon as it is there, and the same command goes on
after the last one.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from zorse_megatron.doctor.doctor_run import read_metrics
from zorse_megatron.emulate.rank_jobs import RankJob, runner_here
from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule
from zorse_megatron.plan.plan_file import save_plan

NUM_LAYERS = 4
SEQ_LENGTH = 32
GLOBAL_BATCH_SIZE = 8
CORPUS_BYTES = 1_000_000
TIME_LIMIT_S = 3600.0
STOCK = "stock, fp32"


def _replica(rank: int, size: int, count: int, weight: float) -> Replica:
    return Replica(
        ranks=(rank,), micro_batch_size=size, num_microbatches=count, shard_weight=weight
    )


FP32_GRADIENTS = Plan(
    schema_version=2,
    global_batch_size=GLOBAL_BATCH_SIZE,
    model=ModelFingerprint(num_layers=NUM_LAYERS),
    groups=(
        Group(replicas=(_replica(0, 2, 3, 3.0), _replica(1, 2, 1, 1.0))),
        Group(replicas=(_replica(2, 4, 1, 1.0), _replica(3, 4, 1, 1.0))),
    ),
    chunks=(Chunk(group=0, layers=(0, 2)), Chunk(group=1, layers=(2, NUM_LAYERS))),
    schedule=Schedule(name="1f1b"),
)


def _changed(**by_group: Sequence[str]) -> Plan:
    """The plan with one value of a setting for each group."""
    groups = []
    for number, group in enumerate(FP32_GRADIENTS.groups):
        settings = {name: values[number] for name, values in by_group.items()}
        groups.append(replace(group, **settings))  # type: ignore[arg-type]
    return replace(FP32_GRADIENTS, groups=tuple(groups))


# Name -> plan (None: stock, one process) and flags.
CONTESTANTS: dict[str, tuple[Plan | None, tuple[str, ...]]] = {
    STOCK: (None, ()),
    "stock, bf16": (None, ("--bf16",)),
    "plan, fp32 communication": (FP32_GRADIENTS, ()),
    "plan, bf16 communication": (_changed(grad_reduce_dtype=("bf16", "bf16")), ()),
    "plan, bf16 and fp16 groups": (_changed(compute_dtype=("bf16", "fp16")), ("--bf16",)),
}


def flags_of(corpus: Path, tokenizer: Sequence[str], iterations: int, seed: int) -> list[str]:
    """Megatron's flags, the same for all jobs of a seed."""
    return [
        *("--num-layers", str(NUM_LAYERS), "--hidden-size", "64", "--num-attention-heads", "4"),
        *("--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH)),
        *(*WITHOUT_DROPOUT, *WITHOUT_EVALUATION, *WITHOUT_WORKERS, "--micro-batch-size", "2"),
        *("--global-batch-size", str(GLOBAL_BATCH_SIZE), "--train-iters", str(iterations)),
        *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine"),
        *("--lr-warmup-iters", str(iterations // 20), "--weight-decay", "0.1"),
        *("--clip-grad", "1.0", "--initial-loss-scale", "1024", "--loss-scale-window", "1000"),
        *("--data-path", str(corpus), "--split", "100,0,0", "--log-interval", "1"),
        *("--calculate-per-token-loss", "--distributed-timeout-minutes", "5"),
        *("--seed", str(seed), *tokenizer),
    ]


def final_loss(name: str, number: int, flags: list[str], work: Path) -> float:
    """Run one job and return the mean loss of the last tenth of its iterations."""
    plan, more = CONTESTANTS[name]
    own = list(more)
    if plan is not None:
        path = work / f"plan-{number}.json"
        save_plan(plan, path)
        own += ["--zorse-plan", str(path)]
    metrics = work / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    job = RankJob(
        name=f"job-{number}",
        arguments=(*flags, *own, "--zorse-metrics", str(metrics)),
        world_size=1 if plan is None else plan.world_size,
        directory=work,
        limit_s=TIME_LIMIT_S,
    )
    with runner_here(has_gpu=False) as run_job:
        run_job(job)
    losses = read_metrics(metrics).losses
    last = sorted(losses)[-max(1, len(losses) // 10) :]
    return mean(losses[iteration] for iteration in last)


class OtherResultsError(ZorseError):
    """The file of results is another comparison's."""


class Results:
    """Final losses, kept in a file while more are found."""

    def __init__(self, path: Path | None, iterations: int) -> None:
        """Reads what the file has. Raises OtherResultsError for runs of another length."""
        self.path = path
        self.iterations = iterations
        self.losses: dict[str, dict[str, float]] = {name: {} for name in CONTESTANTS}
        """Contestant -> seed -> final loss."""
        if path is None or not path.exists():
            return
        known = json.loads(path.read_text(encoding="utf-8"))
        if known.get("iterations") != iterations:
            problem = Problem(
                where=str(path),
                found=f"runs of {known.get('iterations')} iterations",
                expected=f"runs of {iterations}",
                remedy="Name another file, or as many --iterations.",
            )
            raise OtherResultsError("the comparison cannot go on", [problem])
        self.losses.update(known["final_losses"])

    def add(self, name: str, seed: int, loss: float) -> None:
        """Note a final loss, in the file too."""
        self.losses[name][str(seed)] = loss
        if self.path is not None:
            content = {"iterations": self.iterations, "final_losses": self.losses}
            self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run_all(results: Results, num_seeds: int, work: Path) -> None:
    """Run what the results lack."""
    from zorse_megatron.adapter.corpus import tokenizer_flags, write_corpus

    corpus = write_corpus(work / "corpus" / "text", max_bytes=CORPUS_BYTES)
    for seed in range(1, num_seeds + 1):
        flags = flags_of(corpus.prefix, tokenizer_flags(), results.iterations, seed)
        for number, name in enumerate(CONTESTANTS):
            if str(seed) not in results.losses[name]:
                results.add(name, seed, final_loss(name, number, flags, work))
            loss = results.losses[name][str(seed)]
            print(f"seed {seed}, {name}: {loss:.4f}", file=sys.stderr, flush=True)


def table(found: dict[str, dict[str, float]], num_seeds: int) -> str:
    """The result in Markdown; distances are to stock in fp32 with the same seed."""
    seeds = [str(seed) for seed in range(1, num_seeds + 1)]
    stock = [found[STOCK][seed] for seed in seeds]
    headings = "".join(f" seed {seed} |" for seed in seeds)
    lines = [
        f"| job, on CPU |{headings} mean | largest distance |",
        "|---|" + "---|" * (num_seeds + 2),
    ]
    for name, by_seed in found.items():
        losses = [by_seed[seed] for seed in seeds]
        listed = " | ".join(f"{loss:.4f}" for loss in losses)
        distance = max(abs(one - other) for one, other in zip(losses, stock, strict=True))
        lines.append(f"| {name} | {listed} | {mean(losses):.4f} | {distance:.4f} |")
    lines.append("")
    lines.append(f"Stock's final losses are {max(stock) - min(stock):.4f} apart from seed to seed.")
    return "\n".join(lines)


def main() -> int:
    """Run all jobs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="save results here, and resume from them"
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds (default: 5)")
    parser.add_argument(
        "--iterations", type=int, default=300, help="iterations per job (default: 300)"
    )
    options = parser.parse_args()
    if options.seeds < 1 or options.iterations < 1:
        parser.error("expected --seeds and --iterations of at least 1")
    try:
        results = Results(options.json, options.iterations)
        with tempfile.TemporaryDirectory(prefix="zorse-precisions-") as work:
            run_all(results, options.seeds, Path(work))
    except ZorseError as error:
        print(error, file=sys.stderr)
        return 1
    print(table(results.losses, options.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
