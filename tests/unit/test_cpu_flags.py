"""The flags of a CPU run: added where they lack, refused where they cannot work."""

import pytest

from zorse_megatron.errors import FlagError
from zorse_megatron.flags.installed_software import with_cpu_flags

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
