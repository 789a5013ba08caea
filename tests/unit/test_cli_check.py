"""`zorse check`: what is told of good files, alone and together; bad_input.txt has the bad ones."""

import json

import pytest

from scripts.import_profile import import_tables
from tests.unit.cli_samples import FLAGS, FLAGS_IN_ONE_TEXT, cells, lab_plan
from tests.unit.plan_samples import good, load
from tests.unit.test_profile import LAYERS
from zorse_megatron.inputs.profile import save_profile
from zorse_megatron.plan.plan_file import fingerprint

PHI = {
    "model_type": "phi",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
}


@pytest.fixture
def run(run, tmp_path):
    (tmp_path / "good.json").write_text(json.dumps(good()))
    return run


def lines_of(result):
    """Of what is in order."""
    assert result.exit_code == 0, result.output
    return [line for line in result.stdout.splitlines() if ": OK, " in line]


def test_a_plan(run):
    result = run("check", "good.json")
    (line,) = lines_of(result)
    assert line.startswith(f"good.json: OK, plan {fingerprint(load(good()))}: 5 ranks, 3 groups")
    assert cells(result.stdout) == [
        ["0 a", "0 to 4", "0", "4 x 4 samples", "75.0 %"],
        ["", "", "1", "4 x 2 samples", "25.0 %"],
        ["1", "5 to 6", "2", "8 x 3 samples", "100.0 %"],
        ["2", "7 to 11", "4", "6 x 3 samples", "50.0 %"],
        ["", "", "3", "6 x 1 sample", "50.0 %"],
    ]


def test_a_plan_of_one_of_each(run, tmp_path):
    plan = lab_plan()
    one = {"ranks": [0], "micro_batch_size": 1, "num_microbatches": 1, "shard_weight": 1}
    plan["groups"] = [plan["groups"][0] | {"replicas": [one]}]
    plan["chunks"] = [{"group": 0, "layers": [0, 1]}]
    plan["global_batch_size"] = plan["model"]["num_layers"] = 1
    del plan["cluster"]
    (tmp_path / "one.json").write_text(json.dumps(plan))
    (line, *_) = run("check", "one.json").stdout.splitlines()
    assert "1 rank, 1 group, 1 chunk, 1 layer, 1 sample per iteration" in line


def test_equal_replicas_are_one_row_and_brackets_are_no_markup(run, tmp_path):
    plan = good()
    plan["groups"][1]["name"] = "[red]"
    plan["groups"][1]["replicas"] = [
        {"ranks": [rank], "micro_batch_size": 3, "num_microbatches": 2, "shard_weight": 1}
        for rank in (2, 5, 6, 7)
    ]
    (tmp_path / "good.json").write_text(json.dumps(plan))
    row = next(row for row in cells(run("check", "good.json").stdout) if row[0] == "1 [red]")
    assert row[1:] == ["5 to 6", "2, 5 to 7", "2 x 3 samples each", "25.0 % each"]
    (tmp_path / "good.json").write_text(json.dumps({**plan, "[red]": 1}))
    assert 'unknown key "[red]"' in run("check", "good.json").stdout


def test_every_problem_is_on_a_line_of_stdout(run, tmp_path):
    bad = good()
    bad["chunks"][1]["layers"] = [6, 7]
    bad["groups"][1]["replicas"][0]["num_microbatches"] = 7
    (tmp_path / "bad.json").write_text(json.dumps(bad))
    result = run("check", "bad.json")
    assert result.exit_code == 1
    title, first, second = result.stdout.splitlines()
    assert title == "bad.json cannot be used (2 problems):"
    assert first.startswith("  1. bad.json: chunks: found layer 5 in no chunk; expected")
    assert second.startswith("  2. bad.json: groups[1]: found 21 samples (replicas[0] 3 x 7")


def test_files_of_all_kinds(run):
    lines = lines_of(run("check", "profile.json", "model.json", "cluster.yaml", "plan.json"))
    assert [line.partition(": OK")[0] for line in lines] == [
        "profile.json",
        "model.json",
        "cluster.yaml",
        "plan.json",
        "plan.json for model.json",
        "plan.json on cluster.yaml",
        "memory of plan.json on cluster.yaml with model.json",
    ]
    assert lines[0] == (
        "profile.json: OK, profile: 1 series of times on 1 kind of GPU, 1 optimizer step, "
        "1 memory entry, 1 link"
    )
    assert lines[1].endswith(
        "0.17 billion parameters, 8 layers, hidden size 1024, sequence length 512"
    )
    assert lines[2].endswith("two-node lab: 8 GPUs on 2 nodes: 4 x A6000, 4 x V100-16")
    assert "computing in float16" in lines[-1]


