"""`zorse check` with several files, and with the flags of a training command."""

import json

import pytest

from tests.unit.cli_samples import FLAGS, FLAGS_IN_ONE_TEXT, lab_plan, runner_in


@pytest.fixture
def run(tmp_path, monkeypatch):
    return runner_in(tmp_path, monkeypatch)


def spoilt(tmp_path, path, value):
    plan = lab_plan()
    owner = plan
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(plan))


def test_files_of_all_kinds(run):
    result = run("check", "profile.json", "model.json", "cluster.yaml", "plan.json")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if ": OK, " in line]
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
    assert answer["ok"] is True
    assert [(file["path"], file["kind"]) for file in answer["files"]] == [
        ("cluster.yaml", "cluster"),
        ("plan.json", "plan"),
        ("model.json", "model"),
    ]
    assert len(answer["together"]) == 3


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.yaml", "nodes: [{gpus: 8 x T4}]", "cluster"),
        ("a.yaml", "{preset: llama-7b}", "model"),
        ("a.json", '{"hidden_size": 8}', "model"),
        ("a.yaml", "", "cluster"),
        ("my-model.yml", "", "model"),
        ("a.json", '{"nodes": ["p4d.24xlarge"]}', "cluster"),
        ("a.json", "{", "plan"),
        ("my-profile.json", "{", "profile"),
        ("a.json", '{"sources": [], "schema_version": 1}', "profile"),
        ("a.txt", '{"chunks": [], "schema_version": 1}', "plan"),
        ("a.txt", '{"architecture": []}', "model"),
        ("a.yaml", "{name: x, node: 3}", "cluster"),
    ],
)
def test_files_are_known_by_what_is_in_them(run, tmp_path, name, text, kind):
    (tmp_path / name).write_text(text)
    (file,) = json.loads(run("check", "--json", name).stdout)["files"]
    assert file["kind"] == kind


@pytest.mark.parametrize("name", ["none.yaml", "none.json", "none", "a-directory"])
def test_what_cannot_be_read_is_of_no_kind(run, tmp_path, name):
    (tmp_path / "a-directory").mkdir()
    answer = json.loads(run("check", "--json", name).stdout)
    assert [(file["path"], file["kind"], file["ok"]) for file in answer["files"]] == [
        (name, None, False)
    ]
    (problem,) = answer["problems"]
    reason = "Is a directory" if name == "a-directory" else "No such file or directory"
    assert problem["found"] == f"no readable file ({reason})"
    assert problem["expected"].startswith("a plan, cluster, model or profile file: ")


def test_every_file_gets_its_problems(run, tmp_path):
    (tmp_path / "cluster.yaml").write_text("nodes: [{gpus: 8 x T5}]")
    (tmp_path / "model.json").write_text("{}")
    result = run("check", "cluster.yaml", "model.json", "none.json", "profile.json")
    assert result.exit_code == 1
    titles = [line for line in result.stdout.splitlines() if line.endswith("problem):")]
    assert [line.partition(" (")[0] for line in titles] == [
        "cluster.yaml cannot be used",
        "model.json cannot be planned",
        "cannot read none.json",
    ]
    assert "profile.json: OK" in result.stdout


def test_plan_on_another_cluster(run, tmp_path):
    (tmp_path / "cluster.yaml").write_text(
        "nodes: [{gpus: 4 x V100-16, nics: 1 Gb/s}, {gpus: 4 x A6000, nics: 1 Gb/s}]"
    )
    result = run("check", "plan.json", "cluster.yaml")
    assert result.exit_code == 1
    assert "rank 0 on A6000, which is V100-16 in the cluster" in result.stdout
    assert "and 4 more" in result.stdout
    (tmp_path / "cluster.yaml").write_text("nodes: [{gpus: 4 x V100-16}]")
    result = run("check", "plan.json", "cluster.yaml")
    assert "found 8 ranks, while the cluster has 4 GPUs; expected a plan for all" in result.stdout


