"""What `zorse plan` says first: for clusters of all sorts, by a quick strategy."""

import json
import re
import shlex
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from tests.printed import each_search_once
from tests.unit.cli_samples import EXAMPLES, FLAGS, WORKLOAD
from zorse_megatron.cli.gpu_selection import Found, spares
from zorse_megatron.cli.main import app
from zorse_megatron.cli.plan_options import tokens_named
from zorse_megatron.errors import ZorseError
from zorse_megatron.flags.model_in_flags import shape_from_flags
from zorse_megatron.flags.torch_builds import short_build_note
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS, flags_of_shape

pytestmark = pytest.mark.usefixtures("few_layouts")  # what stock takes is another test's
ONE = "nodes: [{gpus: 1 x RTX3090}]"
NEVER_MEASURED = "nodes: [{gpus: 2 x RTX5090}]"
MIX = "nodes: [{name: a, gpus: [1 x A6000, 1 x V100-16, 1 x P100, 1 x T4], nics: 10 Gb/s}]"
PROFILE = ("--profile", str(EXAMPLES / "mini-profile.json"), "--dtype", "float16")


def example(name: str) -> str:
    return (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")


CLUSTERS = {
    "lab": (example("two-node-lab"), "llama-3b", 16, ()),
    "mini-b": (example("mini-b"), "llama-3b", 128, ("--seq-length", "1024", "--use-all", *PROFILE)),
    "two-sites": (example("two-sites"), "llama-3b", 32, ("--dtype", "auto", "--use-all")),
    "one": (ONE, "llama-1b", 16, ()),
    "never measured": (NEVER_MEASURED, "llama-1b", 8, ()),
    "four kinds": (MIX, "gpt-1.3b", 12, ()),
}


def planned(run, tmp_path, cluster, *more):
    (tmp_path / "these.yaml").write_text(cluster)
    result = run("plan", "--cluster", "these.yaml", *more)
    assert result.exit_code == 0, result.output
    return result.stdout


def command_in(lines: list[str]) -> list[str]:
    """The words of the last line."""
    assert lines[-1].startswith("next")
    return shlex.split(lines[-1].partition(": ")[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", CLUSTERS)
def test_the_answer_has_what_one_wants_to_know(name, run, tmp_path):
    cluster, model, batch, options = CLUSTERS[name]
    told = planned(
        *(run, tmp_path, cluster, "--model", model, "--global-batch-size", batch),
        *("--strategy", "cephalo", "--tokens", "1T", "--out", "new.json", *options),
    )
    lines = told.splitlines()
    assert re.match(
        r"[\d.,]+ (us|ms|s|min) per iteration, [\d,.]+ tokens/s, ± \d+ % \(simulated", lines[0]
    )
    assert lines[1].startswith("Stock Megatron")
    for start in ("1T tokens take", "GPUs used: ", "Limited by ", "Plan: "):
        assert any(line.startswith(start) for line in lines), start
    assert "written to new.json" in told
    assert "0.000" not in told
    words = command_in(lines)
    assert words[:2] in (["zorse", "launch"], ["zorse", "explain"])
    again = CliRunner().invoke(app, words[1:])
    assert again.exit_code == 0, again.output


def test_without_a_file_the_next_command_writes_one(run):
    plan = ("plan", "--cluster", "cluster.yaml", "--strategy", "cephalo", "--use-all")
    told = run(*plan, "--", "pretrain_gpt.py", *FLAGS).stdout.splitlines()
    words = command_in(told)
    assert words == ["zorse", *plan, "--out", "plan.json", "--", "pretrain_gpt.py", *FLAGS]
    assert parsed(words).params["out"].name == "plan.json"
    quoted = run(*plan, "--model", " ".join(FLAGS), "--out", "new.json").stdout.splitlines()
    launch = command_in(quoted)
    assert launch[-len(FLAGS) :] == FLAGS
    assert run(*launch[1:]).exit_code == 0


def parsed(words: list[str]) -> typer.Context:
    group = typer.main.get_command(app)
    command = group.commands[words[1]]
    parent = group.make_context("zorse", words[1:])
    return command.make_context(words[1], words[2:], parent=parent)


def test_what_is_to_be_done_is_in_the_short_answer(run, tmp_path):
    """A build of torch, and an attention that the GPUs do not have."""
    told = planned(
        *(run, tmp_path, MIX, "--strategy", "cephalo", "--use-all", "--", "pretrain.py"),
        *(*FLAGS[:-1], "12", "--attention-backend", "flash"),
    )
    assert "V100-16, P100 need: pip install 'torch==" in told
    assert "V100-16 and P100 and T4 cannot run what --attention-backend asks for" in told


@each_search_once()
def test_details_follow_the_answer(run):
    plan = ("plan", *WORKLOAD, "--strategy", "cephalo", "--use-all")
    short = run(*plan).stdout.splitlines()
    long = run(*plan, "--verbose").stdout.splitlines()
    assert not any(line.startswith(("note: ", "rejected: ", "No plan can")) for line in short)
    assert long[0] == short[0]
    for start in ("note: ", "No plan can take less than ", "Searched in "):
        assert any(line.startswith(start) for line in long), start


def test_the_answer_for_programs_has_the_same_in_full_precision(run):
    told = run(
        *("plan", *WORKLOAD, "--use-all", "--json"),
        *("--tokens", "300B", "--strategy", "cephalo", "--out", "new.json"),
    )
    answer = json.loads(told.stdout)
    low, high = answer["iteration_between_s"]
    assert low == pytest.approx(answer["iteration_s"] * (1 - answer["error_share"]))
    assert high == pytest.approx(answer["iteration_s"] * (1 + answer["error_share"]))
    assert answer["times_rest_on"] == "from published figures"
    even, best = answer["stock"]["even"], answer["stock"]["best"]
    assert best["fits"] and best["iteration_s"] <= even["iteration_s"]
    assert "--pipeline-model-parallel-size" in best["flags"]
    assert [len(host["gpus"]) for host in best["hosts"]] == [4, 4]
    assert answer["stock"]["recommended"] is False  # not instead of a baseline
    days = answer["training"]["days"]
    assert days == pytest.approx(3e11 / answer["tokens_per_s"] / 86400)
    assert answer["training"]["days_between"] == pytest.approx(
        [days * (1 - answer["error_share"]), days * (1 + answer["error_share"])]
    )
    assert answer["left_out_ranks"] == []
    assert answer["next_command"].startswith("zorse launch new.json --cluster cluster.yaml")


def test_what_layer_times_rest_on_decides_the_error(run, tmp_path):
    """Wider for one group (no run of a pipeline), for GPUs that nobody measured, and float32."""

    def error(cluster, *more):
        told = planned(
            *(run, tmp_path, cluster, "--model", "llama-3b", "--global-batch-size", "8"),
            *("--strategy", "cephalo", "--seq-length", "1024", "--json", *more),
        )
        answer = json.loads(told)
        return answer["error_share"], answer["times_rest_on"]

    pair = "nodes: [{gpus: 2 x A100-40}]"
    assert error(pair, *PROFILE) == (pytest.approx(0.16), "calibrated by your profile")
    published, basis = error(pair)
    assert (published, basis) == (pytest.approx(0.2126, abs=1e-3), "from published figures")
    unknown, basis = error("nodes: [{gpus: 2 x B200}]")
    assert unknown > published
    assert basis == "from data sheets, B200 never measured"
    assert error(pair, "--dtype", "float32")[0] > published
    mixed = "nodes: [{gpus: [1 x A100-40, 1 x A40]}]"
    assert error(mixed, *PROFILE)[1] == "A40 from published figures, others by your profile"


@pytest.mark.parametrize(
    ("text", "count"),
    [("300B", 3e11), ("1T", 1e12), ("1.5e12", 1.5e12), ("20", 20), ("7m", 7e6), ("0.5 t", 5e11)],
)
def test_numbers_of_tokens(text, count):
    assert tokens_named(text).count == pytest.approx(count)


@pytest.mark.parametrize("text", ["", "many", "-1T", "0", "1TB", "nan", "1e99", "1e12T"])
def test_what_is_no_number_of_tokens_is_refused(text, run):
    with pytest.raises(ZorseError) as error:
        tokens_named(text)
    (problem,) = error.value.problems
    assert problem.where == "--tokens"
    assert problem.found == f'"{text}"'


def test_spares_are_named():
    cluster = parse_cluster(example("two-sites").encode())
    found = Found(
        costs=None,
        outcome=None,
        stock=None,
        ranks=(0, 1, 2, 3, 5),
        points=(),
        whole=SimpleNamespace(cluster=cluster),
        cluster_text="",
    )
    assert spares(found) == "left out as spares: 1 L4 of node l4, 2 T4 of node t4"


def test_which_build_of_torch_to_install_is_one_line():
    assert short_build_note(["A100-40"]) == ""
    note = short_build_note(["V100-16", "A6000"])
    assert note.startswith("V100-16 need: pip install 'torch==")
    assert short_build_note(["P100", "B200"]) == (
        "No published build of torch runs on all of P100, B200"
    )


@pytest.mark.parametrize("name", MODELS)
def test_flags_say_the_shape_that_they_are_made_of(name):
    shape = MODELS[name]
    flags = flags_of_shape(shape)
    if shape.activation == "relu":
        assert flags == ()
        return
    found = shape_from_flags(flags)
    same = {"name": shape.name, "max_positions": shape.max_positions}
    assert {**vars(found), **same} == vars(shape)
