"""`python -m zorse_megatron.demo`: plan a mixed cluster, train under the plan, compare with stock.

`zorse plan` plans a real model for the cluster. Then a GPT with as many layers, small enough for
this machine, is trained twice: by stock Megatron in one process, and under the plan in one process
for each of its GPUs, by default on the CPU. Loss and gradient norm of every iteration are compared.
Figures, logs and numbers stay in the output folder. The exit status is 0 if the two runs are the
same, 1 if not or if a job failed.
"""

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from zorse_megatron.demo.report import (
    draw_loss,
    draw_timeline,
    loss_table,
    stands_for_table,
    validation_difference,
)
from zorse_megatron.doctor.doctor_run import DoctorRun, Trained, compared, machine_here
from zorse_megatron.doctor.plans import EXACT, FP32_FLAGS, MAX_ABS_LOSS_DIFFERENCE
from zorse_megatron.doctor.report import Status
from zorse_megatron.emulate.forks.rank_jobs import runner_here
from zorse_megatron.emulate.jobs.tiny_model import TinyTraining, training_flags
from zorse_megatron.emulate.jobs.tiny_shape import TinyShape
from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.stdout import one_line_if_not_printed
from zorse_megatron.schema.model.model_presets import MODELS
from zorse_megatron.schema.plan.plan import ClusterFingerprint, Plan
from zorse_megatron.schema.plan.plan_json import load_plan

CLUSTER = """\
name: demo
nodes:
  - {name: large, gpus: 1 x A100-40, nics: 50 Gb/s}
  - {name: medium, gpus: 2 x A10G, nics: 40 Gb/s}
  - {name: small, gpus: 2 x T4, nics: 40 Gb/s}
"""
MODEL, GLOBAL_BATCH_SIZE, SEQ_LENGTH = "llama-1b", 32, 1024
ITERATIONS = 20
TIME_LIMIT_S = 600.0


class Device(StrEnum):
    """Where to train."""

    CPU = "cpu"
    CUDA = "cuda"


def main(
    output: Annotated[
        Path, typer.Option(help="Directory for figures, logs and numbers; replaces earlier ones.")
    ] = Path("demo-output"),
    cluster: Annotated[
        Path | None, typer.Option(help="Plan for this cluster file, in place of the demo's own.")
    ] = None,
    iterations: Annotated[int, typer.Option(min=4, help="Iterations of each job.")] = ITERATIONS,
    device: Annotated[
        Device, typer.Option(help="Where to train; with fewer GPUs than ranks, they share them.")
    ] = Device.CPU,
) -> None:
    """Plan a mixed cluster, train under the plan and with stock Megatron, and compare."""
    console = Console(highlight=False)
    started_s = time.monotonic()
    try:
        refuse_without("train", "plots", what="the demo")
        if device == Device.CPU:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        _demo(output, cluster, iterations, device, console)
    except ZorseError as error:
        console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print(f"Done in {time.monotonic() - started_s:.0f} s. Next, your own cluster: describe "
                  "it (docs/cluster-file.md), and plan your training command for it:")  # fmt: skip
    _print_command(
        console, "zorse plan --cluster cluster.yaml --out plan.json -- pretrain_gpt.py YOUR_FLAGS"
    )


