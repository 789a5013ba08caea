import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.profile_samples import good, problems, spoil
from zorse_megatron.errors import ProfileError
from zorse_megatron.schema.profile.profile_json import (
    dump_profile,
    joined,
    load_profile,
    parse_profile,
    save_profile,
)


def test_good():
    assert problems(good()) == ()
    profile = parse_profile(json.dumps(good()).encode())
    assert profile.gpu_kinds() == ("T4",)
    assert profile.model_named("tiny").shape().layer_parameters() == 12 * 64 * 64 + 13 * 64


def test_save_and_load(tmp_path):
    profile = parse_profile(json.dumps(good()).encode())
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    text = (tmp_path / "profile.json").read_text()
    assert text == dump_profile(profile)
    assert dump_profile(parse_profile(text.encode())) == text


def test_a_bad_profile_is_not_saved(tmp_path):
    profile = parse_profile(json.dumps(good()).encode())
    bad = dataclasses.replace(profile, sources=profile.sources * 2)
    with pytest.raises(ProfileError, match="2 entries with the name"):
        save_profile(bad, tmp_path / "profile.json")
    assert not list(tmp_path.iterdir())


def test_join():
    first = parse_profile(json.dumps(good()).encode())
    other = dataclasses.replace(first.times[0], gpu_kind="L4")
    second = dataclasses.replace(first, times=(other,), updates=(), memory=(), links=())
    both = joined([first, second])
    assert (both.sources, both.models) == (first.sources, first.models)
    assert both.gpu_kinds() == ("T4", "L4")
    with pytest.raises(ProfileError, match="a second entry for what times"):
        joined([first, first])


ONE_PROBLEM = {
    "a list": ([], "top level", "[] (a list)", "an object"),
    "no sources": (spoil(["sources"], []), "sources", "[]", "at least 1 entry"),
    "unknown key": (spoil(["extra"], 1), "top level", 'unknown key "extra"', "only the keys"),
    "unknown key inside": (
        spoil(["times", 0, "forward_ms"], [1]),
        "times[0]",
        'unknown key "forward_ms"',
        "forward_s",
    ),
    "newer": (spoil(["schema_version"], 2), "schema_version", "2, written by a newer", "1"),
    "version as text": (spoil(["schema_version"], "1"), "schema_version", '"1"', "an integer"),
    "text for seconds": (
        spoil(["times", 0, "forward_s", 1], "0.002"),
        "times[0].forward_s[1]",
        '"0.002" (a string)',
        "a number",
    ),
    "negative time": (
        spoil(["times", 0, "forward_s", 1], -0.002),
        "times[0].forward_s[1]",
        "-0.002",
        "at least 0",
    ),
    "milliseconds for seconds": (
        spoil(["times", 0, "forward_s", 1], 2e6),
        "times[0].forward_s[1]",
        "2000000.0",
        "at most 86400",
    ),
    "not a number": (
        spoil(["times", 0, "backward_s", 0], float("nan")),
        "times[0].backward_s[0]",
        "NaN",
        "a finite number",
    ),
    "no time": (
        spoil(["times", 0, "forward_s", 0], 0.0),
        "times[0].forward_s",
        "a layer that takes no time",
        "times above 0",
    ),
    "micro-batch 0": (
        spoil(["times", 0, "micro_batch_sizes", 0], 0),
        "times[0].micro_batch_sizes[0]",
        "0",
        "at least 1",
    ),
    "out of order": (
        spoil(["times", 0, "micro_batch_sizes"], [2, 1, 4]),
        "times[0].micro_batch_sizes",
        "[2, 1, 4]",
        "ascending",
    ),
    "twice": (
        spoil(["times", 0, "micro_batch_sizes"], [1, 2, 2]),
        "times[0].micro_batch_sizes",
        "[1, 2, 2]",
        "each size once",
    ),
    "short column": (
        spoil(["times", 0, "backward_s"], [0.1, 0.2]),
        "times[0].backward_s",
        "2 times",
        "3, one for each",
    ),
    "unknown part": (spoil(["times", 0, "part"], "mlp"), "times[0].part", '"mlp"', "'layer'"),
    "unknown dtype": (
        spoil(["times", 0, "dtype"], "fp16"),
        "times[0].dtype",
        '"fp16"',
        "'float16'",
    ),
    "unknown model": (
        spoil(["times", 0, "model"], "tini"),
        "times[0].model",
        '"tini", which is not in models',
        "the name of an entry of models",
    ),
    "unknown source": (
        spoil(["links", 0, "source"], "labs"),
        "links[0].source",
        '"labs", which is not in sources',
        "the name of an entry of sources",
    ),
    "no source": (spoil(["memory", 0, "source"], ""), "memory[0].source", '""', "not empty"),
    "guessed": (
        spoil(["sources", 0, "kind"], "guess"),
        "sources[0].kind",
        '"guess"',
        "'measured' or 'analytic'",
    ),
    "source twice": (
        spoil(["sources"], good()["sources"] * 2),
        "sources",
        '2 entries with the name "lab"',
        "a different name",
    ),
    "times twice": (
        spoil(["times"], good()["times"] * 2),
        "times[1]",
        "a second entry for what times[0] is about",
        "one entry for each part",
    ),
    "heads": (
        spoil(["models", 0, "num_query_groups"], 3),
        "models[0].num_query_groups",
        "3 with 4 query heads",
        "a divisor",
    ),
    "a link without bandwidth": (
        spoil(["links", 0, "max_bytes_per_s"], 0),
        "links[0].max_bytes_per_s",
        "0",
        "greater than 0",
    ),
    "unknown link": (spoil(["links", 0, "link"], "nvlink"), "links[0].link", '"nvlink"', "'intra"),
    "update of nothing": (
        spoil(["updates", 0, "num_parameters"], 0),
        "updates[0].num_parameters",
        "0",
        "at least 1",
    ),
    "cut off": (b'{"schema_version": 1', "line 1", "it looks cut off", "a profile in JSON"),
    "empty": (b"", "p.json", "an empty file", "a profile in JSON"),
}


@pytest.mark.parametrize("case", ONE_PROBLEM)
def test_one_clear_message(case):
    value, where, found, expected = ONE_PROBLEM[case]
    (problem,) = problems(value)
    assert problem.where.startswith("p.json")
    assert where in problem.where
    assert found in problem.found
    assert expected in problem.expected
    assert problem.remedy


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ProfileError, match="no readable file"):
        load_profile(tmp_path / "profile.json")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@given(st.data())
def test_any_value_anywhere_gives_a_profile_or_problems(data):
    profile, path, owner = good(), [], None
    node = profile
    while isinstance(node, dict | list) and node:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        path.append(data.draw(st.sampled_from(keys)))
        owner, node = node, node[path[-1]]
        if data.draw(st.booleans()):
            break
    owner[path[-1]] = data.draw(JSON_VALUES)
    for problem in problems(profile):
        assert problem.where.startswith("p.json: ")
        assert all(dataclasses.astuple(problem))
