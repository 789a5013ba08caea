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
from tests.unit.cli_samples import MODEL, WORKLOAD, lab_plan
from tests.unit.profile_samples import good as good_profile

LAB = "nodes:\n  - {gpus: 4 x A6000, nics: 100 Gb/s}\n  - {gpus: 4 x V100-16, nics: 100 Gb/s}\n"
PLAN = ("plan", *WORKLOAD)
EXPLAIN = ("explain", "plan.json", "--cluster", "cluster.yaml", "--model", "model.json")


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


def test_a_file_that_is_too_large(run, tmp_path):
    (tmp_path / "profile.json").write_bytes(b"")
    os.truncate(tmp_path / "profile.json", 2**26 + 1)
    said = ["found a file of more than 64 MiB; expected a profile file"]
    check_message(run(*PLAN, "--profile", "profile.json"), said)


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
            ("check", *PLAIN, "--actions"),
            (*EXPLAIN, "--profile", "profile.json"),
        ):
            result = run(*command, "--json")
            assert isinstance(result.exception, SystemExit | None), text
            assert result.exit_code in (0, 1, 2)
            problems = json.loads(result.stdout).get("problems")
            assert all(all(each.values()) for each in problems or []), text
    finally:
        Path(name).write_bytes(before)


@pytest.mark.parametrize("command", [PLAN, EXPLAIN, ("check",)])
def test_a_fifo_is_not_waited_for(run, tmp_path, command):
    os.mkfifo(tmp_path / "pipe")
    words = (*PLAN, "--cluster", "pipe") if command == PLAN else (command[0], "pipe", *command[2:])
    check_message(run(*words), ["cannot read pipe", "found a FIFO"])


@pytest.mark.slow
def test_what_is_piped_is_read(run):
    command = [sys.executable, "-m", "zorse_megatron", "check", "/dev/stdin"]
    subprocess.run(command, input=Path("plan.json").read_bytes(), check=True, timeout=60)
    # What a shell gives for <(cat plan.json).
    with subprocess.Popen(["cat", "plan.json"], stdout=subprocess.PIPE) as writing:
        result = run("check", f"/dev/fd/{writing.stdout.fileno()}")
    assert result.exit_code == 0, result.output


def test_of_a_thousand_problems_a_hundred_are_told(run, tmp_path):
    (tmp_path / "cluster.yaml").write_text("nodes: [" + "1, " * 1000 + "1]")
    result = run(*PLAN)
    check_message(result, ["cannot be used, and has more problems than these (100 problems)"])
