"""check, launch and plan refuse what a run refuses, in the same words."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.flag_samples import all_words
from tests.unit.cli_samples import FLAGS, lab_plan, runner_in
from zorse_megatron.errors import FlagError
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.command_findings import refuse_misfit
from zorse_megatron.schema.plan.plan_json import parse_plan

PLAN = parse_plan(json.dumps(lab_plan()).encode(), source="plan.json")
REFUSED = [
    ("--context-parallel-size 2", "--context-parallel-size: found 2"),
    ("--optimizer sgd", "--optimizer: found 'sgd'; expected adam"),
    ("--use-torch-fsdp2", "--use-torch-fsdp2"),
    ("--ckpt-format torch", "--ckpt-format: found 'torch'; expected torch_dist"),
    ("--rampup-batch-size 4 4 100", "--rampup-batch-size"),
    ("--bf16", "--bf16: found bf16 for groups[1], which has V100-16"),
    ("--seq-lenght 512", "--seq-lenght: found a flag that neither"),
    ("--multi-latent-attention", "--multi-latent-attention"),
    ("--experimental-attention-variant gated_delta_net --linear-attention-freq 2", "gated_delta"),
    ("--heterogeneous-layers-config-encoded-json {}", "--heterogeneous-layers-config-encoded"),
    ("--yaml-cfg missing.yaml", "--yaml-cfg: found 'missing.yaml'"),
    ("--enable-cuda-graph", "--enable-cuda-graph"),
    ("--micro-batch-size 3", "--micro-batch-size: found 3"),
    ("--recompute-granularity full", "--recompute-method"),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    return runner_in(tmp_path, monkeypatch)


def of_a_run(words, plan=PLAN):
    """What a run says before it imports torch."""
    try:
        refuse_misfit(read_command(words), plan, world_size=plan.world_size)
    except FlagError as error:
        return [str(problem) for problem in error.problems]
    return []


def without_types(words):
    """The plan is for V100s too, so the job's type is fp16, but where a test says another."""
    return [word for word in FLAGS if not ("--bf16" in words and word == "--fp16")]


@pytest.mark.parametrize(("flags", "found"), REFUSED)
def test_refused_by_check_launch_and_the_run(run, flags, found):
    words = [*without_types(flags.split()), *flags.split()]
    checked = run("check", "plan.json", "--", *words)
    launched = run("launch", "plan.json", "--cluster", "cluster.yaml", "--torchrun", "--", *words)
    assert checked.exit_code == 1 and launched.exit_code != 0
    for output in (checked.stdout, launched.output, "\n".join(of_a_run(words))):
        assert found in output
    assert "torchrun --" not in launched.output


OF_DERIVED_SIZES = ("model.", "num_attention_heads", "num_query_groups")
OF_ONE_PLAN = ("--bf16", "--micro-batch-size")


@pytest.mark.parametrize(
    ("flags", "found"), [case for case in REFUSED if not case[0].startswith(OF_ONE_PLAN)]
)
def test_refused_where_a_plan_is_made(run, flags, found):
    planned = run("plan", "--cluster", "cluster.yaml", "--", *FLAGS, *flags.split())
    assert planned.exit_code != 0
    assert found in planned.output


def test_where_a_plan_is_made_it_decides_what_is_recomputed(run):
    words = [*FLAGS, "--recompute-activations", "--pipeline-model-parallel-size", "2"]
    planned = run("plan", "--cluster", "cluster.yaml", "--", *words)
    assert planned.exit_code != 0
    for flag in ("--recompute-activations", "--pipeline-model-parallel-size"):
        assert f"{flag}: found" in planned.output


@pytest.mark.slow
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(words=st.sampled_from(all_words()))
def test_every_flag_has_the_same_verdict_in_check_and_in_a_run(run, words):
    command = [*FLAGS, *words]
    checked = run("check", "--json", "plan.json", "--", *command)
    problems = json.loads(checked.stdout)["problems"]
    said = [
        f"{each['where']}: found {each['found']}; expected {each['expected']}" for each in problems
    ]
    expected = of_a_run(command)
    if expected:
        assert [text.partition(". ")[0] for text in expected] == [
            text.partition(". ")[0] for text in said
        ][: len(expected)]
    else:
        # Sizes that Megatron derives are compared by check alone; the run does it once it has them.
        assert all(each.startswith(OF_DERIVED_SIZES) or "--" in each for each in said)


def test_a_script_may_have_flags_of_its_own(run, tmp_path):
    (tmp_path / "mine.py").write_text('parser.add_argument("--seq-lenghts")\n')
    plan = ("check", "plan.json", "--")
    own = run(*plan, "mine.py", *FLAGS, "--seq-lenghts", "3")
    assert own.exit_code == 0, own.output
    unheard = run(*plan, "mine.py", *FLAGS, "--my-own-idea", "3")
    assert unheard.exit_code == 0
    assert "--my-own-idea is no flag of Megatron's; mine.py must add it" in unheard.stdout
    slip = run(*plan, "mine.py", *FLAGS, "--seq-lenght", "3")
    assert slip.exit_code == 1 and "Did you mean --seq-length?" in slip.stdout
    for script in ([], ["pretrain_gpt.py"]):
        refused = run(*plan, *script, *FLAGS, "--my-own-idea", "3")
        assert refused.exit_code == 1 and "--my-own-idea" in refused.stdout


def test_recomputation_is_decided_once(run, tmp_path):
    plan = lab_plan()
    plan["groups"][1]["recompute"] = {"mode": "full"}
    plan["groups"][0]["replicas"][1]["recompute"] = {"mode": "selective"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    for flags in (["--recompute-activations"], ["--recompute-granularity", "selective"]):
        checked = run("check", "plan.json", "--", *FLAGS, *flags)
        assert f"{flags[0]}: found" in checked.stdout
        assert "groups[1].recompute says 'full'" in checked.stdout
        assert "groups[0].replicas[1].recompute says 'selective'" in checked.stdout
