"""A training command: its words, flags, model, and what a CPU adds."""

import argparse
import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.flag_samples import all_words
from zorse_megatron.errors import FlagError, ModelError
from zorse_megatron.flags import model_in_flags as megatron_flags
from zorse_megatron.flags.command import (
    find_flags,
    last_values,
    read_command,
    split_ours,
    split_rest,
)
from zorse_megatron.flags.installed_software import with_cpu_flags
from zorse_megatron.flags.model_in_flags import shape_from_flags
from zorse_megatron.flags.table import flags
from zorse_megatron.inputs import model
from zorse_megatron.inputs.model import MODELS, Experts, ModelShape, flags_of_shape
from zorse_megatron.launch.pretrain_command import split_command

# The model.

LLAMA = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
--seq-length 2048 --max-position-embeddings 4096 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--vocab-size 32000 --micro-batch-size 1 --lr=3e-4 --bf16"""


def test_llama():
    found = shape_from_flags(shlex.split(LLAMA))
    assert vars(found) == {**vars(MODELS["llama-7b"]), "name": "megatron flags"}


def test_megatron_defaults():
    found = shape_from_flags(
        shlex.split(
            "--num-layers=4 --hidden-size=64 --num-attention-heads=8 --seq-length=128 "
            "--max-position-embeddings=256 --vocab-size=50257"
        )
    )
    assert found == ModelShape(
        name="megatron flags",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=8,
        vocab_size=50304,
        seq_length=128,
        tied_embeddings=True,
        activation="gelu",
        norm="layernorm",
        position_embedding="learned",
        max_positions=256,
        linear_bias=True,
    )


def test_other_flags():
    found = shape_from_flags(
        shlex.split(
            "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --kv-channels"
            " 32 --group-query-attention --num-query-groups 2 --use-rotary-position-embeddings "
            "--padded-vocab-size 1000 --squared-relu --disable-bias-linear --add-qkv-bias "
            "--qk-layernorm"
        )
    )
    assert (found.kv_channels, found.num_query_groups, found.vocab_size) == (32, 2, 1000)
    assert (found.activation, found.position_embedding) == ("squared_relu", "rope")
    assert (found.linear_bias, found.qkv_bias, found.qk_norm) == (False, True, True)


EXPERTS = "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 96 --disable-bias-linear"


@pytest.mark.parametrize(
    ("more", "experts"),
    [
        ("", Experts(num_experts=8, per_token=3, ffn_hidden_size=96)),
        (
            "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate "
            "--moe-router-pre-softmax --moe-layer-freq [1]*2",
            Experts(
                num_experts=8,
                per_token=3,
                ffn_hidden_size=96,
                shared_ffn_hidden_size=40,
                has_shared_gate=True,
                scores_all=True,
            ),
        ),
    ],
)
def test_experts(more, experts):
    words = [word for pair in FLAGS.items() for word in pair]
    found = shape_from_flags([*words, *shlex.split(EXPERTS), *shlex.split(more)])
    assert found.experts == experts
    again = dataclasses.replace(found, name="again", max_positions=32)
    assert vars(shape_from_flags(flags_of_shape(again))) == {**vars(again), "name": found.name}


@pytest.mark.parametrize(("freq", "dense"), [("2", (1,)), ("[0,1]", (0,)), ("([1]+[0])", (1,))])
def test_dense_layers_among_experts(freq, dense):
    words = [word for pair in FLAGS.items() for word in pair]
    found = shape_from_flags([*words, *shlex.split(EXPERTS), "--moe-layer-freq", freq])
    assert found.dense_layers == dense


def test_experts_have_megatrons_defaults():
    words = [word for pair in FLAGS.items() for word in pair]
    usual = shape_from_flags([*words, "--num-experts", "4"])
    assert usual.experts == Experts(num_experts=4, per_token=2, ffn_hidden_size=256)
    assert shape_from_flags([*words, "--num-experts", "0"]).experts is None


@pytest.mark.parametrize(
    "name", ["olmoe-1b-7b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite"]
)
def test_flags_of_models_with_experts(name):
    again = shape_from_flags(flags_of_shape(MODELS[name]))
    assert vars(again) == {**vars(MODELS[name]), "name": "megatron flags"}


def test_the_last_of_equal_flags_counts():
    assert shape_from_flags([*shlex.split(LLAMA), "--num-layers", "40"]).num_layers == 40


def test_vocabulary_is_padded_for_tensor_parallel():
    words = shlex.split(LLAMA.replace("32000", "50257"))
    assert shape_from_flags(words, tensor_parallel=4).vocab_size == 50688
    odd = [*words, "--make-vocab-size-divisible-by", "1"]
    assert shape_from_flags(odd).vocab_size == 50257


def test_flags_exist_in_megatron():
    """Spelled out in its sources, or made from the name of a field."""
    roots = importlib.util.find_spec("megatron").submodule_search_locations
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for root in roots
        for folder in ("training", "core/transformer")
        for path in (Path(root) / folder).rglob("*.py")
    )
    ours = (megatron_flags.__file__, model.__file__)
    text = "".join(Path(each).read_text(encoding="utf-8") for each in ours)
    flags = set(re.findall(r'"(--[a-z-]+)"', text)) - {"--"}
    assert len(flags) > 20
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        assert flag in sources or re.search(rf"\b{name}\b", sources), flag


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
    "text": ("--num-layers two", "--num-layers", '"two"', "an integer"),
    "zero": ("--hidden-size 0", "--hidden-size", '"0"', "a positive integer"),
    "absurd": ("--num-layers 9999999999", "--num-layers", '"9999999999"', "a positive integer"),
    "no value": ("--seq-length --bf16", "--seq-length", "no value", "one value"),
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
    "of other layers": (
        "--num-experts 8 --moe-layer-freq ([0]+[1]*3)",
        "--moe-layer-freq",
        "([0]+[1]*3)",
        "a number, or a list such as ([0]*1+[1]*1)",
    ),
    "no layer with experts": (
        "--num-experts 8 --moe-layer-freq [0]*2",
        "--moe-layer-freq",
        "[0]*2",
        "layers with experts",
    ),
    "too many of them": (
        "--num-experts 2 --moe-router-topk 3",
        "--moe-router-topk",
        "3 of 2",
        "as",
    ),
    "one of them": ("--num-experts 2 --moe-router-topk 1", "--moe-router-topk", "1 expert", "all"),
    "a gate of nothing": (
        "--num-experts 2 --moe-shared-expert-gate",
        "--moe-shared-expert-gate",
        "not there",
        "it beside",
    ),
    "shared experts with biases": (
        "--num-experts 2 --moe-shared-expert-intermediate-size 64",
        "--moe-shared-expert-intermediate-size",
        "biases",
        "one without",
    ),
    "multi-token prediction": (
        "--mtp-num-layers 1",
        "--mtp-num-layers",
        "the flag",
        "a model without it",
    ),
    "latent attention of no width": (
        "--multi-latent-attention --kv-lora-rank 0",
        "--kv-lora-rank",
        '"0"',
        "a positive integer",
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
    found = flag_problems("--mtp-num-layers", "1", without=("--num-layers", "--vocab-size"))
    assert [problem.where for problem in found] == [
        "--num-layers",
        "--vocab-size",
        "--mtp-num-layers",
    ]


@given(st.lists(st.sampled_from([*FLAGS, "--swiglu", "5", "-1", "x", "--kv-channels=3", "="])))
def test_any_flags_give_a_model_or_problems(words):
    for problem in flag_problems(*words):
        assert problem.found and problem.expected and problem.remedy


# Words.


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


@pytest.mark.parametrize(
    "schedule", [["--step-batch-size-schedule", "0:8"], ["--step-batch-size-schedule=0:8"]]
)
def test_what_counts_by_batches_needs_batches_of_one_size(schedule):
    plan = ["--zorse-plan", "plan.json"]
    counting = ["--zorse-rebalance", "on", "--zorse-status", "here"]
    with pytest.raises(FlagError) as raised:
        split_command([*plan, *counting, *schedule])
    assert [each.where for each in raised.value.problems] == ["--zorse-rebalance", "--zorse-status"]
    split_command([*plan, *counting])
    split_command([*plan, "--zorse-rebalance", "off", *schedule])


def test_the_update_of_shards_is_one_of_three():
    plan = ["--zorse-plan", "plan.json"]
    assert split_command(plan).options.update == "auto"
    assert split_command([*plan, "--zorse-update", "fused"]).options.update == "fused"
    with pytest.raises(FlagError, match="--zorse-update: found 'quick'"):
        split_command([*plan, "--zorse-update", "quick"])


# Ours among them.


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


def test_flags_of_ours_are_not_abbreviated():
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


# Without a GPU.

CPU_FLAGS = [
    *("--transformer-impl", "local", "--distributed-backend", "gloo"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
    *("--no-masked-softmax-fusion", "--no-rope-fusion"),
]


def test_adds_all_to_a_command_without_them() -> None:
    assert with_cpu_flags(["--bf16"]) == ["--bf16", *CPU_FLAGS]


def test_adds_nothing_twice() -> None:
    once = with_cpu_flags(["--seed", "-1"])
    assert with_cpu_flags(once) == once


def test_adds_only_what_lacks() -> None:
    given = ["--distributed-backend=gloo", "--no-rope-fusion", "--transformer-impl", "local"]
    added = with_cpu_flags(given)[len(given) :]
    assert set(added).isdisjoint({"--distributed-backend", "--no-rope-fusion", "local"})
    assert "--no-persist-layer-norm" in added


@pytest.mark.parametrize(
    ("argv", "flag", "found"),
    [
        (["--transformer-impl", "transformer_engine"], "--transformer-impl", "transformer_engine"),
        (["--distributed-backend=nccl"], "--distributed-backend", "nccl"),
        (["--attention-backend", "flash"], "--attention-backend", "flash"),
        (["--fp8-format", "hybrid"], "--fp8-format", "hybrid"),
        (["--context-parallel-size", "2"], "--context-parallel-size", "2"),
        (["--sequence-parallel"], "--sequence-parallel", "the flag"),
        (["--async-save", "--bf16"], "--async-save", "the flag"),
        (
            ["--cuda-graph-impl", "none", "--cuda-graph-impl", "local"],
            "--cuda-graph-impl",
            "local",
        ),
    ],
)
def test_names_the_flag_that_cannot_work(argv: list[str], flag: str, found: str) -> None:
    with pytest.raises(FlagError) as raised:
        with_cpu_flags(argv)
    (problem,) = raised.value.problems
    assert (problem.where, problem.found) == (flag, found)


def test_names_all_of_them_at_once() -> None:
    with pytest.raises(FlagError) as raised:
        with_cpu_flags(["--distributed-backend", "nccl", "--sequence-parallel"])
    assert {p.where for p in raised.value.problems} == {
        "--distributed-backend",
        "--sequence-parallel",
    }


@pytest.mark.parametrize(
    "argv",
    [
        ["--attention-backend", "auto"],
        ["--context-parallel-size", "1"],
        ["--cuda-graph-impl", "none"],
    ],
)
def test_harmless_values_pass(argv: list[str]) -> None:
    assert with_cpu_flags(argv) == [*argv, *CPU_FLAGS]
