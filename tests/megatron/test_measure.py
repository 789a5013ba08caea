"""`zorse discover` and `zorse profile measure` on real ranks that pretend to be two nodes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.megatron.launch import RunResult, run_ranks
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.cli.main import app
from zorse_megatron.flags.check import check_command
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import shape_from_flags
from zorse_megatron.flags.table import WITHOUT_DROPOUT
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.profile import load_profile
from zorse_megatron.live.watched_rank import LOST_RANK
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.planner.inputs.search_inputs import make_inputs

WORLD = 4
KINDS = ("cpu-0", "cpu-0", "cpu-1", "cpu-1")
NUM_TASKS = (1 + 5) + (1 + 5) + (2 + 5)
ONE_CPU = """\
gpu_kinds:
- {name: cpu-0, memory: 8 GB, memory_bandwidth: 5 GB/s, peak: {float32: 0.1 TFLOP/s}}
nodes:
- {name: node-0, gpus: 1 x cpu-0}
"""
TRAINING = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64"),
    *(*WITHOUT_DROPOUT, "--global-batch-size", "8"),
    *TOKENIZER_FLAGS,
)


def zorse(*words: str, death: str = "", grace_s: float = 30) -> RunResult:
    # Only of a rank that dies is the process that builds the layers a new one, not a fork.
    env = {"ZORSE_TEST_NODES": "2,2", "ZORSE_TEST_DEATH": death}
    return run_ranks(
        words,
        WORLD,
        entry="tests.megatron.measure_entry",
        timeout_s=240,
        env=env,
        grace_after_failure_s=grace_s,
    )


def discover(work: Path, *, death: str = "") -> RunResult:
    output = ("--out", str(work / "cluster.yaml"), "--largest-mb", "0.01", "--json")
    return zorse("discover", *output, death=death)


def measure(work: Path, *, death: str = "") -> RunResult:
    files = ("--cluster", str(work / "cluster.yaml"), "--out", str(work / "profile.json"))
    words = (*files, "--max-micro-batch", "2", "--json", "--", *TRAINING)
    return zorse("profile", "measure", *words, death=death)


def said(result: RunResult) -> dict:
    """What rank 0 printed as JSON."""
    output = result.check().outputs[0]
    assert all("{" not in other for other in result.outputs[1:]), "one rank speaks for all"
    return dict(json.loads(output[output.index("{") :]))


def check_that_one_says_so(result: RunResult, dead: int, reason: str) -> None:
    for rank, code in enumerate(result.returncodes):
        assert rank == dead or code == LOST_RANK, result.outputs[rank]
    output = "\n".join(result.outputs)
    (line,) = [line for line in output.splitlines() if "zorse: error:" in line]
    assert reason in line


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests of this file work, one after the other."""
    return tmp_path_factory.mktemp("measure")


def test_a_killed_rank_stops_all_and_what_was_measured_is_kept(work: Path) -> None:
    result = discover(work, death="3:5")
    check_that_one_says_so(result, dead=3, reason="rank 3 on node-1 was killed by signal 9")
    assert not (work / "cluster.yaml").exists()
    # Two devices and two messages were measured before the fifth measurement.
    assert len(load_profile(work / "profile.json").transfers) == 2


def test_the_rest_is_measured_in_the_next_run(work: Path) -> None:
    kept = load_profile(work / "profile.json").transfers
    found = said(discover(work))
    # Two devices again, as the cluster file was not written yet. Inside each node a send, gathers
    # and reductions over equal and unequal shards, and a sum; between nodes two sends and the rest.
    assert (found["measured"], found["known"]) == (2 + NUM_TASKS - 2, 2)
    cluster = load_cluster(work / "cluster.yaml")
    assert cluster.gpu_kinds == KINDS
    assert [node.name for node in cluster.nodes] == ["node-0", "node-1"]
    transfers = load_profile(work / "profile.json").transfers
    assert transfers[:2] == kept and len(transfers) == NUM_TASKS
    assert all(time_s > 0 for each in transfers for time_s in each.time_s)
    # Of gathers and reductions, inside each of two kinds of node and between them.
    assert len(load_profile(work / "profile.json").unequal_shards) == 2 * 3