def test_json(run):
    answer = json.loads(run("check", "--json", "cluster.yaml", "plan.json", "model.json").stdout)
    assert answer["ok"] is True and answer["problems"] == []
    cluster, plan, model = answer["files"]
    assert (cluster["path"], cluster["kind"], cluster["ok"]) == ("cluster.yaml", "cluster", True)
    assert (plan["kind"], plan["plan"]["chunks"][0]["layers"]) == ("plan", [0, 5])
    assert plan["fingerprint"] == fingerprint(load(plan["plan"]))
    assert model["kind"] == "model"
    assert len(answer["together"]) == 3


def test_a_profile(run, tmp_path):
    """With a point that its neighbours give the lie."""
    more = "".join(f"llama-7b,t4,512,float16,{size},{7 * size},{20 * size}\n" for size in (3, 4, 5))
    table = LAYERS.replace("2,14.0,42.0", "2,9.9,42.0") + more
    save_profile(import_tables({"layers.csv": table.encode()}).profile, tmp_path / "p.json")
    result = run("check", "p.json")
    assert cells(result.stdout) == [
        ["T4", "llama-7b", "512", "float16", "1", "5"],
        ["A100-40", "llama-7b", "512", "float16", "1", "1"],
    ]
    assert result.stdout.splitlines()[-1] == (
        "  replaced: T4, llama-7b at sequence length 512 in float16, tensor parallel 1, layer "
        "forward, micro-batch 2: 9.900 ms, used 14.583 ms"
    )
    (file,) = json.loads(run("check", "p.json", "--json").stdout)["files"]
    (point,) = file["not_believed"]
    assert (point["micro_batch_size"], point["measured_s"]) == (2, 0.0099)
    assert file["gpu_kinds"]["T4"]["points"] == 5


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.yaml", "nodes: [{gpus: 8 x T4}]", "cluster"),
        ("a.json", '{"hidden_size": 8}', "model"),
        ("a.yaml", "", "cluster"),
        ("a.json", '{"nodes": ["p4d.24xlarge"]}', "cluster"),
        ("a.json", "{", "plan"),
        ("my-profile.json", "{", "profile"),
        ("a.json", '{"sources": [], "schema_version": 1}', "profile"),
        ("a.txt", '{"chunks": [], "schema_version": 1}', "plan"),
        ("a.json", '{"schema_version": 1, "sources": [], "times": [{"gpu_kind": "T4"', "profile"),
        ("a.json", '{"schema_version": 2, "chunks": [{"group": 0, "layers": [0,', "plan"),
        ("a.yaml", "{name: x, node: 3}", "cluster"),
        ("a-directory", None, None),
    ],
)
def test_files_are_known_by_what_is_in_them(run, tmp_path, name, text, kind):
    if text is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(text)
    (file,) = json.loads(run("check", "--json", name).stdout)["files"]
    assert file["kind"] == kind


def test_flags_of_the_training_command(run):
    lines = lines_of(run("check", "plan.json", "cluster.yaml", "--", "pretrain_gpt.py", *FLAGS))
    of_flags = [line for line in lines if "the training command" in line]
    same = "plan.json with the training command: OK, the same model and global batch size"
    assert of_flags[0] == same
    assert of_flags[1].startswith("memory of plan.json on cluster.yaml with the training command")
    index = FLAGS.index("--vocab-size")
    (*_, line) = lines_of(run("check", "plan.json", "--", *FLAGS[:index], *FLAGS[index + 2 :]))
    assert line == f"{same}; without --vocab-size its vocabulary was not compared"


@pytest.mark.parametrize("model", ["model.json", "phi", "phi/config.json", FLAGS_IN_ONE_TEXT])
def test_models_are_taken_as_plan_takes_them(run, tmp_path, model):
    (tmp_path / "phi").mkdir()
    (tmp_path / "phi" / "config.json").write_text(json.dumps(PHI))
    lines = lines_of(run("check", "plan.json", "cluster.yaml", "--model", model))
    assert lines[-1].startswith("memory of plan.json on cluster.yaml with ")


def test_a_model_is_as_long_as_the_plan_says_where_it_has_a_limit(run, tmp_path):
    (tmp_path / "other-name.json").write_text(json.dumps(PHI))
    result = run("check", "plan.json", "other-name.json", "cluster.yaml")
    assert "note: planning only: training refuses attention and feed-forward" in result.stdout
    assert "plan.json for other-name.json: OK, the same model" in lines_of(result)
    answer = json.loads(run("check", "--json", "other-name.json").stdout)
    assert answer["files"][0]["kind"] == "model" and answer["files"][0]["seq_length"] == 2048
    (line,) = lines_of(run("check", "--model", "llama-7b"))
    assert line.startswith("llama-7b: OK, model llama-7b: 6.74 billion parameters, 32 layers")
