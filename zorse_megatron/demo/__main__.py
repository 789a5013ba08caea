"""`python -m zorse_megatron.demo`: stock Megatron and an uneven plan, trained side by side.

Writes a corpus, runs both jobs one after the other, by default on the CPU, compares loss and
gradient norm of every iteration, and leaves figures, logs and numbers in the output folder. The
exit status is 0 if the two runs are the same, 1 if not or if a job failed.
"""

import shutil
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zorse_megatron.demo.devices import Device, count_gpus
from zorse_megatron.demo.jobs import DemoJob, DemoProgress, run_job
from zorse_megatron.demo.loss_comparison import Comparison, Run, read_run
from zorse_megatron.demo.model import MIN_ITERATIONS, TRAIN_ITERATIONS, demo_plan, training_flags
from zorse_megatron.demo.quiet import quiet_imports
from zorse_megatron.demo.report import (
    STOCK_LABEL,
    draw_loss,
    draw_timeline,
    loss_table,
    plan_label,
    write_json,
)
from zorse_megatron.errors import ZorseError
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.stdout import one_line_if_not_printed
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import load_plan, save_plan

CORPUS_BYTES = 2_000_000
# Without a terminal there is no line to redraw: one line per this many iterations.
TELL_EVERY = 10


def main(
    output: Annotated[
        Path,
        typer.Option(help="Directory for figures, logs and numbers; earlier ones are replaced."),
    ] = Path("demo-output"),
    iterations: Annotated[
        int, typer.Option(min=MIN_ITERATIONS, help="Training iterations of each job.")
    ] = TRAIN_ITERATIONS,
    device: Annotated[
        Device, typer.Option(help="Where to train; with fewer GPUs than ranks, they share them.")
    ] = Device.CPU,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan for the demo's model, such as an edited plan.json of a demo."),
    ] = None,
) -> None:
    """Train with stock Megatron and under an uneven plan, and compare."""
    console = Console(highlight=False)
    started_s = time.monotonic()
    try:
        refuse_without("train", "plots", what="the demo")
        wanted = demo_plan() if plan is None else load_plan(plan)
        _demo(output.resolve(), console, iterations, device, wanted)
    except ZorseError as error:
        console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print(f"Done in {time.monotonic() - started_s:.0f} s.")


def _demo(output: Path, console: Console, num_iterations: int, device: Device, plan: Plan) -> None:
    num_gpus = 0 if device == Device.CPU else count_gpus()
    _empty(output)
    plan_path = output / "plan.json"
    save_plan(plan, plan_path)
    flags = _flags(output, console, num_iterations)
    if num_gpus:  # Transformer Engine rounds the products of fp32 to tf32
        flags += ["--transformer-impl", "local"]
    traces = output / "traces"
    jobs = {
        "stock": _job(output, "stock", 1, flags, num_gpus),
        "plan": _job(
            output,
            "plan",
            plan.world_size,
            [*flags, "--zorse-plan", str(plan_path), "--zorse-trace", str(traces)],
            num_gpus,
        ),
    }
    console.print(f"two jobs, one after the other: {STOCK_LABEL}; {plan_label(plan)}")
    durations_s = {name: _run(job, console) for name, job in jobs.items()}
    comparison = Comparison(
        stock=_read(output, jobs["stock"], num_iterations),
        plan=_read(output, jobs["plan"], num_iterations),
    )
    _report(output, console, comparison, plan, durations_s)
    comparison.check()
    console.print(
        f"The two runs are the same: over {num_iterations} iterations the losses differ by at "
        f"most {comparison.max_abs_loss_difference:.1e}, the gradient norms by at most "
        f"{comparison.max_relative_grad_norm_difference:.1e} of their size, the validation losses "
        f"by at most {comparison.max_abs_validation_difference:.1e}.",
        style="bold green",
    )


def _empty(output: Path) -> None:
    """Make the folder, and remove what an earlier demo left there and nothing else."""
    output.mkdir(parents=True, exist_ok=True)
    for name in ("corpus", "traces"):
        shutil.rmtree(output / name, ignore_errors=True)
    for pattern in ("*.metrics.jsonl", "*.log", "*.png", "demo.json"):
        for file in output.glob(pattern):
            file.unlink()


def _flags(output: Path, console: Console, num_iterations: int) -> list[str]:
    with console.status("writing the corpus ..."), quiet_imports():
        # Imports Megatron, which takes seconds.
        from zorse_megatron.demo.corpus import tokenizer_flags, write_corpus

        corpus = write_corpus(output / "corpus" / "text", max_bytes=CORPUS_BYTES)
    console.print(
        f"corpus: {corpus.num_documents} files of Python's standard library, "
        f"{corpus.num_tokens / 1e6:.1f} million byte tokens"
    )
    return training_flags(corpus.prefix, tokenizer=tokenizer_flags(), num_iterations=num_iterations)


def _metrics(output: Path, name: str) -> Path:
    return output / f"{name}.metrics.jsonl"


def _read(output: Path, job: DemoJob, num_iterations: int) -> Run:
    return read_run(_metrics(output, job.name), job.log, num_iterations=num_iterations)


def _job(output: Path, name: str, num_ranks: int, arguments: list[str], num_gpus: int) -> DemoJob:
    metrics = ("--zorse-metrics", str(_metrics(output, name)))
    return DemoJob(
        name=name,
        num_ranks=num_ranks,
        arguments=(*arguments, *metrics),
        directory=output,
        on_gpu=num_gpus > 0,
        shares_gpus=0 < num_gpus < num_ranks,
    )


def _run(job: DemoJob, console: Console) -> float:
    with console.status(f"{job.name}: starting ...") as status:

        def tell(progress: DemoProgress) -> None:
            line = (
                f"{job.name}: iteration {progress.iteration}/{progress.num_iterations}, "
                f"loss {progress.loss:.4f}"
            )
            status.update(line)
            if not console.is_terminal and progress.iteration % TELL_EVERY == 0:
                console.print(line)

        duration_s = run_job(job, tell)
    console.print(
        f"{job.name}: done in {duration_s:.0f} s, start-up included; log: {_short(job.log)}"
    )
    return duration_s


def _report(
    output: Path,
    console: Console,
    comparison: Comparison,
    plan: Plan,
    durations_s: dict[str, float],
) -> None:
    console.print(loss_table(comparison))
    written = [
        write_json(output / "demo.json", comparison, plan, durations_s=durations_s),
        draw_loss(output / "loss.png", comparison, plan),
        draw_timeline(output / "timeline.png", output / "traces", plan),
    ]
    console.print("written: " + ", ".join(map(_short, written)))


def _short(path: Path) -> str:
    """The path from here if it is below, else in full."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


if __name__ == "__main__":
    with one_line_if_not_printed():
        typer.run(main)
