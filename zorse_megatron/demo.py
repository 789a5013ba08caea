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
from rich.table import Table

from zorse_megatron.doctor.doctor_run import DoctorRun, Trained, compared, machine_here
from zorse_megatron.doctor.plans import EXACT, FP32_FLAGS, MAX_ABS_LOSS_DIFFERENCE
from zorse_megatron.doctor.report import Status
from zorse_megatron.emulate.rank_jobs import runner_here
from zorse_megatron.emulate.tiny_model import TinyShape, TinyTraining, training_flags
from zorse_megatron.errors import ZorseError
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.read_write import one_line_if_not_printed
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.plan import ClusterFingerprint, Plan
from zorse_megatron.plan.plan_file import load_plan

SHOW_EVERY = 5


def loss_table(stock: Trained, plan: Trained) -> Table:
    """Losses and gradient norms side by side, every few iterations."""
    table = Table(title="Loss and gradient norm, iteration by iteration (trained on this machine)")
    for heading in ("step", "stock loss", "plan loss", "difference", "stock norm", "plan norm"):
        table.add_column(heading, justify="right")
    steps = sorted(stock.losses.keys() & plan.losses.keys())
    for step in steps:
        if step in {steps[0], steps[-1]} or step % SHOW_EVERY == 0:
            losses = stock.losses[step], plan.losses[step]
            table.add_row(
                str(step),
                *(f"{loss:.8f}" for loss in losses),
                f"{losses[1] - losses[0]:+.1e}",
                *(f"{run.grad_norms[step]:.6f}" for run in (stock, plan)),
            )
    return table


def draw_loss(path: Path, stock: Trained, plan: Trained) -> Path:
    """Draw both loss curves and their difference; matplotlib is told of before the demo runs."""
    from zorse_megatron.plots.figures import LossCurve, draw_curves

    return draw_curves(
        path,
        first=LossCurve(label="stock Megatron, one process", losses=stock.losses),
        second=LossCurve(label="the plan, a process for each GPU", losses=plan.losses),
        title="The same training, with stock Megatron and under a plan (fp32, on the CPU)",
        tolerance=MAX_ABS_LOSS_DIFFERENCE,
        unit="nats per byte",
    )


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
    with runner_here(has_gpu=device == Device.CUDA) as run_job:
        run = DoctorRun(
            machine=machine_here(run_job, runs),
            run_job=run_job,
            directory=runs,
            ends_s=time.monotonic() + TIME_LIMIT_S,
        )
        if device == Device.CUDA and not run.machine.gpus:
            raise ZorseError.of(
                "The demo cannot run there",
                where="--device",
                found="cuda, while torch sees no GPU",
                expected="a GPU",
                remedy="Leave it out to train on the CPU, or check nvidia-smi and "
                "`python -c 'import torch; print(torch.version.cuda)'`.",
            )
        stock, under_plan = _trained(run, plan, iterations, console)
    console.print(loss_table(stock, under_plan))
    written = draw_loss(output / "loss.png", stock, under_plan)
    console.print(f"written: {written}; logs and numbers: {output / 'runs'}")
    found = compared(under_plan, stock, EXACT)
    if found.status is Status.FAIL:
        raise ZorseError.of(
            "The two runs differ",
            where=str(runs),
            found=found.said,
            expected="differences within rounding, of losses at most "
            f"{MAX_ABS_LOSS_DIFFERENCE:.0e}",
            remedy="The plan did not train as one process does: please report it, with that "
            "folder.",
        )
    console.print(f"The two runs are the same. {found.said}.", style="bold green")


def _planned(cluster: Path, path: Path, console: Console) -> Plan:
    """Run `zorse plan` and `zorse check`, as a user would."""
    options = {
        "--cluster": cluster,
        "--model": MODEL,
        "--global-batch-size": GLOBAL_BATCH_SIZE,
        "--seq-length": SEQ_LENGTH,
        "--out": path,
    }
    plan = ["plan", *(str(word) for option in options.items() for word in option)]
    for words in (plan, ["check", str(path)]):
        _print_command(console, shlex.join(["zorse", *words]))
        done = subprocess.run([sys.executable, "-m", "zorse_megatron", *words], check=False)
        if done.returncode:
            raise typer.Exit(done.returncode)
    console.print("A process on this machine stands for each rank of the plan.")
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
        *training_flags(training, FP32_FLAGS),
        # Initial weights depend on the size of micro-batches; log and loaders are stock's default.
        *("--micro-batch-size", "4", "--log-interval", "1", "--num-workers", "2"),
    ]
    found = []
    for name, of_job in (("stock", None), ("plan", small)):
        started_s = time.monotonic()
        ranks = 1 if of_job is None else of_job.world_size
        with console.status(f"{name}: training {iterations} iterations, {ranks} processes ..."):
            found.append(run.trained(name, of_job, flags))
        console.print(f"{name}: {iterations} iterations in {time.monotonic() - started_s:.0f} s")
    return found[0], found[1]


def _print_command(console: Console, command: str) -> None:
    console.print(f"  {command}", style="bold", markup=False, soft_wrap=True)


if __name__ == "__main__":
    with one_line_if_not_printed():
        typer.run(main)
