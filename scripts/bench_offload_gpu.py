"""What offload saves and costs on one GPU, against the model; with more GPUs, overlap of gathers.

    python scripts/bench_offload_gpu.py --json offload.json

1. A model whose whole training state is larger than `--budget` trains with parameters, optimizer
   state and activations in host memory, under `--zorse-memory-limit`.
2. Its peak is compared with the memory model.
3. A smaller model, which fits, runs with everything resident (1F1B, one chunk) and again with all
   in the host: the slowdown by the median iteration.
4. With `--ranks 2` or more: the smaller model in one group, gathered per pass and resident, and the
   gathers alone: which share of them computation hides.

`--dry-run`: the same on the CPU with a tiny model; its figures mean nothing. What to expect is in
docs/performance.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from offload_cases import (
    Case,
    chunk_parameters,
    flags_of,
    memory_of,
    plan_of,
    predicted_bytes,
    state_bytes,
)

from zorse_megatron.demo.jobs import DemoJob, run_job
from zorse_megatron.demo.quiet import quiet_imports
from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.schedules.actions import Kind
from zorse_megatron.schedules.lower import lower_plan
from zorse_megatron.schema.plan.plan import Offload
from zorse_megatron.schema.plan.plan_json import save_plan

IN_HOST = Offload(parameters=True, optimizer_state=True, activations=True)
MAX_SLOWDOWN, MAX_PEAK_ERROR = 0.05, 0.08
# For --dry-run: seconds on a CPU.
TINY = {
    "hidden": 64,
    "heads": 4,
    "sequence": 64,
    "vocabulary": 256,
    "layers": 6,
    "small_layers": 2,
    "micro_batch_size": 1,
    "micro_batches": 2,
    "small_micro_batches": 2,
    "iterations": 4,
    "warm_up": 2,
    "budget": 0.003,
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run showed after its warm-up."""

    iteration_s: float
    losses: tuple[float, ...]
    peak_bytes: int


def run_case(
    case: Case, options: argparse.Namespace, work: Path, data: Sequence[object], *more: str
) -> Found:
    """Train, and read what was recorded."""
    directory = work / case.name
    directory.mkdir()
    plan, metrics = directory / "plan.json", directory / "metrics.jsonl"
    save_plan(plan_of(case, options), plan)
    own = ["--zorse-plan", plan, "--zorse-metrics", metrics, "--zorse-memory", directory, *more]
    job = DemoJob(
        name=case.name,
        num_ranks=case.ranks,
        arguments=(*flags_of(case, options, data), *map(str, own)),
        directory=directory,
        on_gpu=not options.dry_run,
        time_limit_s=options.time_limit,
    )
    run_job(job, lambda _progress: None)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    peaks = json.loads((directory / "memory-rank0.json").read_text())["peaks"]
    found = Found(
        iteration_s=median(record["elapsed_s"] for record in records[options.warm_up :]),
        losses=tuple(record["lm loss"] for record in records),
        peak_bytes=peaks.get("allocated", peaks["total"])["num_bytes"],
    )
    print(f"{case.name}: {found}", file=sys.stderr, flush=True)
    return found


