"""`zorse emulate`: what it refuses, before anything is started. See tests/megatron for runs."""

import json
import re

import pytest
from typer.testing import CliRunner

from tests.unit.cli_samples import lab_plan, runner_in
from zorse_megatron.cli import compare
from zorse_megatron.cli import emulate as command
from zorse_megatron.cli.main import app

BASE = ("emulate", "plan.json", "--cluster", "cluster.yaml", "--model", "model.yaml")


@pytest.fixture
def run(tmp_path, monkeypatch):
    def nothing_starts(*_arguments):
        raise AssertionError("the job was started")

    monkeypatch.setattr(command, "_run", nothing_starts)
    runner = runner_in(tmp_path, monkeypatch)
    return lambda *more: runner(*BASE, *more)


def write_plan(directory, change):
    plan = lab_plan()
    change(plan)
    (directory / "plan.json").write_text(json.dumps(plan))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dilation", "0"), "--dilation: found 0.0; expected a number above 0"),
        (("--dilation", "nan"), "--dilation: found nan"),
        (("--jitter", "-1"), "--jitter: found -1.0; expected a number from 0 to 10"),
        (("--slow-rank", "8=2"), '--slow-rank: found "8"; expected a rank from 0 to 7'),
        (("--slow-kind", "T4=2"), "--slow-kind: found"),
        (("--slow-link", "nic"), '--slow-link: found "nic"'),
    ],
)
def test_bad_options(run, options, said):
    result = run(*options)
    assert result.exit_code == 1
    assert said in result.output


def test_a_plan_for_another_cluster(run, tmp_path):
    def change(plan):
        plan["cluster"]["gpu_kinds"] = ["A6000"] * 8

    write_plan(tmp_path, change)
    result = run("--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False


def test_a_good_plan_would_be_started(run):
    with pytest.raises(AssertionError, match="the job was started"):
        raise run().exception


def test_compare_refuses_what_it_cannot_do(run, tmp_path, monkeypatch):
    compare = ("compare", "--cluster", "cluster.yaml", "--model", "model.yaml")
    (tmp_path / "there").write_text("a file")
    result = CliRunner().invoke(app, [*compare, "--out", "there", "--global-batch-size", "16"])
    assert result.exit_code == 1
    assert "--out there: found a file; expected a directory, or nothing" in result.output
    many = "nodes:\n  - {name: n, count: 5, gpus: 8 x T4, nics: 25 Gb/s}\n"
    (tmp_path / "cluster.yaml").write_text(many)
    result = CliRunner().invoke(app, [*compare, "--out", "new", "--global-batch-size", "16"])
    assert result.exit_code == 1
    assert "--cluster: found 40 GPUs; expected at most 32" in result.output


def test_a_link_that_is_not_there_is_answered_with_some_that_are(run):
    result = run("--slow-link", "new/nic0:uot=2")
    assert result.exit_code == 1
    told = re.search(
        r'--slow-link: found "(.+)"; expected one of .+, such as (.+?)\. ', result.output
    )
    assert told is not None and told[1] == "new/nic0:uot"
    names = told[2].split(", ")
    assert names[0] == "new/nic0:out" and len(names) == 6
    for name in names:
        with pytest.raises(AssertionError, match="the job was started"):
            raise run("--slow-link", f"{name}=2").exception


def test_all_that_is_slow_and_not_there_is_told_at_once(run):
    slow = ("--slow-rank", "8=2", "--slow-rank", "x", "--slow-kind", "T4=2", "--slow-link", "nic=2")
    result = run(*slow, "--slow-link", "new/nic0:out", "--jitter", "-1")
    assert result.exit_code == 1
    assert "(6 problems)" in result.output
    for option in ('rank: found "8"', 'rank: found "x"', "kind", 'link: found "nic"', "link"):
        assert f"--slow-{option}" in result.output


def test_a_comparison_that_could_not_be_written_is_not_begun(tmp_path, monkeypatch):
    def nothing_is_trained(*_arguments):
        raise AssertionError("the comparison was begun")

    monkeypatch.setattr(compare, "_compared", nothing_is_trained)
    run = runner_in(tmp_path, monkeypatch)
    inputs = ("--cluster", "cluster.yaml", "--model", "model.yaml", "--global-batch-size", "16")
    for out, why in (("plan.json", "a file"), ("plan.json/compared", "no directory that can be")):
        result = run("compare", *inputs, "--out", out)
        assert result.exit_code == 1
        assert f"--out {out}: found {why}" in result.output
