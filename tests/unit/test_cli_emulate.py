"""`zorse emulate`: what it refuses, before anything is started. See tests/megatron for runs."""

import contextlib
import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.unit.cli_samples import FLAGS, WORKLOAD, lab_plan, runner_in
from zorse_megatron.cli.commands import emulate as command
from zorse_megatron.cli.commands import emulate as compare
from zorse_megatron.cli.console import CommandError
from zorse_megatron.cli.main import app
from zorse_megatron.cli.options import DEFAULT_MARGIN
from zorse_megatron.cli.workload import workload_of
from zorse_megatron.cli.workload_costs import costs_of_workload
from zorse_megatron.emulate.tiny_model import TinyTraining, training_flags
from zorse_megatron.errors import Problem
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import computing_from_flags
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import MODELS, JobRecompute
from zorse_megatron.plan.plan_file import parse_plan

BASE = ("emulate", "plan.json", "--cluster", "cluster.yaml", "--model", "model.json")


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
        (("--slow-rank", "8=2@3"), '--slow-rank: found "8"; expected a rank from 0 to 7'),
        (("--slow-rank", "0=2@0"), '--slow-rank: found "0=2@0"'),
        (("--slow-rank", "0=2@9-8"), '--slow-rank: found "0=2@9-8"'),
        (("--slow-rank", "0=x@3"), '--slow-rank: found "0=x@3"'),
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


def test_stock_trains_with_the_flags_of_the_layout(tmp_path, monkeypatch):
    """On the nodes and GPUs in its order, simulated as stock runs it."""
    begun = []

    def begin(job, *_arguments):
        begun.append((job, job.training(3)))
        raise CommandError("enough", [Problem(where="a", found="b", expected="c", remedy="d")])

    monkeypatch.setattr(command, "_run", begin)
    run = runner_in(tmp_path, monkeypatch)
    plan = lab_plan()
    for chunk, number in zip(plan["chunks"], (1, 0), strict=True):
        chunk["group"] = number
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    flags = (*FLAGS, "--micro-batch-size", "2")
    run(*BASE[:4], "--", *flags, "--recompute-activations")
    run(*BASE[:4], "--stock", "--", *flags)
    (ours, training), (stock, same) = begun
    assert training.recompute is not None and ours.system.plan is not None
    assert same.recompute is None and stock.system.plan is None
    assert ours.system.gpus == tuple(range(8)) and stock.system.gpus == (4, 5, 6, 7, 0, 1, 2, 3)
    words = list(stock.system.flags)
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == "Et*5|tttL"
    assert stock.simulated_on.inputs.kinds == ("V100-16",) * 4 + ("A6000",) * 4
    assert stock.simulated("plan.json").iteration_s > ours.simulated("plan.json").iteration_s


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--rebalance",), "--rebalance: found it with --stock"),
        (("--status", "s"), "--status: found it with --stock"),
        (
            ("--", *FLAGS, "--pipeline-model-parallel-size", "4"),
            "found 4; expected 2, as the layout",
        ),
    ],
)
def test_what_stock_cannot_do_is_refused(tmp_path, monkeypatch, more, said):
    run = runner_in(tmp_path, monkeypatch)
    model = () if "--" in more else BASE[4:]
    result = run(*BASE[:4], *model, "--stock", *more)
    assert result.exit_code == 1
    assert said in result.output


def test_a_plan_that_is_no_layout_of_stock_is_not_emulated_by_it(run, tmp_path):
    def change(plan):
        plan["groups"][1]["replicas"][2]["shard_weight"] = 2.0

    write_plan(tmp_path, change)
    result = run("--stock")
    assert result.exit_code == 1
    assert "groups[1].replicas[2].shard_weight: found 2; expected equal shards" in result.output


def test_compare_refuses_what_it_cannot_do(run, tmp_path, monkeypatch):
    compare = ("compare", *WORKLOAD)
    (tmp_path / "there").write_text("a file")
    result = CliRunner().invoke(app, [*compare, "--out", "there"])
    assert result.exit_code == 1
    assert "--out there: found a file; expected a directory, or nothing" in result.output
    many = "nodes:\n  - {name: n, count: 5, gpus: 8 x T4, nics: 25 Gb/s}\n"
    (tmp_path / "cluster.yaml").write_text(many)
    result = CliRunner().invoke(app, [*compare, "--out", "new"])
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
    for out, why in (("plan.json", "a file"), ("plan.json/compared", "no directory that can be")):
        result = run("compare", *WORKLOAD, "--out", out)
        assert result.exit_code == 1
        assert f"--out {out}: found {why}" in result.output


