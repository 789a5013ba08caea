"""Flags are found among the words of a command as argparse finds them."""

import doctest

import pytest

from zorse_megatron.errors import FlagError
from zorse_megatron.flags import command
from zorse_megatron.flags.command import find_flags, last_values, split_ours, split_rest


def test_examples():
    assert doctest.testmod(command).failed == 0


def test_what_is_left_keeps_its_order():
    words = ["--a", "1", "--left-out", "x", "stray", "--b=2", "--left-out=y", "-3"]
    found, rest = find_flags(words, {"--left-out": "?"})
    assert [each.values for each in found] == [("x",), ("y",)]
    assert rest == ("--a", "1", "stray", "--b=2", "-3")


def test_a_flag_that_is_not_asked_for_is_no_value():
    """argparse takes a word with a space for a value where it does not know the flag."""
    words = ["--recompute-modules", "mlp", "--data-path=my corpus", "--save=my folder"]
    found, rest = find_flags(words, {"--recompute-modules": "*", "--save": "?"})
    assert [each.values for each in found] == [("mlp",), ("my folder",)]
    assert rest == ("--data-path=my corpus",)


def test_flags_are_not_abbreviated():
    assert last_values(["--sav", "x", "--save-interval", "2"], ["--save"]) == {}


def test_negative_numbers_are_values():
    assert last_values(["--seed", "-5", "--lr=-1e-3"], ["--seed", "--lr"]) == {
        "--seed": "-5",
        "--lr": "-1e-3",
    }


def test_misspelt_flags_of_ours_are_ours():
    found, rest = split_ours(["--zorse-plna", "p.json", "--lr", "1"])
    assert [each.flag for each in found] == ["--zorse-plna"] and rest == ("--lr", "1")


def test_a_flag_of_ours_quoted_together_with_its_value_is_ours():
    """So that its misspelling is told, instead of stock training without the plan."""
    found, rest = split_ours(["--lr", "1", "--zorse-plan p.json", "--bf16"])
    assert [each.flag for each in found] == ["--zorse-plan p.json"]
    assert rest == ("--lr", "1", "--bf16")


def test_a_switch_with_a_value_is_refused():
    with pytest.raises(FlagError, match="--bf16"):
        find_flags(["--bf16=1"], {"--bf16": 0})


def test_values_of_flags_that_nobody_knows_are_no_strays():
    assert split_rest(["a", "--nope", "b", "-5", "--more=1"]) == (["--nope", "--more"], ["a"])