def gather_alone_s(case: Case, options: argparse.Namespace, work: Path) -> float:
    """One iteration's gathers with nothing beside them: all chunks, as often as the list says."""
    memory = memory_of(case.layers, options)
    counts = chunk_parameters(case.layers, memory)
    actions = lower_plan(plan_of(case, options)).ranks[0]
    gathered = [a.chunk or 0 for a in actions if a.kind is Kind.GATHER]
    num_bytes = sum(memory.parameter_bytes(counts[chunk]) for chunk in gathered)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(case.ranks)]
    command += [str(Path(__file__).resolve().with_name("gather_alone.py"))]
    command += ["--bytes", str(num_bytes // len(gathered))]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if options.dry_run else {})
    shown = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, check=True
    )
    return len(gathered) * float(shown.stdout.split()[-1])


def cases_of(options: argparse.Namespace) -> tuple[Case, Case, Case]:
    """The large model in the host, the small one resident, and the small one in the host."""
    large = Case(
        name="large",
        layers=options.layers,
        micro_batches=options.micro_batches,
        parameters="per_pass",
        offload=IN_HOST,
    )
    small = Case(
        name="offloaded",
        layers=options.small_layers,
        micro_batches=options.small_micro_batches,
        parameters="per_pass",
        offload=IN_HOST,
    )
    return large, replace(small, name="resident", parameters=None, offload=None), small


def check_budget(options: argparse.Namespace, work: Path) -> None:
    """Raise ZorseError unless the small model fits with everything resident, and the large not."""
    budget_bytes, whole_bytes = int(options.budget * 1e9), state_bytes(options.layers, options)
    resident_bytes = predicted_bytes(cases_of(options)[1], options, work)
    if not resident_bytes < budget_bytes < whole_bytes:
        raise _bad_budget(resident_bytes, budget_bytes, whole_bytes)


def on_one_rank(options: argparse.Namespace, work: Path, data: Sequence[object]) -> dict[str, Any]:
    """Whether the large model trains within the budget, and what offload costs the small one."""
    large, *small = cases_of(options)
    limit = ("--zorse-memory-limit", str(options.budget))
    found = run_case(large, options, work, data, *limit)
    predicted = predicted_bytes(large, options, work)
    times_s = [run_case(case, options, work, data).iteration_s for case in small]
    return {
        "budget_bytes": int(options.budget * 1e9),
        "state_bytes": state_bytes(options.layers, options),
        "losses": found.losses,
        "peak_bytes": found.peak_bytes,
        "predicted_peak_bytes": predicted,
        "peak_error": found.peak_bytes / predicted - 1,
        "resident_s": times_s[0],
        "offloaded_s": times_s[1],
        "slowdown": times_s[1] / times_s[0] - 1,
    }


def overlap(options: argparse.Namespace, work: Path, data: Sequence[object]) -> dict[str, Any]:
    """Which share of the gathers' time several ranks hide behind computation."""
    per_pass = Case(
        name="gathered",
        layers=options.small_layers,
        micro_batches=options.micro_batches,
        parameters="per_pass",
        offload=None,
        ranks=options.ranks,
    )
    whole = replace(per_pass, name="whole", parameters="resident")
    times_s = [run_case(case, options, work, data).iteration_s for case in (whole, per_pass)]
    alone_s = [gather_alone_s(case, options, work) for case in (whole, per_pass)]
    # What the resident run gathers after its step is not hidden.
    exposed_s = times_s[1] - (times_s[0] - alone_s[0])
    return {
        "ranks": options.ranks,
        "whole_s": times_s[0],
        "gathered_s": times_s[1],
        "gathers_alone_s": alone_s[1],
        "hidden_share": 1 - exposed_s / alone_s[1],
    }


def _bad_budget(resident_bytes: int, budget_bytes: int, whole_bytes: int) -> ZorseError:
    problem = Problem(
        where="--budget",
        found=f"{budget_bytes:,} bytes; the small model needs {resident_bytes:,} with everything "
        f"resident, and the large one's training state is {whole_bytes:,}",
        expected="room for the first, but not for the second",
        remedy="Change --budget, --layers or --small-layers.",
    )
    return ZorseError("The runs would show nothing", [problem])


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; with --dry-run, sizes are those of `TINY`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--dry-run", action="store_true", help="run on the CPU, with a tiny model")
    add("--json", type=Path, metavar="FILE", help="write the result")
    add("--budget", type=float, default=24.0, help="GPU memory in GB (default: 24)")
    add("--ranks", type=int, default=1, help="GPUs to overlap all-gathers on (default: 1, none)")
    add("--hidden", type=int, default=4096)
    add("--heads", type=int, default=32)
    add("--sequence", type=int, default=2048)
    add("--vocabulary", type=int, default=32000)
    add("--layers", type=int, default=12, help="layers of the large model (default: 12)")
    add("--small-layers", type=int, default=4, help="layers of the small model (default: 4)")
    add("--micro-batch-size", type=int, default=2)
    add(
        "--micro-batches",
        type=int,
        default=32,
        help="micro-batches of the large model (default: 32)",
    )
    add(
        "--small-micro-batches",
        type=int,
        default=256,
        help="micro-batches of the small one (default: 256)",
    )
    add("--iterations", type=int, default=8, help="iterations per run (default: 8)")
    add("--warm-up", type=int, default=3, help="warm-up iterations (default: 3)")
    add("--time-limit", type=float, default=3600.0, help="seconds per run")
    options = parser.parse_args(argv)
    if options.dry_run:
        vars(options).update(TINY)
    if not 1 <= options.warm_up < options.iterations:
        parser.error("expected 1 <= --warm-up < --iterations")
    return options


def tokens(options: argparse.Namespace, work: Path) -> list[object]:
    """Flags for data: bytes of the standard library's sources, in a vocabulary of any size."""
    with quiet_imports():
        from zorse_megatron.demo.corpus import tokenizer_flags, write_corpus
    words = tokenizer_flags()
    words[words.index("--vocab-size") + 1] = str(options.vocabulary)
    return [
        "--data-path",
        write_corpus(work / "corpus" / "text", max_bytes=4_000_000).prefix,
        *words,
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything and say what was reached."""
    options = options_of(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="zorse-offload-") as work:
            check_budget(options, Path(work))
            data = tokens(options, Path(work))
            result = on_one_rank(options, Path(work), data)
            if options.ranks > 1:
                result["overlap"] = overlap(options, Path(work), data)
    except ZorseError as error:
        print(error, file=sys.stderr)
        return 1
    reached = {
        "trains": result["losses"][-1] < result["losses"][0],
        "peak": abs(result["peak_error"]) <= MAX_PEAK_ERROR,
        "slowdown": result["slowdown"] <= MAX_SLOWDOWN,
    }
    text = json.dumps({**result, "dry_run": options.dry_run, "reached": reached}, indent=1)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)
    return 0 if options.dry_run or all(reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
