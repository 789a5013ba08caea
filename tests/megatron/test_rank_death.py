"""A rank that dies: the others end in time, say which one is missing, and lose nothing."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.megatron.comparison import BASE_FLAGS
from tests.megatron.launch import RunResult, run_ranks
from tests.megatron.plans import LAYOUTS
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.megatron.whole_checkpoint import assert_latest
from zorse_megatron.live.watched_rank import LOST_RANK
from zorse_megatron.plan.plan_file import save_plan

SAVING = ("kill:1:3", "save:2:2")
NOTICED_S = 5.0
"""From a death to the end of all ranks."""


def run_with_death(death: str, layout: str, tmp_path: Path) -> tuple[RunResult, float]:
    """Run the job; return also when the last rank ended, in seconds after the death."""
    plan = LAYOUTS[layout]
    save_plan(plan, tmp_path / "plan.json")
    died = tmp_path / "died"
    result = run_ranks(
        [*flags(tmp_path), *(saving(tmp_path) if death in SAVING else [])],
        plan.world_size,
        entry="tests.megatron.dying_entry",
        timeout_s=90,
        grace_after_failure_s=30,
        env={
            "ZORSE_TEST_DEATH": death,
            "ZORSE_TEST_DIED": str(died),
            "ZORSE_TEST_RECORD": str(tmp_path / "record"),
        },
    )
    return result, time.time() - died.stat().st_mtime


def without_timeout(given: Sequence[str]) -> list[str]:
    """Tests of other things end sooner than Megatron would."""
    at = given.index("--distributed-timeout-minutes")
    return [*given[:at], *given[at + 2 :]]


def flags(tmp_path: Path) -> list[str]:
    return [
        *without_timeout(BASE_FLAGS),
        *("--train-iters", "6", "--mock-data", "--split", "90,5,5", *TOKENIZER_FLAGS),
        *("--zorse-plan", str(tmp_path / "plan.json")),
    ]


def saving(tmp_path: Path) -> list[str]:
    return ["--save", str(tmp_path / "checkpoints"), "--save-interval", "2"]


def assert_named(result: RunResult, dead: int, name: str, *, tracebacks: int) -> None:
    """One line of one rank says who it was; no rank ends well."""
    for rank, code in enumerate(result.returncodes):
        if rank == dead:
            assert code not in (0, LOST_RANK)
        else:
            assert code == LOST_RANK, result.outputs[rank]
    output = "\n".join(result.outputs)
    (line,) = [line for line in output.splitlines() if line.startswith("zorse: error:")]
    assert name in line
    assert result.outputs[0].splitlines()[-1] == line
    assert output.count("Traceback") == tracebacks, output


@pytest.mark.parametrize(
    ("death", "layout", "name"),
    [
        (
            "kill:1:3",
            "2|1",
            "rank 1 (group 0, layers 0) was killed by signal 9 (SIGKILL) in iteration 3, at ",
        ),
        # Of the others some do not talk to it.
        (
            "raise:3:2",
            "2|1|2",
            "rank 3 (group 2, layers 3) failed (ValueError: this rank has a fault of its own) in "
            "iteration 2, at ",
        ),
        (
            "exit:0:2",
            "2|1",
            "rank 0 (group 0, layers 0) has exited alone, with status 7, in iteration 2",
        ),
        (
            "kill-data:2:1",
            "2|1|2",
            "rank 2 (group 1, layers 1 to 2) was killed by signal 9 (SIGKILL) while it ",
        ),
        (
            "save:2:2",
            "2|1",
            "rank 2 (group 1, layers 1 to 3) was killed by signal 9 (SIGKILL) in the save of",
        ),
        (
            "start:2:1",
            "2|1",
            "rank 2 (group 1, layers 1 to 3) was killed by signal 9 (SIGKILL) at its start",
        ),
        (
            "meet:0:1",
            "2|1",
            "rank 0 (group 0, layers 0) was killed by signal 9 (SIGKILL) while the ranks",
        ),
    ],
)
def test_dead_rank_is_named_in_seconds(death: str, layout: str, name: str, tmp_path: Path) -> None:
    """Default flags: Megatron's timeout is ten minutes, torchrun's grace 30 s."""
    result, noticed_s = run_with_death(death, layout, tmp_path)
    dead = int(death.split(":")[1])
    assert_named(result, dead, name, tracebacks="raise" in death)
    assert noticed_s < NOTICED_S
    if death in SAVING:
        # No interrupted save is the latest; `test_memory_faults` goes on from such a checkpoint.
        assert_latest(tmp_path / "checkpoints", 2)
