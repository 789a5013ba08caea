"""Malformed and absurd models, in YAML and in Megatron's flags: each gives one clear message."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.errors import ModelError
from zorse_megatron.flags.shape import shape_from_flags
from zorse_megatron.schema.model.model_yaml import load_model, parse_model

MODEL = {
    "num_layers": "2",
    "hidden_size": "64",
    "num_attention_heads": "4",
    "vocab_size": "128",
    "seq_length": "32",
}


def yaml_problems(text):
    try:
        parse_model(text.encode(), source="m.yaml")
    except ModelError as error:
        return error.problems
    return ()


def spoilt(**changes):
    return "\n".join(f"{key}: {value}" for key, value in {**MODEL, **changes}.items())


YAML = {
    "a list": ("[1]", "top level", "[1] (a list)", "an object"),
    "nothing said": ("name: x", "top level", "no num_layers, hidden_size", "a preset, or all of"),
    "one missing": (
        "\n".join(spoilt().splitlines()[:-1]),
        "top level",
        "no seq_length",
        "a preset, or all of",
    ),
    "unknown preset": ("preset: lama-7b", "line 1: preset", '"lama-7b"', "one of the models"),
    "unknown key": (spoilt(hiden_size=3), "top level", 'unknown key "hiden_size"', "only the keys"),
    "zero layers": (spoilt(num_layers=0), "line 1: num_layers", "0", "at least 1"),
    "negative width": (spoilt(hidden_size=-64), "line 2: hidden_size", "-64", "at least 1"),
    "fraction": (spoilt(num_layers=2.5), "num_layers", "2.5", "an integer"),
    "exponent": (spoilt(vocab_size="3e4"), "vocab_size", "30000.0", "an integer"),
    "text for a number": (spoilt(seq_length="'32'"), "seq_length", '"32" (a string)', "an integer"),
    "unit": (spoilt(seq_length="4k"), "seq_length", '"4k" (a string)', "an integer"),
    "absurd layers": (spoilt(num_layers=10**12), "num_layers", "1000000000000", "at most 100000"),
    "absurd width": (spoilt(hidden_size=10**30), "hidden_size", "1000", "at most 100000000"),
    "heads do not divide": (
        spoilt(num_attention_heads=5),
        "line 3: num_attention_heads",
        "5 heads with hidden_size 64",
        "divides hidden_size",
    ),
    "more heads than width": (
        spoilt(num_attention_heads=128),
        "num_attention_heads",
        "128 heads with hidden_size 64",
        "divides hidden_size",
    ),
    "groups do not divide": (
        spoilt(num_query_groups=3),
        "num_query_groups",
        "3 with 4 query heads",
        "a divisor of num_attention_heads",
    ),
    "unknown activation": (spoilt(activation="swish"), "activation", '"swish"', "'swiglu'"),
    "unknown norm": (spoilt(norm="layer"), "norm", '"layer"', "'layernorm' or 'rmsnorm'"),
    "text for a boolean": (spoilt(tied_embeddings="yes"), "tied", '"yes"', "true or false"),
    "short position table": (
        spoilt(position_embedding="learned", max_positions=16),
        "max_positions",
        "16 with seq_length 32",
        "at least seq_length",
    ),
    "position table without use": (
        spoilt(max_positions=64),
        "max_positions",
        '64 with position_embedding "rope"',
        'only with position_embedding "learned"',
    ),
    "key twice": (spoilt() + "\nseq_length: 64", "line 6: top level", "more than once", "once"),
}


@pytest.mark.parametrize("case", YAML)
def test_yaml(case):
    text, where, found, expected = YAML[case]
    (problem,) = yaml_problems(text)
    assert problem.where.startswith("m.yaml: ")
    assert where in problem.where
    assert found in problem.found
    assert expected in problem.expected
    assert problem.remedy


def test_did_you_mean():
    (problem,) = yaml_problems("preset: lama-7b")
    assert problem.remedy == 'Did you mean "llama-7b"?'


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match="no readable file"):
        load_model(tmp_path / "model.yaml")


FLAGS = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--num-attention-heads": "4",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--vocab-size": "1000",
}


def flag_problems(*words, without=()):
    given = [word for flag, value in FLAGS.items() if flag not in without for word in (flag, value)]
    try:
        shape_from_flags([*given, *words])
    except ModelError as error:
        return error.problems
    return ()


FLAG_CASES = {
    **{flag: ("", flag, "no value", "a positive integer") for flag in list(FLAGS)[:5]},
    "--vocab-size": ("", "--vocab-size", "no such flag", "the number of tokens"),
    "text": ("--num-layers two", "--num-layers", '"two"', "a positive integer"),
    "zero": ("--hidden-size 0", "--hidden-size", '"0"', "a positive integer"),
    "absurd": ("--num-layers 9999999999", "--num-layers", '"9999999999"', "a positive integer"),
    "no value": ("--seq-length --bf16", "--seq-length", "no value", "a positive integer"),
    "heads": ("--num-attention-heads 5", "num_attention_heads", "5 heads", "divides hidden_size"),
    "groups": (
        "--group-query-attention --num-query-groups 3",
        "num_query_groups",
        "3 with 4 query heads",
        "a divisor",
    ),
    "norm": ("--normalization BatchNorm", "--normalization", '"BatchNorm"', "LayerNorm, RMSNorm"),
    "relative positions": (
        "--position-embedding-type relative",
        "--position-embedding-type",
        '"relative"',
        "one of learned_absolute, rope",
    ),
    "experts": ("--num-experts 8", "--num-experts", "the flag", "a model without it"),
    "latent attention": (
        "--multi-latent-attention",
        "--multi-latent-attention",
        "the flag",
        "a model without it",
    ),
    "short position table": (
        "--max-position-embeddings 8",
        "max_positions",
        "8 with seq_length 32",
        "at least seq_length",
    ),
}


@pytest.mark.parametrize("case", FLAG_CASES)
def test_flags(case):
    words, where, found, expected = FLAG_CASES[case]
    (problem,) = flag_problems(*shlex.split(words), without=(case,))
    assert (problem.where, found in problem.found) == (where, True)
    assert expected in problem.expected
    assert problem.remedy


def test_all_flag_problems_at_once():
    found = flag_problems("--num-experts", "8", without=("--num-layers", "--vocab-size"))
    assert [problem.where for problem in found] == [
        "--num-layers",
        "--vocab-size",
        "--num-experts",
    ]


@given(st.lists(st.sampled_from([*FLAGS, "--swiglu", "5", "-1", "x", "--kv-channels=3", "="])))
def test_any_flags_give_a_model_or_problems(words):
    for problem in flag_problems(*words):
        assert problem.found and problem.expected and problem.remedy
