"""Whether fp16 and bf16 train under a plan as they do in stock Megatron by default.

    python scripts/compare_loss_scales.py --json scales.json

A tiny GPT on real text, on the CPU, by stock Megatron with its default loss (no
--calculate-per-token-loss) as one process, as two replicas and with smaller micro-batches, and
under a plan of unequal groups: in fp16 with a dynamic and with a constant loss scale, and in bf16.
For each job: how many steps were skipped, the loss scale at the end, the mean loss of the last
tenth of the steps, and how far any loss is from that of stock as one process.

The default takes hours on two cores. Each result is in the file as soon as it is there, and the
same command goes on after the last one.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from zorse_megatron.emulate.rank_jobs import RankJob, output_of, runner_here
from zorse_megatron.errors import ZorseError
from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule
from zorse_megatron.plan.plan_file import save_plan

NUM_LAYERS = 2
SEQ_LENGTH = 96
CORPUS_BYTES = 1_000_000
TIME_LIMIT_S = 3600.0
# Samples in a batch -> samples in a micro-batch.
MICRO_BATCH_SIZES = {8: 2, 1024: 64, 10240: 64}
PRECISIONS = {
    "fp16": ("--fp16",),
    "fp16, --loss-scale 4096": ("--fp16", "--loss-scale", "4096"),
    "bf16": ("--bf16",),
}
STOCK = "stock"
SMALLER = "stock, micro-batches of half the size"
CONTESTANTS = {STOCK: 1, "stock, 2 replicas": 2, SMALLER: 1, "plan": 3}
"""Name -> number of ranks."""

# Stock's line of an iteration; a skipped one has no loss.
_LOSS = re.compile(r"lm loss: ([-+.\dEe]+) \|")
_SCALE = re.compile(r"loss scale: ([-+.\dEe]+) \|")
_SKIPPED = re.compile(r"number of skipped iterations: +(\d+) \|")


def plan_of(batch: int) -> Plan:
    """Two groups: unequal replicas of unequal micro-batches, and a rank alone."""
    size = MICRO_BATCH_SIZES[batch]

    def replica(rank: int, size: int, samples: int, weight: float) -> Replica:
        return Replica(
            ranks=(rank,),
            micro_batch_size=size,
            num_microbatches=samples // size,
            shard_weight=weight,
        )

    unequal = replica(0, size, 3 * batch // 4, 3.0), replica(1, size // 2, batch // 4, 1.0)
    return Plan(
        schema_version=2,
        global_batch_size=batch,
        model=ModelFingerprint(num_layers=NUM_LAYERS),
        groups=(Group(replicas=unequal), Group(replicas=(replica(2, size, batch, 1.0),))),
        chunks=(Chunk(group=0, layers=(0, 1)), Chunk(group=1, layers=(1, NUM_LAYERS))),
        schedule=Schedule(name="1f1b"),
    )


def flags_of(
    corpus: Path, tokenizer: Sequence[str], iterations: int, batch: int, contestant: str
) -> list[str]:
    """Megatron's flags, the same for all jobs of a size but for the micro-batches."""
    size = MICRO_BATCH_SIZES[batch] // (2 if contestant == SMALLER else 1)
    return [
        *("--num-layers", str(NUM_LAYERS), "--hidden-size", "16", "--num-attention-heads", "1"),
        *("--seq-length", str(SEQ_LENGTH), "--max-position-embeddings", str(SEQ_LENGTH)),
        # Unlike learned positions these do not depend on --micro-batch-size.
        *("--position-embedding-type", "rope", "--micro-batch-size", str(size)),
        *("--global-batch-size", str(batch), "--train-iters", str(iterations)),
        *("--lr", "1e-3", "--min-lr", "1e-4", "--lr-decay-style", "cosine"),
        *("--lr-warmup-iters", str(iterations // 20), "--weight-decay", "0.1"),
        *("--clip-grad", "1.0", "--data-path", str(corpus), "--split", "100,0,0"),
        *(*WITHOUT_DROPOUT, *WITHOUT_EVALUATION, *WITHOUT_WORKERS),
        *("--log-interval", "1", "--distributed-timeout-minutes", "10", "--seed", "1", *tokenizer),
    ]


def outcome_of(log: str) -> dict[str, Any]:
    """Read a job's log: losses by step, skipped steps, loss scale at the end."""
    losses: dict[int, float] = {}
    skipped, scale = 0, 0.0
    lines = [line for line in log.splitlines() if " iteration " in line and _SCALE.search(line)]
    for step, line in enumerate(lines, start=1):
        now_skipped, now_scale = _SKIPPED.search(line), _SCALE.search(line)
        assert now_skipped is not None and now_scale is not None, line
        skipped, scale = skipped + int(now_skipped[1]), float(now_scale[1])
        if loss := _LOSS.search(line):
            losses[step] = float(loss[1])
    return {"losses": losses, "skipped": skipped, "scale": scale, "steps": len(lines)}


class Results:
    """Outcomes by the words that name a job, kept in a file while more are found."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self.found = json.loads(path.read_text(encoding="utf-8"))

    def add(self, name: str, outcome: dict[str, Any]) -> None:
        """Note an outcome, in the file too."""
        self.found[name] = json.loads(json.dumps(outcome))  # steps are words, as in the file
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


def name_of(iterations: int, batch: int, precision: str, contestant: str) -> str:
    """What a job is called in the file of results."""
    return f"{iterations} steps of {batch} samples, {precision}, {contestant}"


def run_all(results: Results, options: argparse.Namespace, batch: int, work: Path) -> None:
    """Run what the results lack of one size."""
    iterations = options.iterations
    from zorse_megatron.adapter.corpus import tokenizer_flags, write_corpus

    corpus = write_corpus(work / "corpus" / "text", max_bytes=CORPUS_BYTES)
    save_plan(plan_of(batch), work / "plan.json")
    for precision in options.precision:
        for contestant in options.contestant:
            name = name_of(iterations, batch, precision, contestant)
            if name in results.found:
                continue
            planned = ("--zorse-plan", str(work / "plan.json")) if contestant == "plan" else ()
            job = RankJob(
                name=f"job-{len(results.found)}",
                world_size=CONTESTANTS[contestant],
                arguments=(
                    *flags_of(corpus.prefix, tokenizer_flags(), iterations, batch, contestant),
                    *PRECISIONS[precision],
                    *planned,
                ),
                directory=work,
                limit_s=TIME_LIMIT_S,
            )
            with runner_here(has_gpu=False) as run_job:
                run_job(job)
            results.add(name, outcome_of(output_of(work, job.world_size - 1)))  # the last one logs
            print(name, file=sys.stderr, flush=True)


def table(found: Mapping[str, Any], options: argparse.Namespace, batch: int) -> list[str]:
    """The result of one size in Markdown; distances are to stock as one process."""
    iterations = options.iterations
    lines = [
        f"{iterations} steps of {batch * SEQ_LENGTH:,} tokens:",
        "",
        "| Type | Job, on CPU | Skipped steps | Loss scale at the end | Final loss | "
        "Largest distance |",
        "|---|---|---|---|---|---|",
    ]
    for precision in options.precision:
        stock = found[name_of(iterations, batch, precision, STOCK)]["losses"]
        for contestant in options.contestant:
            outcome = found[name_of(iterations, batch, precision, contestant)]
            losses = outcome["losses"]
            last = [losses[step] for step in list(losses)[-max(1, iterations // 10) :]]
            common = losses.keys() & stock.keys()
            distance = max(abs(losses[step] - stock[step]) for step in common)
            lines.append(
                f"| {precision} | {contestant} | {outcome['skipped']} | {outcome['scale']:,.0f} | "
                f"{mean(last):.5f} | {'' if contestant == STOCK else f'{distance:.5f}'} |"
            )
    return lines


def main() -> int:
    """Run all jobs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="save results here, and resume from them"
    )
    parser.add_argument(
        "--iterations", type=int, default=300, help="iterations per job (default: 300)"
    )
    for name, choices, default, what in (
        ("batch", sorted(MICRO_BATCH_SIZES), [8, 1024], f"samples of {SEQ_LENGTH} tokens"),
        ("precision", list(PRECISIONS), list(PRECISIONS), "type and loss scale"),
        ("contestant", list(CONTESTANTS), list(CONTESTANTS), f"who trains; {STOCK!r} comes first"),
    ):
        parser.add_argument(
            f"--{name}",
            type=type(choices[0]),
            nargs="+",
            choices=choices,
            default=default,
            help=f"{what} (default: {', '.join(map(str, default))})",
        )
    options = parser.parse_args()
    if options.iterations < 1 or options.contestant[0] != STOCK:
        parser.error(f"expected --iterations of at least 1, and {STOCK!r} as first --contestant")
    results = Results(options.json)
    try:
        with tempfile.TemporaryDirectory(prefix="zorse-scales-") as work:
            for batch in options.batch:
                run_all(results, options, batch, Path(work))
    except ZorseError as error:
        print(error, file=sys.stderr)
        return 1
    tables = [table(results.found, options, batch) for batch in options.batch]
    print("\n\n".join("\n".join(lines) for lines in tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