def test_a_cluster_that_is_known_is_not_measured_again(work: Path) -> None:
    before = (work / "cluster.yaml").read_text(), (work / "profile.json").read_text()
    found = said(discover(work))
    assert (found["measured"], found["known"]) == (0, NUM_TASKS)
    assert before == ((work / "cluster.yaml").read_text(), (work / "profile.json").read_text())


def test_a_rank_killed_while_layers_are_measured_leaves_what_there_is(work: Path) -> None:
    # It is told that it starts, of two sizes of the layer, and of the embedding.
    result = measure(work, death="0:4")
    check_that_one_says_so(result, dead=0, reason="rank 0 on node-0 was killed by signal 9")
    (series,) = load_profile(work / "profile.json").times
    assert (series.part, series.gpu_kind, series.micro_batch_sizes) == ("layer", "cpu-0", (1, 2))


def test_each_kind_is_measured_once_and_the_profile_is_what_the_planner_needs(work: Path) -> None:
    first = load_profile(work / "profile.json").times[0]
    found = said(measure(work))
    assert found["measured_kinds"] == ["cpu-0", "cpu-1"]
    profile = load_profile(work / "profile.json")
    assert sorted((t.gpu_kind, t.part, t.micro_batch_sizes) for t in profile.times) == [
        (kind, part, (1, 2))
        for kind in ("cpu-0", "cpu-1")
        for part in ("embedding", "head", "layer")
    ]
    resumed = next(t for t in profile.times if (t.part, t.gpu_kind) == ("layer", "cpu-0"))
    assert resumed == first, "what was there is not measured again"
    assert found["measured"] == 2 * (3 * 2 + 1) - 2
    assert len(profile.transfers) == NUM_TASKS, "what discover found stays"


def test_nothing_is_measured_twice(work: Path) -> None:
    before = (work / "profile.json").read_text()
    found = said(measure(work))
    assert (found["measured"], found["known_kinds"]) == (0, ["cpu-0", "cpu-1"])
    assert (work / "profile.json").read_text() == before


def test_the_planner_makes_a_plan_of_both_files(work: Path) -> None:
    files = ("--cluster", str(work / "cluster.yaml"), "--profile", str(work / "profile.json"))
    out = ("--out", str(work / "plan.json"))
    words = ["plan", "--use-all", *files, *out, "--verbose", "--", *TRAINING]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    plan = load_plan(work / "plan.json")
    assert sorted(rank for group in plan.groups for rank in group.ranks) == list(range(WORLD))
    for kind in ("cpu-0", "cpu-1"):
        assert f"note: {kind}: measured" in result.output
    assert "memory: measured activations of layers and head" in result.output


def test_ranks_that_are_not_the_cluster_are_told(work: Path, tmp_path: Path) -> None:
    other = tmp_path / "cluster.yaml"
    other.write_text((work / "cluster.yaml").read_text().replace("cpu-1", "cpu-9"))
    files = ("--cluster", str(other), "--out", str(tmp_path / "profile.json"))
    result = zorse("profile", "measure", *files, "--", *TRAINING)
    for code, output in zip(result.returncodes, result.outputs, strict=True):
        assert code == 1, output
        assert "rank 2: found cpu-1; expected cpu-9" in output
    assert not (tmp_path / "profile.json").exists()


