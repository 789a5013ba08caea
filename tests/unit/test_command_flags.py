"""A command line is read as argparse reads it, with every problem at once."""

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.flag_samples import all_words
from zorse_megatron.errors import FlagError
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.table import flags
from zorse_megatron.launch.pretrain_command import split_command


class Refused(Exception):
    """argparse does not take the words."""


class Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process."""

    def error(self, message):
        raise Refused(message)


def reference():
    """A parser with the table's flags: argparse decides what belongs to what."""
    parser = Parser(allow_abbrev=False, add_help=False)
    types = {"int": int, "float": float}
    for flag in flags():
        options = {"dest": flag.name, "default": flag.default}
        if flag.kind == "boolean":
            options["action"] = argparse.BooleanOptionalAction
        elif flag.kind != "store":
            options["action"] = f"store_{flag.kind}"
        else:
            options |= {"nargs": flag.nargs, "type": types.get(flag.type, str)}
            options["choices"] = flag.choices
        spellings = flag.spellings[:1] if flag.kind == "boolean" else flag.spellings
        parser.add_argument(*spellings, **options)
    return parser


PARSER = reference()
SAMPLES = all_words()
ODD = ["", "-", "-5", "-1.5", "-x", "a b", "--seq-lenght", "--lr=1e-3", "--fp16=1", "7", "x"]


@pytest.mark.slow
@given(
    st.lists(
        st.one_of(
            st.sampled_from(SAMPLES), st.sampled_from([[word] for word in ODD if word != "--"])
        ),
        max_size=6,
    )
)
def test_words_are_read_as_by_argparse(parts):
    words = [word for part in parts for word in part]
    command = read_command(words)
    try:
        expected, unknown = PARSER.parse_known_args(words)
    except Refused:
        assert command.problems
        return
    if unknown:
        assert command.problems or command.unknown
    else:
        assert not command.problems and not command.unknown
    if not command.problems:
        assert vars(command.args) == vars(expected)


def test_every_problem_is_told_at_once():
    command = read_command(["--lr", "fast", "--num-layers", "--optimizer", "lamb", "odd", "--nope"])
    assert [problem.where for problem in command.problems] == [
        "--lr",
        "--num-layers",
        "--optimizer",
        "the training command",
    ]
    assert command.unknown == ("--nope",)


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "dir/train.py"])
def test_script_and_flags_of_ours_are_set_apart(script):
    words = [script, "--zorse-metrics", "m.jsonl", "--lr", "1", "--zorse-trace=t", "--bf16"]
    command = read_command(words)
    assert (command.script, command.args.lr, command.args.bf16) == (script, 1.0, True)
    assert not command.problems and not command.unknown
    assert command.given == {"lr", "bf16"}


def test_flags_are_not_abbreviated():
    assert read_command(["--global-batch", "8"]).unknown == ("--global-batch",)


def test_the_update_of_shards_is_one_of_three():
    plan = ["--zorse-plan", "plan.json"]
    assert split_command(plan).update == "auto"
    assert split_command([*plan, "--zorse-update", "fused"]).update == "fused"
    with pytest.raises(FlagError, match="--zorse-update: found 'quick'"):
        split_command([*plan, "--zorse-update", "quick"])
