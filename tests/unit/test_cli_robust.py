"""Malformed and absurd input, through the commands: one clear message, never a traceback."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.unit.cli_samples import FLAGS, MODEL, WORKLOAD, lab_plan, runner_in, write_lab
from tests.unit.profile_samples import good as good_profile

LAB = "nodes:\n  - {gpus: 4 x A6000, nics: 100 Gb/s}\n  - {gpus: 4 x V100-16, nics: 100 Gb/s}\n"
PLAN = ("plan", *WORKLOAD)
PLAN_FOR_FLAGS = ("plan", "--cluster", "cluster.yaml", "--", "pretrain_gpt.py")
EXPLAIN = ("explain", "plan.json", "--cluster", "cluster.yaml", "--model", "model.json")
COMPARE = ("compare", "--simulated", *PLAN[1:])
WITH_PROFILE = (*PLAN, "--profile", "profile.json")


def spoilt(value, *path_and_value):
    """A copy of JSON values with one of them replaced."""
    *path, last, new = path_and_value
    result = copy.deepcopy(value)
    owner = result
    for key in path:
        owner = owner[key]
    owner[last] = new
    return json.dumps(result)


def without(flags, name):
    index = flags.index(name)
    return (*flags[:index], *flags[index + 2 :])


# What is wrong -> (files with their content, command, what the message says).
CLUSTERS = {
    "no file": ({}, (*PLAN, "--cluster", "no.yaml"), ["cannot read no.yaml", "a cluster file"]),
    "a directory": ({}, (*PLAN, "--cluster", "."), ["cannot read .", "a cluster file"]),
    "nothing": ("", PLAN, ["an empty file"]),
    "comments": ("# nodes: 3", PLAN, ["comments only"]),
    "bytes": (b"\xff\xfe\x00", PLAN, ["not UTF-8"]),
    "not YAML": ("nodes: [", PLAN, ["text that is not YAML"]),
    "a list": ("[1, 2]", PLAN, ["[1, 2] (a list)", "an object"]),
    "no nodes": ("nodes: []", PLAN, ["at least 1 entry"]),
    "anchor": ("nodes: [&a {gpus: 1 x T4}]", PLAN, ["an anchor or alias"]),
    "key twice": (LAB + "name: a\nname: b", PLAN, ['key "name" more than once']),
    "unknown key": (LAB + "node: 3", PLAN, ['unknown key "node"', 'Did you mean "nodes"']),
    "unknown kind": (
        LAB.replace("A6000", "A6001"),
        PLAN,
        ['"A6001", which is not a known kind of GPU', "gpu_kinds"],
    ),
    "a name that steers the terminal": (
        LAB + 'name: "a\\e[31mb"',
        PLAN,
        ["name: found a control character (U+001B) in 'a\\x1b[31mb'"],
    ),
    "a key that steers the terminal": (LAB + '"a\\e[31mb": 1', PLAN, ["a\\x1b[31mb"]),
    "a device": (
        {},
        (*PLAN, "--cluster", "/dev/zero"),
        ["found a device; expected a cluster file: a regular one"],
    ),
    "no GPUs": (LAB.replace("4 x A6000", "0 x A6000"), PLAN, ["gpus[0].count: found 0"]),
    "too many GPUs": (LAB.replace("{gpus", "{count: 999999999, gpus"), PLAN, ["at most 1000000"]),
    "no network": (LAB.replace(", nics: 100 Gb/s", ""), PLAN, ["a node without nics"]),
    "no unit": (LAB.replace("100 Gb/s", "100"), PLAN, ["bandwidth of 1 kB/s to 1 PB/s"]),
    "too fast": (LAB.replace("100 Gb/s", "1e30 Gb/s"), PLAN, ["bandwidth of 1 kB/s to 1 PB/s"]),
    "regions apart": (
        LAB.replace("4 x A6000,", "4 x A6000, region: a,").replace("16,", "16, region: b,"),
        PLAN,
        ["region"],
    ),
    "a kind without a rate for the dtype": (
        "gpu_kinds: [{name: Z1, memory: 16GB, memory_bandwidth: 1 TB/s, "
        "peak: {float32: 9 TFLOP/s}}]\nnodes: [{gpus: 2 x Z1, link: PCIe 9 GB/s, "
        "host_link: 9 GB/s}]",
        (*WITH_PROFILE, "--dtype", "float16"),
        ["GPU kind Z1", "no hardware support for float16", "Profile it"],
    ),
    "a kind that does not compute in bfloat16": (
        LAB,
        (*PLAN, "--dtype", "bfloat16"),
        ["GPU kind V100-16", "no hardware support for bfloat16"],
    ),
}
MODELS = {
    "unknown": ({}, (*PLAN, "--model", "llama-7c"), ['"llama-7c"', 'Did you mean "llama-7b"?']),
    "no file": ({}, (*PLAN, "--model", "no.json"), ["cannot read no.json", "a model file"]),
    "YAML": ({}, (*PLAN, "--model", "no.yaml"), ["no.yaml: found a YAML file", "a config.json"]),
    "nothing said": ("{}", PLAN, ["model_type: found no such key", "a dense model of llama, "]),
    "a fraction": (spoilt(MODEL, "num_hidden_layers", 8.5), PLAN, ["num_hidden_layers: found 8.5"]),
    "no layers": (spoilt(MODEL, "num_hidden_layers", -8), PLAN, ["an integer from 1 to 100000"]),
    "too many layers": (
        spoilt(MODEL, "num_hidden_layers", 10**30),
        PLAN,
        ["num_hidden_layers", "an integer from 1 to 100000"],
    ),
    "heads": (spoilt(MODEL, "num_key_value_heads", 5), PLAN, ["found 5 with 16 query heads"]),
    "none": ({}, (*PLAN[:3], "--global-batch-size", "16"), ["--model: found no model"]),
    "two": ({}, (*PLAN, "--", *FLAGS), ["flags after --", "one of the two"]),
    "flags, no layers": (
        {},
        (*PLAN_FOR_FLAGS, *without(FLAGS, "--num-layers")),
        ["--num-layers: found no value", "a positive integer"],
    ),
    "flags, no vocabulary": (
        {},
        (*PLAN_FOR_FLAGS, *without(FLAGS, "--vocab-size")),
        ["--vocab-size: found no such flag", "and no tokenizer", "--padded-vocab-size"],
    ),
    "flags, absurd": (
        {},
        (*PLAN_FOR_FLAGS, *FLAGS, "--num-layers", "999999999"),
        ["--num-layers: found 999999999; expected at most 100000"],
    ),
    "flags, experts": ({}, (*PLAN_FOR_FLAGS, *FLAGS, "--num-experts", "8"), ["--num-experts"]),
    "flags, none": ({}, PLAN_FOR_FLAGS, ["--hidden-size", "--num-layers", "--seq-length"]),
    "flags, no batch": (
        {},
        (*PLAN_FOR_FLAGS, *without(FLAGS, "--global-batch-size")),
        ["--global-batch-size: found no such option"],
    ),
    "flags, bad batch": (
        {},
        (*PLAN_FOR_FLAGS, *FLAGS, "--global-batch-size", "-4"),
        ['--global-batch-size: found "-4"; expected a positive integer'],
    ),
    "flags, another batch": (
        {},
        ("plan", "--cluster", "cluster.yaml", "--global-batch-size", "32", "--", *FLAGS),
        ["--global-batch-size: found 32, and 16 in the training command"],
    ),
    "flags, quotes": ({}, (*PLAN, "--model", "--num-layers '8"), ["cannot be split into words"]),
}
PROFILES = {
    "no file": ({}, (*PLAN, "--profile", "no.json"), ["cannot read no.json", "a profile file"]),
    "cut off": ("{", WITH_PROFILE, ["profile.json"]),
    "too large": (
        "[" + 2**26 * " " + "]",
        WITH_PROFILE,
        ["found a file of more than 64 MiB; expected a profile file"],
    ),
    "a list": ("[]", WITH_PROFILE, ["[] (a list)"]),
    "a newer version": (
        spoilt(good_profile(), "schema_version", 2),
        WITH_PROFILE,
        ["written by a newer version"],
    ),
    "no time at all": (
        spoilt(good_profile(), "times", 0, "forward_s", 0, 0.0),
        WITH_PROFILE,
        ["a layer that takes no time"],
    ),
    "not a number": (
        spoilt(good_profile(), "times", 0, "forward_s", 0, float("nan")),
        WITH_PROFILE,
        ["times[0].forward_s[0]"],
    ),
    "columns": (
        spoilt(good_profile(), "times", 0, "backward_s", [0.1]),
        WITH_PROFILE,
        ["found 1 times; expected 3"],
    ),
    "an unknown model": (
        spoilt(good_profile(), "times", 0, "model", "tny"),
        WITH_PROFILE,
        ['"tny", which is not in models', 'Did you mean "tiny"?'],
    ),
    "the same twice": (
        {},
        (*WITH_PROFILE, "--profile", "profile.json"),
        ["the profiles do not go together", "a second entry"],
    ),
}
PLANS = {
    "no file": ({}, ("explain", "no.json", *EXPLAIN[2:]), ["cannot read no.json", "a plan file"]),
    "cut off": (json.dumps(lab_plan())[:200], EXPLAIN, ["plan.json is not a plan"]),
    "a group that steers the terminal": (
        spoilt(lab_plan(), "groups", 0, "name", "\x9b31m"),
        EXPLAIN,
        ["groups[0].name: found a control character (U+009B)"],
    ),
    "a gap": (
        spoilt(lab_plan(), "chunks", 1, "layers", [6, 8]),
        EXPLAIN,
        ["found layer 5 in no chunk"],
    ),
    "samples": (
        spoilt(lab_plan(), "groups", 0, "replicas", 0, "num_microbatches", 3),
        EXPLAIN,
        ["found 18 samples", "-2 samples in all"],
    ),
    "another model": (
        spoilt(lab_plan(), "model", "seq_length", 2048),
        (*EXPLAIN, "--seq-length", 512),
        ["model.seq_length: found 2048, while the model has 512"],
    ),
    "other GPUs": (
        spoilt(lab_plan(), "cluster", "gpu_kinds", ["T4"] * 8),
        EXPLAIN,
        ["rank 0 on T4, which is A6000 in the cluster", "and 4 more"],
    ),
    "infinite weight": (
        json.dumps(lab_plan()).replace("1.0", "1e999", 1),
        EXPLAIN,
        ["shard_weight"],
    ),
}
OPTIONS = {
    "a rank that is not there": ((*EXPLAIN, "--slow-rank", "8=2"), ["--slow-rank", "from 0 to 7"]),
    "a rank without a factor": ((*EXPLAIN, "--slow-rank", "3"), ["--slow-rank 3=1.3"]),
    "a factor of nothing": ((*EXPLAIN, "--slow-rank", "3=0"), ['"3=0"', "above 0"]),
    "no number": ((*EXPLAIN, "--slow-rank", "3=nan"), ['"3=nan"', "above 0"]),
    "two factors of a rank": (
        (*EXPLAIN, "--slow-rank", "3=2", "--slow-rank", "3=4"),
        ['"3" 2 times', "one factor for each"],
    ),
    "a rank with a zero before": ((*EXPLAIN, "--slow-rank", "03=2"), ['"03"', "from 0 to 7"]),
    "a link that is not there": ((*EXPLAIN, "--slow-link", "x=2"), ["--slow-link", "nic0:out"]),
    "a kind that is not there": ((*EXPLAIN, "--slow-kind", "T4=2"), ["one of A6000, V100-16"]),
    "jitter below 0": ((*EXPLAIN, "--jitter", "-1"), ["--jitter: found -1.0"]),
    "no jitter": ((*EXPLAIN, "--jitter", "nan"), ["--jitter: found nan"]),
    "a picture's format": ((*EXPLAIN, "--timeline", "m.pdf"), ["m.pdf", "ends in .png"]),
    "no directory": ((*EXPLAIN, "--trace", "no/t.json"), ["no directory no"]),
    "a directory": ((*PLAN, "--out", "."), ["--out .: found a directory"]),
    "nowhere to write": ((*PLAN, "--out", "no/plan.json"), ["no directory no"]),
    "margin of all": ((*PLAN, "--margin", "1"), ["--margin: found 1.0", "below 1"]),
    "margin below 0": ((*PLAN, "--margin", "-0.1"), ["--margin: found -0.1"]),
    "no margin": ((*EXPLAIN, "--margin", "nan"), ["--margin: found nan"]),
    "strategy": ((*PLAN, "--strategy", "stok"), ['"stok"', 'Did you mean "stock"?']),
    "strategy to compare": ((*COMPARE, "--strategy", "best"), ['"best"', "zorse-paper, cephalo"]),
    "dtype": ((*COMPARE, "--dtype", "fp8"), ['"fp8"', "bfloat16"]),
    "dtype to check": (("check", "plan.json", "--dtype", "int8"), ['"int8"']),
    "another dtype": (
        ("check", "plan.json", "--dtype", "float32", "--", *FLAGS),
        ["--dtype: found float32, and float16 in the training command"],
    ),
    "no samples": ((*PLAN[:-1], "0"), ["--global-batch-size"]),
    "too many samples": ((*PLAN[:-1], "9" * 20), ["--global-batch-size"]),
    "no tokens": ((*PLAN, "--seq-length", "0"), ["--seq-length"]),
    "nothing to check": (("check",), ["FILE"]),
    "no cluster": (("plan", "--model", "model.json"), ["--cluster"]),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    return runner_in(tmp_path, monkeypatch)


def check_message(result, said):
    """A message for people on one of the two streams, and nothing else."""
    assert result.exit_code in (1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    text = " ".join(result.output.replace("│", " ").split())
    for part in said:
        assert part in text
    if result.exit_code == 1:  # ours: what was found, what was expected
        assert "found " in text
        assert "expected " in text


def cases(table, file_name):
    for what, (content, command, said) in table.items():
        files = {} if content == {} else {file_name: content}
        yield pytest.param(files, command, said, id=f"{file_name.partition('.')[0]}: {what}")


@pytest.mark.parametrize(
    ("files", "command", "said"),
    [
        *cases(CLUSTERS, "cluster.yaml"),
        *cases(MODELS, "model.json"),
        *cases(PROFILES, "profile.json"),
        *cases(PLANS, "plan.json"),
        *(pytest.param({}, *case, id=f"options: {what}") for what, case in OPTIONS.items()),
    ],
)
def test_one_clear_message(run, tmp_path, files, command, said):
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    check_message(run(*command), said)


def test_there_are_enough_cases():
    assert sum(map(len, (CLUSTERS, MODELS, PROFILES, PLANS, OPTIONS))) >= 60


def test_problems_as_json(run, tmp_path):
    (tmp_path / "cluster.yaml").write_text("nodes: [{gpus: 8 x T5}]")
    for command in (PLAN, EXPLAIN, COMPARE):
        result = run(*command, "--json")
        assert result.exit_code == 1
        answer = json.loads(result.stdout)
        assert answer["ok"] is False
        assert '"T5"' in answer["problems"][0]["found"]


def test_a_plan_with_too_many_micro_batches(run, tmp_path):
    plan = lab_plan()
    plan["global_batch_size"] = 8 * 10**9
    for group in plan["groups"]:
        for replica in group["replicas"]:
            replica["num_microbatches"] = 10**9
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    check_message(run(*EXPLAIN), ["8000000000 micro-batches in all chunks together"])


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.integers(-2, 20),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["80GiB", "50 Gb/s", "5 us", "4 x T4", "llama-7b", "full", [], {}, [[]]]),
)


def places(value, path=()):
    """The paths of all values in JSON values."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))