def test_an_unknown_card_is_measured_alone_and_planned_with(tmp_path: Path) -> None:
    """Without a cluster file: what it can do is told, and a plan for four of them rests on it."""
    profile = tmp_path / "profile.json"
    words = ("profile", "measure", "--out", str(profile), "--max-micro-batch", "2", "--json")
    env = {"ZORSE_TEST_NODES": "1"}
    entry = "tests.megatron.measure_entry"
    result = run_ranks([*words, "--", *TRAINING], 1, entry=entry, timeout_s=120, env=env)
    found = said(result)
    assert (found["measured_kinds"], found["measured"]) == (["cpu-0"], 3 * 2 + 1)
    (kind,) = found["gpu_kinds"]
    assert kind["name"] == "cpu-0" and {"memory", "memory_bandwidth", "peak"} < set(kind)
    nodes = [{"gpus": [{"kind": "cpu-0", "count": 2}], "nics": "10 Gb/s", "count": 2}]
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(json.dumps({"gpu_kinds": [kind], "nodes": nodes}))
    files = ("--cluster", str(cluster), "--profile", str(profile))
    planned = CliRunner().invoke(app, ["plan", *files, "--verbose", "--", *TRAINING])
    assert planned.exit_code == 0, planned.output
    assert "note: cpu-0: measured" in planned.output


def test_layers_of_both_kinds_are_measured(tmp_path: Path) -> None:
    """One after the other, and a plan costs each by its own."""
    cluster, profile = tmp_path / "cluster.yaml", tmp_path / "profile.json"
    cluster.write_text(ONE_CPU)
    experts = (
        *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--disable-bias-linear"),
        *("--moe-router-load-balancing-type", "none", "--moe-layer-freq", "[0]*1+[1]*3"),
        *("--expert-model-parallel-size", "2"),  # of ranks that there are not
    )
    files = ("--cluster", str(cluster), "--out", str(profile))
    words = ("profile", "measure", *files, "--max-micro-batch", "1", "--json", "--")
    env, entry = {"ZORSE_TEST_NODES": "1"}, "tests.megatron.measure_entry"
    flags = (*TRAINING, *experts)
    result = run_ranks([*words, *flags], 1, entry=entry, timeout_s=120, env=env)
    assert said(result)["measured"] == 2 * (3 + 1)
    inputs = make_inputs(
        load_cluster(cluster),
        shape_from_flags(flags),
        load_profile(profile),
        global_batch_size=8,
        dtype="float32",
    )
    costs = [each for each, _ in inputs.runs(0, 2)]
    times = [each.compute.layer("cpu-0", 1).both_s for each in costs]
    assert [each.compute.provenance("cpu-0").basis for each in costs] == ["measured"] * 2
    assert times[0] != times[1]
    parameters = [each.memory.measured_layer_elements for each in costs]
    assert None not in parameters and parameters[0] != parameters[1]


def test_what_megatron_itself_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    """Our table takes the flag; Megatron wants two others with it."""
    refused = ("--weight-decay-incr-style", "linear")
    assert not check_command(read_command([*TRAINING, *refused]), None)
    (tmp_path / "cluster.yaml").write_text(ONE_CPU)
    files = ("--cluster", str(tmp_path / "cluster.yaml"), "--out", str(tmp_path / "profile.json"))
    words = ("profile", "measure", *files, "--", *TRAINING, *refused)
    env = {"ZORSE_TEST_NODES": "1"}
    result = run_ranks(words, 1, entry="tests.megatron.measure_entry", timeout_s=60, env=env)
    (output,) = result.outputs
    assert result.returncodes == (1,), output
    assert (
        "the layers cannot be measured (1 problem):\n"
        "  1. the process that builds the layers: found exit status 1; expected 0. "
        "Its last lines:\n"
    ) in output
    assert "assert args.start_weight_decay is not None" in output


def test_flags_that_are_refused_stop_all_ranks_by_name(work: Path) -> None:
    files = ("--cluster", str(work / "cluster.yaml"), "--out", str(work / "refused.json"))
    result = zorse("profile", "measure", *files, "--", *TRAINING, "--fp8-format", "hybrid")
    assert all(code in (1, LOST_RANK) for code in result.returncodes)
    assert "--fp8-format" in result.outputs[0]
