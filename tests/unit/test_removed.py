"""Commands and options that were removed: the error says what to do now."""

import json

import pytest
from typer.testing import CliRunner

from zorse_megatron.cli.main import app

PLAN = ["plan", "--cluster", "lab.yaml"]
LAUNCH = ["launch", "plan.json", "--cluster", "cluster.yaml", "--slurm", "train.sh"]


@pytest.mark.parametrize(
    ("words", "name", "way"),
    [
        (["follow", "status", "--cluster", "c.yaml"], "zorse follow", "zorse plan --from-status"),
        (["follow", "--help"], "zorse follow", "zorse plan --from-status"),
        (["compare-plans", "--model", "m"], "zorse compare-plans", "zorse compare --simulated"),
        (["profile", "show", "p.json"], "zorse profile show", "Run zorse check PROFILE"),
        (["profile", "import", "t.csv"], "zorse profile import", "scripts.import_profile"),
        (["simulate", "p.json", "--memory", "m.png"], "zorse simulate", "Run zorse explain"),
        (["schema"], "zorse schema", "plan.schema.json"),
        (["replan", "--cluster", "c.yaml"], "zorse replan", "zorse plan --without NODE"),
        (["explain", "p.json", "--no-replan"], "zorse explain --no-replan", "--search only"),
        ([*PLAN, "--may-leave-out"], "zorse plan --may-leave-out", "unless there is --use-all"),
        ([*PLAN, "--used-cluster=c.yaml"], "zorse plan --used-cluster", "written beside --out"),
        ([*PLAN, "--wire", "bf16"], "zorse plan --wire", "now --grad-reduce-dtype"),
        ([*PLAN, "--sets-across-nodes"], "zorse plan --sets-across-nodes", "--tp-across-nodes"),
        ([*PLAN, "--equal-parts"], "zorse plan --equal-parts", "now --even-tp"),
        ([*PLAN, "--host-activations"], "zorse plan --host-activations", "--activation-offload"),
        ([*PLAN, "--budget=3"], "zorse plan --budget", "the GPUs that you pay for"),
        ([*LAUNCH, "--follow", "--gain 0.1"], "zorse launch --follow", "zorse plan --from-status"),
    ],
)
def test_the_way_now_is_named(words: list[str], name: str, way: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert f"{name}: found" in said and "was removed" in said and way in said
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 2
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["where"] == name and way in problem["remedy"]


def test_other_words_are_unknown_as_before() -> None:
    assert "No such command 'folow'" in CliRunner().invoke(app, ["folow"]).stderr
    assert "No such option" in CliRunner().invoke(app, ["move", "--follow", "x"]).stderr