def test_plan_for_another_model(run, tmp_path):
    spoilt(tmp_path, ["model", "hidden_size"], 2048)
    result = run("check", "plan.json", "cluster.yaml", "model.json")
    assert result.exit_code == 1
    assert "model.hidden_size: found 2048, while the model has 1024" in result.stdout
    assert "memory of" not in result.stdout


def test_plan_that_does_not_fit_into_memory(run, tmp_path):
    plan = lab_plan()
    plan["model"] = {"num_layers": 40}
    plan["chunks"] = [{"group": 0, "layers": [0, 10]}, {"group": 1, "layers": [10, 40]}]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    result = run("check", "plan.json", "cluster.yaml", "--model", "llama-13b")
    assert result.exit_code == 1
    assert "plan.json does not fit into memory (1 problem):" in result.stdout
    assert "groups[1], ranks 4 to 7: found " in result.stdout
    assert "expected at most 15.8 GiB, the memory of V100-16" in result.stdout


def test_flags_of_the_training_command(run):
    result = run("check", "plan.json", "cluster.yaml", "--", "pretrain_gpt.py", *FLAGS)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if "the training command" in line]
    assert lines[0] == (
        "plan.json with the training command: OK, the same model and global batch size"
    )
    assert lines[1].startswith("memory of plan.json on cluster.yaml with the training command: OK")


def test_layers_whose_weight_gradients_cannot_wait(run, tmp_path):
    spoilt(tmp_path, ["groups", 0, "split_backward"], True)
    command = ["check", "plan.json", "--", "pretrain_gpt.py", *FLAGS]
    assert run(*command).exit_code == 0
    result = run(*command, "--transformer-impl", "local")
    assert result.exit_code == 1
    assert "expected --no-gradient-accumulation-fusion, or layers of Transformer" in result.stdout
    layers = ("--transformer-impl", "local", "--no-gradient-accumulation-fusion")
    assert run(*command, *layers).exit_code == 0


@pytest.mark.parametrize(
    ("flag", "value", "found"),
    [
        ("--global-batch-size", "17", "--global-batch-size: found 17; expected 16, the plan"),
        (
            "--hidden-size",
            "2048",
            "--hidden-size: found 2048; expected 1024, as the",
        ),
        ("--num-layers", "x", '--num-layers: found "x"; expected an integer'),
    ],
)
def test_flags_that_do_not_fit(run, flag, value, found):
    result = run("check", "plan.json", "--", *FLAGS, flag, value)
    assert result.exit_code == 1
    assert found in result.stdout


def test_flags_without_a_vocabulary(run):
    index = FLAGS.index("--vocab-size")
    flags = FLAGS[:index] + FLAGS[index + 2 :]
    result = run("check", "plan.json", "--", *flags)
    assert result.exit_code == 0, result.output
    assert "without --vocab-size its vocabulary was not compared" in result.stdout


def test_flags_without_a_plan(run):
    result = run("check", "cluster.yaml", "--", *FLAGS)
    assert result.exit_code == 1
    assert "found training flags without a plan" in result.stdout


PHI = {
    "model_type": "phi",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "max_position_embeddings": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
}


def lines_of(result):
    assert result.exit_code == 0, result.output
    return [line for line in result.stdout.splitlines() if ": OK, " in line]


@pytest.mark.parametrize("model", ["model.json", "phi", "phi/config.json", FLAGS_IN_ONE_TEXT])
def test_models_are_taken_as_plan_takes_them(run, tmp_path, model):
    (tmp_path / "phi").mkdir()
    (tmp_path / "phi" / "config.json").write_text(json.dumps(PHI))
    lines = lines_of(run("check", "plan.json", "cluster.yaml", "--model", model))
    assert lines[-1].startswith("memory of plan.json on cluster.yaml with ")


def test_a_model_of_hugging_faces_is_a_file_like_others(run, tmp_path):
    (tmp_path / "other-name.json").write_text(json.dumps(PHI))
    result = run("check", "plan.json", "other-name.json", "cluster.yaml")
    assert "note: planning only: training refuses attention and feed-forward" in result.stdout
    lines = lines_of(result)
    # As long as the plan says: its file has a limit.
    assert "plan.json for other-name.json: OK, the same model" in lines
    answer = json.loads(run("check", "--json", "other-name.json").stdout)
    assert answer["files"][0]["kind"] == "model" and answer["files"][0]["seq_length"] == 2048


