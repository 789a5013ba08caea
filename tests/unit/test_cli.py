import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from tests.unit.plan_samples import good, load
from zorse_megatron import __version__
from zorse_megatron.cli.main import app
from zorse_megatron.plan.plan_file import fingerprint


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run `zorse` in a directory that has a good.json and a bad.json with two problems."""
    monkeypatch.chdir(tmp_path)
    bad = good()
    bad["chunks"][1]["layers"] = [6, 7]
    bad["groups"][1]["replicas"][0]["num_microbatches"] = 7
    (tmp_path / "good.json").write_text(json.dumps(good()))
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_check_good(run):
    result = run("check", "good.json")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"good.json: OK, plan {fingerprint(load(good()))}: 5 ranks")
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0 a", "0 to 4", "0", "4 x 4 samples", "75.0 %"],
        ["", "", "1", "4 x 2 samples", "25.0 %"],
        ["1", "5 to 6", "2", "8 x 3 samples", "100.0 %"],
        ["2", "7 to 11", "4", "6 x 3 samples", "50.0 %"],
        ["", "", "3", "6 x 1 sample", "50.0 %"],
    ]


def test_check_joins_equal_replicas_and_keeps_brackets(run, tmp_path):
    plan = good()
    plan["groups"][1]["name"] = "[red]"
    plan["groups"][1]["replicas"] = [
        {"ranks": [rank], "micro_batch_size": 3, "num_microbatches": 2, "shard_weight": 1}
        for rank in (2, 5, 6, 7)
    ]
    (tmp_path / "good.json").write_text(json.dumps(plan))
    result = run("check", "good.json")
    row = next(line for line in result.stdout.splitlines() if "[red]" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "1 [red]",
        "5 to 6",
        "2, 5 to 7",
        "2 x 3 samples each",
        "25.0 % each",
    ]


def test_check_bad_prints_every_problem_unwrapped(run):
    result = run("check", "bad.json")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "bad.json cannot be used (2 problems):"
    assert lines[1].startswith("  1. bad.json: chunks: found layer 5 in no chunk; expected")
    assert lines[2].startswith("  2. bad.json: groups[1]: found 21 samples (replicas[0] 3 x 7")
    assert len(lines) == 3


def test_problems_are_not_read_as_markup(run, tmp_path):
    (tmp_path / "bad.json").write_text(json.dumps({**good(), "[red]": 1}))
    assert 'unknown key "[red]"' in run("check", "bad.json").stdout


def test_check_json(run):
    result = run("check", "--json", "good.json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["ok"] is True
    assert answer["problems"] == []
    (file,) = answer["files"]
    assert (file["path"], file["kind"], file["ok"]) == ("good.json", "plan", True)
    assert file["fingerprint"] == fingerprint(load(good()))
    assert file["groups"][0]["layers"] == [[0, 5]]
    assert [each["shard_percent"] for each in file["groups"][0]["replicas"]] == [75, 25]


@pytest.mark.parametrize(("name", "count"), [("bad.json", 2), ("no.json", 1)])
def test_check_json_bad(run, name, count):
    result = run("check", "--json", name)
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    assert [set(each) for each in answer["problems"]] == [
        {"where", "found", "expected", "remedy"}
    ] * count


def test_version(run):
    assert run("--version").stdout == f"zorse-megatron {__version__}\n"


def test_actions(run):
    every = run("actions", "good.json")
    assert every.exit_code == 0, every.output
    lines = every.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"rank {rank}" for rank in range(5)]
    assert run("actions", "good.json", "--rank", "3").stdout.splitlines() == [lines[3]]


def test_actions_of_a_rank_that_is_not_there(run):
    result = run("actions", "good.json", "--rank", "5")
    assert result.exit_code == 2
    assert "found 5; expected 0 to 4" in result.output


def test_actions_of_a_bad_plan(run):
    result = run("actions", "bad.json")
    assert result.exit_code == 1
    assert "2 problems" in result.stderr


@pytest.mark.slow
def test_the_command_needs_neither_torch_nor_megatron():
    # The others are what commands import on demand.
    script = """
import sys
import zorse_megatron.cli.main
print(sorted({"matplotlib", "numpy"} & set(sys.modules)))
import zorse_megatron.planner.explain
import zorse_megatron.planner.find_plan
import zorse_megatron.plots.figures
import zorse_megatron.plots.gantt
print(sorted({"torch", "megatron"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout == "[]\n[]\n", result.stderr


# What a plan is made from is asked for by the same options wherever it counts.
WORKLOAD = {
    *("--cluster", "--model", "--profile", "--global-batch-size", "--seq-length", "--dtype"),
    "--margin",
}
WITH_A_WORKLOAD = {
    **{name: WORKLOAD for name in ("plan", "explain", "check", "compare")},
    # Its GPUs have all of their memory.
    "emulate": WORKLOAD - {"--margin"},
    # These take the training command alone, or no model.
    **{name: {"--cluster"} for name in ("launch", "join")},
    "discover": {"--profile"},
}


def test_options_of_a_workload_are_in_all_commands_that_have_one():
    commands = typer.main.get_command(app).commands
    found = {
        name: WORKLOAD & {option for each in command.params for option in each.opts}
        for name, command in commands.items()
    }
    assert {name: options for name, options in found.items() if options} == WITH_A_WORKLOAD
