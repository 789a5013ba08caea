"""Ctrl-C while `zorse plan` searches: the fastest plan so far, or none."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli_samples import WORKLOAD, write_lab
from tests.unit.planner_cases import random_case
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.outcome import CUT_SHORT, SearchCutShort
from zorse_megatron.planner.search import finish_plan
from zorse_megatron.planner.simulate_plan import simulate_plan

SEED = 7


class Interrupts:
    """Takes what a search tells, and interrupts it at its n-th plan."""

    def __init__(self, at):
        self.at = at
        self.found_s = []

    def __call__(self, progress):
        if progress.best is not None:
            self.found_s.append(progress.best.iteration_s)
        if len(self.found_s) == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [1, 3, 8])
def test_an_interrupt_gives_the_fastest_plan_so_far(at):
    inputs, interrupts = random_case(SEED), Interrupts(at)
    with pytest.raises(SearchCutShort) as cut:
        find_plan(inputs, stock=(), on_progress=interrupts)
    outcome = cut.value.outcome
    assert outcome.was_cut_short and outcome.notes[0] == CUT_SHORT
    assert outcome.iteration_s == min(interrupts.found_s) and len(interrupts.found_s) == at
    result = simulate_plan(inputs, outcome.plan)
    assert result.iteration_s == pytest.approx(outcome.iteration_s)
    peaks = zip(result.peak_memory_bytes, inputs.capacities_bytes, strict=True)
    assert all(peak <= capacity for peak, capacity in peaks)


def test_an_interrupt_before_the_first_plan_gives_none():
    with pytest.raises(KeyboardInterrupt) as cut:
        find_plan(random_case(SEED), stock=(), on_progress=Interrupts(0))
    assert not isinstance(cut.value, SearchCutShort)


def test_plans_for_a_part_of_the_batch_are_not_taken(monkeypatch):
    """Of a very large batch a part is searched, too."""
    monkeypatch.setattr(finish_plan, "_LONG", 4)
    inputs, told = random_case(SEED, most_gpus=2, most_layers=4), []
    find_plan(inputs, stock=(), on_progress=lambda progress: told.append(progress.best))
    assert {each.plan.global_batch_size for each in told if each} == {inputs.global_batch_size}


SEARCHING = "planner.search.zorse_search.ZorseSearch._improve"
STOCK = "planner.baselines.stock_search.StockSearch.run"
ENDING = "planner.find_plan._outcome"
PROGRAM = """
import os, pkgutil, signal, sys
from zorse_megatron.cli.main import app

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

for name in sys.argv.pop(1).split(","):
    place, attribute = f"zorse_megatron.{name}".rsplit(".", 1)
    setattr(pkgutil.resolve_name(place), attribute, interrupt)
app()
"""


def plan_interrupted(directory: Path, *places: str) -> subprocess.CompletedProcess[str]:
    """Where the signal comes instead of what is there."""
    write_lab(directory)
    nodes = (
        "nodes: [{name: a, gpus: 1 x A100-40, nics: 9 Gb/s}, {name: b, gpus: 1 x T4, nics: 9 Gb/s}]"
    )
    (directory / "cluster.yaml").write_text(nodes)
    command = [sys.executable, "-c", PROGRAM, ",".join(places), "plan", *map(str, WORKLOAD)]
    return subprocess.run(
        [*command, "--out", "found.json"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_ctrl_c_writes_the_fastest_plan_so_far(tmp_path):
    result = plan_interrupted(tmp_path, SEARCHING)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines().count(CUT_SHORT) == 1
    assert load_plan(tmp_path / "found.json").predictions.iteration_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("places", [(STOCK,), (SEARCHING, ENDING)])
def test_ctrl_c_without_a_plan_or_for_the_second_time_ends_at_once(tmp_path, places):
    result = plan_interrupted(tmp_path, *places)
    assert result.returncode == 130, result.stderr
    assert not (tmp_path / "found.json").exists()
    assert "Traceback" not in result.stderr