def test_a_model_in_yaml_is_answered_with_the_ways_there_are(run, tmp_path):
    (tmp_path / "model.yaml").write_text("preset: llama-7b")
    said = (
        "model.yaml: found a YAML file: models in YAML are no longer read; expected a config.json"
    )
    for name in ("model.yaml", "none.yml"):  # the way is wrong, whether there is a file or not
        result = run("explain", "plan.json", "--cluster", "cluster.yaml", "--model", name)
        assert result.exit_code == 1
        assert said.replace("model.yaml", name, 1) in result.output
        assert "--model llama-13b, with --seq-length 4096" in result.output
    assert said in run("check", "model.yaml").output


def test_a_well_known_model(run):
    assert lines_of(run("check", "--model", "llama-7b"))[0].startswith(
        "llama-7b: OK, model llama-7b: 6.74 billion parameters, 32 layers"
    )
    other = run("check", "plan.json", "--model", "llama-7b")
    assert other.exit_code == 1
    assert "model.hidden_size: found 1024, while the model has 4096" in other.stdout
    assert "seq_length" not in other.stdout
    unknown = run("check", "plan.json", "--model", "llama-8b")
    assert unknown.exit_code == 1 and "neither a file nor a well-known model" in unknown.stdout


@pytest.mark.parametrize(
    ("option", "value", "found"),
    [
        ("--global-batch-size", "17", "global_batch_size: found 16, while the training command"),
        ("--seq-length", "256", "model.seq_length: found 512, while the model has 256"),
        ("--margin", "0.99", "the memory of A6000 without 99 %"),
        ("--margin", "1.5", "--margin: found 1.5"),
    ],
)
def test_options_are_those_of_plan(run, option, value, found):
    options = ("--cluster", "cluster.yaml", "--profile", "profile.json", "--model", "model.json")
    assert run("check", "plan.json", *options).exit_code == 0
    result = run("check", "plan.json", *options, option, value)
    assert result.exit_code == 1
    assert found in result.stdout


def test_nothing_to_check(run):
    result = run("check")
    assert result.exit_code == 1 and "FILE: found no file" in result.stdout


@pytest.mark.parametrize(
    ("option", "kind"),
    [("--model", "model"), ("--cluster", "cluster"), ("--profile", "profile"), ("", "plan")],
)
def test_broken_json_is_called_so(run, tmp_path, option, kind):
    (tmp_path / "broken.json").write_text('{"a": 1,\n "b": 2,}')
    given = {"--cluster": "cluster.yaml", "--model": "model.json"} | {option: "broken.json"}
    plan = given.pop("", "plan.json")
    result = run("explain", plan, *(word for pair in given.items() for word in pair))
    assert result.exit_code == 1
    assert f"broken.json is not a {kind} (1 problem):" in result.output
    assert "broken.json: line 2 column 9: found text that is not JSON (trailing comma)" in (
        result.output
    )
    assert "YAML" not in result.output


def test_options_that_made_a_plan_go_with_it(run):
    given = ("--cluster", "cluster.yaml", "--model", "model.json", "--margin", "0.1")
    same = run("explain", "plan.json", *given, "--global-batch-size", "16", "--seq-length", "512")
    assert same.exit_code == 0, same.output
    other = run("explain", "plan.json", *given, "--global-batch-size", "8", "--seq-length", "256")
    assert other.exit_code == 1
    assert "global_batch_size: found 16, while the training command says 8" in other.output
    assert "model.seq_length: found 512, while the model has 256" in other.output


def test_a_margin_counts_where_memory_is_simulated(run):
    given = ("plan.json", "--cluster", "cluster.yaml", "--model", "model.json")
    assert "does not fit" not in run("explain", *given).stdout
    tight = run("explain", *given, "--margin", "0.99")
    assert "does not fit: plan.json: groups[0]" in tight.stdout
    assert "the memory of A6000 without 99 %" in tight.stdout