@st.composite
def mutated(draw, valid):
    """JSON values with some of them replaced, removed or doubled."""
    value = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        known = list(places(value))
        if not known:
            break
        *path, last = draw(st.sampled_from(known))
        owner = value
        for key in path:
            owner = owner[key]
        what = draw(st.sampled_from(["replace", "remove", "double"]))
        if what == "replace":
            owner[last] = draw(VALUES)
        elif what == "remove":
            del owner[last]
        elif isinstance(owner, list):
            owner.insert(last, copy.deepcopy(owner[last]))
        else:
            owner[f"{last}2"] = owner[last]
    return value


@st.composite
def torn(draw, text):
    """A text with a part cut out or put elsewhere."""
    first, second = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    return text[:first] + draw(st.text(max_size=3)) + text[second:]


PLAIN = {
    "cluster.yaml": yaml.safe_load(LAB),
    "model.json": MODEL,
    "profile.json": good_profile(),
    "plan.json": lab_plan(),
}


def as_text(name, value):
    return json.dumps(value) if name.endswith(".json") else yaml.safe_dump(value)


MUTATED_FILE = st.one_of(
    *(
        st.tuples(st.just(name), mutated(value).map(lambda v, n=name: as_text(n, v)))
        for name, value in PLAIN.items()
    ),
    *(st.tuples(st.just(name), torn(as_text(name, value))) for name, value in PLAIN.items()),
)


