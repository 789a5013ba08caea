"""The demo's own cluster, what it shows of a plan and of two runs, and what it refuses."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from rich.console import Console

from zorse_megatron import demo
from zorse_megatron.demo import loss_table
from zorse_megatron.doctor.doctor_run import Trained
from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.doctor.report import Machine
from zorse_megatron.errors import ZorseError
from zorse_megatron.inputs.cluster_yaml import parse_cluster


def shown(table):
    console = Console(width=140)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def trained(losses=(5.25, 4.0)):
    by_step = dict(enumerate(losses, start=1))
    norms = dict.fromkeys(by_step, 2.0)
    return Trained(losses=by_step, grad_norms=norms, elapsed_s={}, directory=Path())


def test_its_cluster_is_one_of_unequal_gpus_on_several_nodes():
    cluster = parse_cluster(demo.CLUSTER.encode())
    assert len(cluster.nodes) == 3
    assert cluster.gpu_kinds == ("A100-40", "A10G", "A10G", "T4", "T4")


def test_table_shows_both_losses():
    table = shown(loss_table(trained(), trained()))
    assert table.count("5.25000000") == 2


def test_what_an_earlier_demo_left_goes_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "old.txt").write_text("old")
    (tmp_path / "mine.txt").write_text("mine")

    def planned(*_arguments):
        raise ZorseError.of("no plan", where="", found="", expected="", remedy="")

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
    # A real one runs jobs in `tests/megatron/test_demo.py`.
    monkeypatch.setattr(demo, "runner_here", lambda **_: nullcontext())
    monkeypatch.setattr(demo, "machine_here", lambda *_: nothing)
    with pytest.raises(ZorseError, match="--device: found cuda, while torch sees no GPU"):
        demo._demo(tmp_path, None, 4, demo.Device.CUDA, Console())
