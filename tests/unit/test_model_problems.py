"""Malformed and absurd models in Megatron's flags: each gives one clear message."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.errors import ModelError
from zorse_megatron.flags.model_in_flags import shape_from_flags

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
