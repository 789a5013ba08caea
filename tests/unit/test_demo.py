"""The demo's own cluster, what it shows of a plan and of two runs, and what it refuses."""

import dataclasses
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from zorse_megatron import demo
from zorse_megatron.demo import loss_table, stands_for_table, validation_difference
from zorse_megatron.doctor.doctor_run import Machine, Trained
from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.errors import ZorseError
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.plan.plan import ClusterFingerprint
from zorse_megatron.plan.plan_file import dump_plan, parse_plan

VALIDATION = (
    " validation loss at {} | lm loss value: {:.6E} | lm loss PPL: 3.3E+01 | \n other words\n"
)


def shown(table):
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def trained(directory: Path, losses=(5.25, 4.0), validation=()):
    directory.mkdir(exist_ok=True)
    said = "".join(VALIDATION.format(where, loss) for where, loss in validation)
    (directory / "rank_0.txt").write_text("nothing\n")
    (directory / "rank_1.txt").write_text(said)
    by_step = dict(enumerate(losses, start=1))
    return Trained(
        losses=by_step, grad_norms=dict.fromkeys(by_step, 2.0), elapsed_s={}, directory=directory
    )


def test_its_cluster_is_one_of_unequal_gpus_on_several_nodes():
    cluster = parse_cluster(demo.CLUSTER.encode())
    assert len(cluster.nodes) == 3
    assert cluster.gpu_kinds == ("A100-40", "A10G", "A10G", "T4", "T4")


def test_which_rank_stands_for_which_gpu(tmp_path):
    plan = UNEVEN_PLAN
    kinds = ("A100-40", "T4", "L4", "A10G", "V100-16")
    named = ClusterFingerprint(name="five", gpu_kinds=kinds)
    plan = parse_plan(dump_plan(plan).encode())
    rows = shown(stands_for_table(dataclasses.replace(plan, cluster=named))).splitlines()
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows if "│" in row]
    assert cells[0] == ["0", "A100-40", "0 to 2", "4 x 4", "75 %"]
    assert cells[1] == ["1", "T4", "0 to 2", "4 x 2", "25 %"]
    assert cells[2] == ["2", "L4", "3", "8 x 3", "100 %"]
    assert [row[1] for row in cells] == list(kinds)


def test_table_shows_both_losses(tmp_path):
    table = shown(loss_table(trained(tmp_path), trained(tmp_path)))
    assert table.count("5.25000000") == 2


def test_validation_losses_are_compared(tmp_path):
    stock = trained(tmp_path / "a", validation=[("iteration 2", 3.5), ("iteration 4", 3.25)])
    plan = trained(tmp_path / "b", validation=[("iteration 2", 3.5), ("iteration 4", 3.5)])
    assert validation_difference(stock, stock) == 0
    assert validation_difference(stock, plan) == pytest.approx(0.25)
    fewer = trained(tmp_path / "c", validation=[("iteration 2", 3.5)])
    assert validation_difference(stock, fewer) == math.inf
    assert validation_difference(fewer, stock) == math.inf
    assert validation_difference(trained(tmp_path / "d"), trained(tmp_path / "d")) == math.inf


def test_what_an_earlier_demo_left_goes_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "old.txt").write_text("old")
    (tmp_path / "mine.txt").write_text("mine")

    def planned(*_arguments):
        raise ZorseError("no plan", [demo._NO_GPU])

    monkeypatch.setattr(demo, "_planned", planned)
    with pytest.raises(ZorseError, match="no plan"):
        demo._demo(tmp_path, None, 4, demo.Device.CPU, Console())
    assert not list((tmp_path / "runs").iterdir())
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_gpus_that_are_not_there_are_refused(tmp_path, monkeypatch):
    nothing = Machine(
        gpus=(), torch="", nccl=None, transformer_engine=None, driver=None, num_processors=1
    )
    monkeypatch.setattr(demo, "_planned", lambda *_: UNEVEN_PLAN)
    monkeypatch.setattr(demo, "stands_for_table", lambda plan: "")
    # A real one runs jobs in `tests/megatron/test_demo.py`.
    monkeypatch.setattr(demo, "runner_here", lambda **_: nullcontext())
    monkeypatch.setattr(demo, "machine_here", lambda *_: nothing)
    with pytest.raises(ZorseError, match="--device: found cuda, while torch sees no GPU"):
        demo._demo(tmp_path, None, 4, demo.Device.CUDA, Console())