@pytest.mark.slow
@settings(
    max_examples=examples(80),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(file=MUTATED_FILE)
def test_mutated_files_never_give_a_traceback(run, file):
    name, text = file
    before = Path(name).read_bytes()
    # Half of a surrogate pair cannot be written, and is tested where text is read.
    Path(name).write_bytes(text.encode("utf-8", "replace"))
    try:
        for command in (
            ("check", *PLAIN),
            (*EXPLAIN, "--profile", "profile.json"),
            ("actions", "plan.json"),
        ):
            result = run(*command)
            assert isinstance(result.exception, SystemExit | None), text
            assert result.exit_code in (0, 1, 2)
    finally:
        Path(name).write_bytes(before)


@pytest.mark.parametrize("command", [PLAN, EXPLAIN, ("check",), ("actions",)])
def test_a_fifo_is_not_waited_for(run, tmp_path, command):
    os.mkfifo(tmp_path / "pipe")
    words = (*PLAN, "--cluster", "pipe") if command == PLAN else (command[0], "pipe", *command[2:])
    check_message(run(*words), ["cannot read pipe", "found a FIFO"])


@pytest.mark.slow
def test_what_is_piped_is_read(tmp_path):
    write_lab(tmp_path)
    for piped in ("<(cat plan.json)", "/dev/stdin < plan.json"):
        command = f"{sys.executable} -m zorse_megatron check {piped}"
        subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, timeout=60)


def test_of_a_thousand_problems_a_hundred_are_told(run, tmp_path):
    (tmp_path / "cluster.yaml").write_text("nodes: [" + "1, " * 1000 + "1]")
    result = run(*PLAN)
    check_message(result, ["cannot be used, and has more problems than these (100 problems)"])