@pytest.mark.parametrize(
    "flags",
    [
        ["--hidden-dropout", "0.1"],
        ["--attention-backend", "unfused"],
        ["--transformer-impl", "local"],
        ["--accumulate-allreduce-grads-in-fp32"],
    ],
)
def test_compare_prices_as_the_command_computes(tmp_path, monkeypatch, flags):
    """What a layer and its gradients take, and how long, as `zorse plan` has it."""
    seen = []

    def nobody(inputs, *_more):
        seen.append(inputs)
        raise CommandError("enough", [Problem(where="a", found="b", expected="c", remedy="d")])

    monkeypatch.setattr("zorse_megatron.emulate.compare.compared_systems", nobody)
    run = runner_in(tmp_path, monkeypatch)
    usual = [*FLAGS, "--hidden-dropout", "0", "--attention-dropout", "0"]
    told = [usual, [*usual, *flags]]
    for each in told:
        run("compare", "--cluster", "cluster.yaml", "--out", "there", "--", *each)
    assert len(seen) == 2
    cluster = load_cluster("cluster.yaml")
    for inputs, each in zip(seen, told, strict=True):
        workload = workload_of(model=None, flags=each)
        planned = costs_of_workload(
            cluster, workload, [], global_batch_size=16, margin=DEFAULT_MARGIN
        ).inputs
        assert _prices(inputs) == _prices(planned)
    assert _prices(seen[0]) != _prices(seen[1])


def _prices(inputs):
    times = [inputs.compute.layer(kind, 2) for kind in ("A6000", "V100-16")]
    return times, inputs.memory.activation_bytes(2, "none"), inputs.memory.gradient_bytes(1000)


@pytest.mark.parametrize(
    "recompute",
    [
        None,
        JobRecompute(mode="selective"),
        JobRecompute(mode="full", num_layers=3),
        JobRecompute(mode="full", layers_at_once=2),
        JobRecompute(mode="full"),
    ],
)
def test_the_tiny_model_recomputes_as_the_real_one(recompute):
    training = TinyTraining(
        model=MODELS["llama-1b"], global_batch_size=8, iterations=2, recompute=recompute
    )
    flags = [*training_flags(training, []), "--vocab-size", "256"]
    assert computing_from_flags(read_command(flags).args).recompute == recompute


def test_emulate_hands_on_what_is_recomputed(tmp_path, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def emulator(_inputs, training, **_options):
        seen.append(training.recompute)
        raise CommandError("enough", [Problem(where="a", found="b", expected="c", remedy="d")])
        yield

    monkeypatch.setattr("zorse_megatron.emulate.emulator.emulator", emulator)
    run = runner_in(tmp_path, monkeypatch)
    run(*BASE[:4], "--", *FLAGS, "--recompute-activations")
    assert seen == [JobRecompute(mode="selective")]


def test_the_memory_of_a_tiny_model_is_no_zero():
    gpu = SimpleNamespace(memory_bytes=48e9)
    costs = SimpleNamespace(
        cluster=SimpleNamespace(gpu_of_rank=lambda _rank: gpu),
        inputs=SimpleNamespace(kinds=("A6000",)),
    )
    run = SimpleNamespace(
        system=SimpleNamespace(gpus=(0,)),
        peak_bytes=(23e6,),
        iterations_s=(1.0,),
        busy_s=lambda _rank: 0.5,
    )
    (cell,) = command._ranks(run, costs).columns[-1].cells
    assert str(cell) == "21.9 MiB, 0.05 %"


def test_a_well_known_model_has_the_plans_sequence_length():
    plan = parse_plan(json.dumps(lab_plan()).encode())
    found = workload_of(model="llama-3b", flags=None, plan=plan).model
    assert found == dataclasses.replace(MODELS["llama-3b"], seq_length=plan.model.seq_length)
    assert plan.model.seq_length != MODELS["llama-3b"].seq_length
