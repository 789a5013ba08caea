"""What all commands have in common: help, completion, one name per option, JSON, colours."""

import json
import os
import re
import subprocess
import sys

import pytest
from rich.table import Table
from typer.main import get_command

from tests.unit.cli_samples import FLAGS
from zorse_megatron import __version__
from zorse_megatron.cli.console import print_plain, print_table
from zorse_megatron.cli.main import app

WITHOUT_JSON = {"join"}


def commands(group=None, path=()):
    """All commands: words -> command."""
    for name, command in (group or get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def options(command):
    return {option for parameter in command.params for option in parameter.opts}


COMMANDS = dict(commands())
IN_JSON = [words for words in COMMANDS if words[-1] not in WITHOUT_JSON]


@pytest.mark.parametrize("words", [(), ("profile",), *COMMANDS], ids=" ".join)
def test_h_is_help(words, run):
    short, long = run(*words, "-h"), run(*words, "--help")
    assert short.exit_code == 0 and "Usage: " in short.stdout
    assert short.stdout == long.stdout


def test_what_is_written_is_out_everywhere():
    for words, command in COMMANDS.items():
        assert "--output" not in options(command), words
    assert "--out" in options(COMMANDS["discover",])


@pytest.mark.parametrize("words", IN_JSON, ids=" ".join)
def test_options_that_cannot_be_read_are_json_too(words, run):
    assert "--json" in options(COMMANDS[words])
    result = run(*words, "--no-such-option", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 2
    assert answer["ok"] is False
    (problem,) = answer["problems"]
    assert "--no-such-option" in problem["found"]
    assert problem["remedy"] == f"Run: {problem['where']} --help."
    # After -- it is the training command's, and without it people are told.
    assert not run(*words, "--no-such-option", "--", "--json").stdout


def test_launch_answers_in_json(run):
    given = ("launch", "plan.json", "--cluster", "cluster.yaml", "--json")
    lines = json.loads(run(*given, "--torchrun", "--", *FLAGS).stdout)
    assert lines["ok"] and "torchrun" in lines["lines"] and lines["written"] is None
    job = json.loads(run(*given, "--slurm", "job.sh", "--", *FLAGS).stdout)
    assert job == {"ok": True, "written": "job.sh", "lines": None, "resumes": False}


def test_half_a_job_is_refused(run, monkeypatch):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    result = run("discover", "--out", "new.yaml")
    assert result.exit_code == 1
    assert "Put srun in front of the command" in " ".join(result.output.split())


def test_version(run):
    assert run("--version").stdout == f"zorse-megatron {__version__}\n"


def test_actions(run):
    told = ("check", "plan.json", "cluster.yaml", "--actions")
    lines = run(*told).stdout.splitlines()[-8:]
    assert [line.split(":")[0] for line in lines] == [f"rank {rank}" for rank in range(8)]
    assert json.loads(run(*told, "--json").stdout)["actions"] == [lines]


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


@pytest.mark.slow
def test_completion():
    environment = {"_ZORSE_COMPLETE": "complete_bash", "COMP_WORDS": "zorse dis", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "zorse_megatron"]
    completed = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | environment
    )
    assert completed.stdout.split() == ["discover"]


@pytest.mark.parametrize(("columns", "width"), [(None, 120), ("60", 60), ("x", 120)])
def test_tables_are_as_wide_as_columns_says(columns, width, monkeypatch, capsys):
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    table = Table("A")
    table.add_row("word " * 100)
    print_table(table)
    assert max(map(len, capsys.readouterr().out.splitlines())) in range(width - 5, width + 1)


def test_no_color(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    print_plain("[red]text[/red]")
    print_table(Table("A", style="red", header_style="green"))
    assert not re.search(r"\x1b\[[0-9;]*3\d", capsys.readouterr().out)