def _demo(
    output: Path, cluster: Path | None, iterations: int, device: Device, console: Console
) -> None:
    runs = output.resolve() / "runs"
    shutil.rmtree(runs, ignore_errors=True)  # an earlier demo's, and nothing else
    runs.mkdir(parents=True)
    if cluster is None:
        cluster = output / "cluster.yaml"
        cluster.write_text(CLUSTER, encoding="utf-8")
    plan = _planned(cluster, output / "plan.json", console)
    console.print(stands_for_table(plan))
    with runner_here(has_gpu=device == Device.CUDA) as run_job:
        run = DoctorRun(
            machine=machine_here(run_job, runs),
            run_job=run_job,
            directory=runs,
            ends_s=time.monotonic() + TIME_LIMIT_S,
        )
        if device == Device.CUDA and not run.machine.gpus:
            raise ZorseError("The demo cannot run there", [_NO_GPU])
        stock, under_plan = _trained(run, plan, iterations, console)
    console.print(loss_table(stock, under_plan))
    written = [draw_loss(output / "loss.png", stock, under_plan),
               draw_timeline(output / "timeline.png", plan, runs / "traces")]  # fmt: skip
    console.print(f"written: {', '.join(map(str, written))}; logs and numbers: {output / 'runs'}")
    found, validation = compared(under_plan, stock, EXACT), validation_difference(stock, under_plan)
    if found.status is Status.FAIL or not validation <= MAX_ABS_LOSS_DIFFERENCE:
        raise ZorseError("The two runs differ", [_difference(found.said, validation, runs)])
    console.print(
        f"The two runs are the same. {found.said}, validation losses by {validation:.1e}.",
        style="bold green",
    )


def _planned(cluster: Path, path: Path, console: Console) -> Plan:
    """Run `zorse plan`, as a user would."""
    options = {
        "--cluster": cluster,
        "--model": MODEL,
        "--global-batch-size": GLOBAL_BATCH_SIZE,
        "--seq-length": SEQ_LENGTH,
        "--out": path,
    }
    words = ["plan", *(str(word) for option in options.items() for word in option)]
    _print_command(console, shlex.join(["zorse", *words]))
    done = subprocess.run([sys.executable, "-m", "zorse_megatron", *words], check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return load_plan(path)


def _trained(
    run: DoctorRun, plan: Plan, iterations: int, console: Console
) -> tuple[Trained, Trained]:
    """Train the small model with stock and under the plan."""
    shape = TinyShape.of(MODELS[MODEL], [plan])
    small = dataclasses.replace(shape.plan(plan), cluster=ClusterFingerprint())
    training = TinyTraining(
        model=MODELS[MODEL],
        global_batch_size=GLOBAL_BATCH_SIZE,
        iterations=iterations,
        shape=shape,
    )
    flags = [
        *training_flags(training, ["--split", "90,10,0", *FP32_FLAGS]),
        # Two batches, as an evaluation of stock's hundred takes longer than the training.
        *("--eval-iters", "2", "--eval-interval", str(iterations // 2)),
        # Initial weights depend on the size of micro-batches; log and loaders are stock's default.
        *("--micro-batch-size", "4", "--log-interval", "1", "--num-workers", "2"),
    ]
    trace = ["--zorse-trace", str(run.directory / "traces")]
    found = []
    for name, of_job, more in (("stock", None, []), ("plan", small, trace)):
        started_s = time.monotonic()
        ranks = 1 if of_job is None else of_job.world_size
        with console.status(f"{name}: training {iterations} iterations, {ranks} processes ..."):
            found.append(run.trained(name, of_job, [*flags, *more]))
        console.print(f"{name}: {iterations} iterations in {time.monotonic() - started_s:.0f} s")
    return found[0], found[1]


def _print_command(console: Console, command: str) -> None:
    console.print(f"  {command}", style="bold", markup=False, soft_wrap=True)


def _difference(said: str, validation: float, runs: Path) -> Problem:
    return Problem(
        where=str(runs),
        found=f"{said}; validation losses differ by {validation:.1e}",
        expected=f"differences within rounding, of losses at most {MAX_ABS_LOSS_DIFFERENCE:.0e}",
        remedy="The plan did not train as one process does: please report it, with that folder.",
    )


_NO_GPU = Problem(
    where="--device",
    found="cuda, while torch sees no GPU",
    expected="a GPU",
    remedy="Leave it out to train on the CPU, or check nvidia-smi and "
    "`python -c 'import torch; print(torch.version.cuda)'`.",
)

if __name__ == "__main__":
    with one_line_if_not_printed():
        typer.run(main)
