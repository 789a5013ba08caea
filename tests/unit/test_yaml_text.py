import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.errors import ClusterError
from zorse_megatron.files.yaml_text import read_yaml
from zorse_megatron.inputs.cluster_yaml import CLUSTER_FILE


def read(text):
    return read_yaml(text.encode(), "c.yaml", CLUSTER_FILE)


def problem_of(data):
    with pytest.raises(ClusterError) as caught:
        read_yaml(data, "c.yaml", CLUSTER_FILE)
    (problem,) = caught.value.problems
    return problem


def test_scalars_are_those_of_yaml_1_2():
    value, _, problems = read(
        "a: 1e9\nb: yes\nc: 1:30\nd: 2024-01-01\ne: 010\nf: '1'\ng: true\nh: ~\ni: .5\nj: 1_000"
    )
    assert problems == []
    assert value == {
        "a": 1e9,
        "b": "yes",
        "c": "1:30",
        "d": "2024-01-01",
        "e": 10,
        "f": "1",
        "g": True,
        "h": None,
        "i": 0.5,
        "j": "1_000",
    }
    assert isinstance(value["a"], float)


def test_special_numbers():
    value, _, _ = read("[.inf, -.inf, .nan, " + "9" * 6000 + "]")
    assert value[0] == math.inf
    assert value[1] == -math.inf
    assert math.isnan(value[2])
    assert value[3] == math.inf


def test_lines():
    _, lines, _ = read("# comment\nnodes:\n  - gpus: 1\n\n    nics: {count: 1,\n      x: 2}\n")
    assert lines["nodes"] == 2
    assert lines["nodes[0]"] == lines["nodes[0].gpus"] == 3
    assert lines["nodes[0].nics.x"] == 6


def test_repeated_keys_are_reported_with_their_line():
    _, _, problems = read("a: 1\nb: {c: 1,\n  c: 2}\na: 3")
    assert [(problem.where, problem.found) for problem in problems] == [
        ("c.yaml: line 3: b", 'key "c" more than once'),
        ("c.yaml: line 4: top level", 'key "a" more than once'),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "where", "found"),
    [
        ("", "c.yaml", "an empty file"),
        ("  \n", "c.yaml", "an empty file"),
        ("# nothing\n", "c.yaml", "comments only"),
        ("a: [1", "c.yaml: line 2 column 1", "text that is not YAML"),
        ("a: b: c", "c.yaml: line 1 column 5", "text that is not YAML"),
        ("a:\n\t- b", "c.yaml: line 2 column 1", "text that is not YAML"),
        ("a: 1\n---\nb: 2", "c.yaml: line 2 column 1", "another document"),
        ("a: &x 1\nb: *x", "c.yaml: line 1", "an anchor or alias"),
        ("b: !!int 3", "c.yaml: line 1", "a tag (tag:yaml.org,2002:int)"),
        ("x: !!python/object/apply:os.system [ls]", "c.yaml: line 1", "a tag"),
        ("? [1, 2]\n: 3", "c.yaml: line 1", "a key that is not plain text"),
        ("[" * 100 + "]" * 100, "c.yaml: line 1", "nested too deeply"),
        ("[" * 9000, "c.yaml: line 1", "nested too deeply"),
        ('a: "\\ud800"', "c.yaml: line 1 column 7", "text that is not YAML"),
        (
            "a: &x [1, 1]\n" + "".join(f"{b}: &{b} [*x, *x]\n" for b in "bcdefghij"),
            "c.yaml: line 1",
            "alias",
        ),
        (
            "nodes: [" + "1, " * 260_000 + "1]",
            "c.yaml: line 1",
            "more than 250,000 keys and values",
        ),
    ],
)
def test_unreadable(text, where, found):
    problem = problem_of(text.encode())
    assert problem.where == where
    assert found in problem.found
    assert problem.expected == "a cluster in YAML, in UTF-8"
    assert problem.remedy


def test_not_utf_8():
    assert "byte 0xff" in problem_of(b"a: \xff").found


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda data: data.decode("latin-1")))
def test_any_text_gives_a_value_or_one_problem(text):
    try:
        read_yaml(text.encode("utf-8", "surrogatepass"), "c.yaml", CLUSTER_FILE)
    except ClusterError as error:
        assert len(error.problems) == 1


def test_what_is_called_json_is_json():
    read_json = {"a": [1, {"b": 2.5}]}
    value, lines, problems = read_yaml(b'{\n "a": [1, {"b": 2.5}]\n}', "c.json", CLUSTER_FILE)
    assert (value, lines["a"], problems) == (read_json, 2, [])
    with_tabs, _, problems = read_yaml(b'{\n\t"a": [1, {"b": 2.5}]\n}', "c.json", CLUSTER_FILE)
    assert (with_tabs, problems) == (read_json, [])
    for text, where in ((b'{"a": 1,}', "line 1 column 9"), (b"a: 1", "line 1 column 1")):
        with pytest.raises(ClusterError) as caught:
            read_yaml(text, "C.JSON", CLUSTER_FILE)
        (problem,) = caught.value.problems
        assert problem.where == f"C.JSON: {where}"
        assert "not JSON" in problem.found and problem.expected == "a cluster in JSON, in UTF-8"
