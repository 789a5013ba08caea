"""A rank that dies: the others end in time, say which one is missing, and lose nothing."""

from pathlib import Path

import pytest

from tests.megatron.comparison import BASE_FLAGS, LAYOUTS, run_recorded
from tests.megatron.launch import RunResult, run_ranks
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.runtime.health import LOST_RANK
from zorse_megatron.schema.load import save_plan

TIMEOUT_S = 60.0
"""--distributed-timeout-minutes 1 in BASE_FLAGS."""
PLAN = LAYOUTS["2|1|2"]


def run_with_death(death: str, tmp_path: Path, **env: str) -> RunResult:
    save_plan(PLAN, tmp_path / "plan.json")
    return run_ranks(
        flags(tmp_path),
        PLAN.world_size,
        entry="tests.megatron.dying_entry",
        timeout_s=TIMEOUT_S + 60,
        grace_after_failure_s=TIMEOUT_S,
        env={"ZORSE_TEST_DEATH": death, "ZORSE_TEST_RECORD": str(tmp_path / "record"), **env},
    )


def flags(tmp_path: Path) -> list[str]:
    return [
        *BASE_FLAGS,
        *("--train-iters", "8", "--mock-data", "--split", "90,5,5", *TOKENIZER_FLAGS),
        *("--save", str(tmp_path / "checkpoints"), "--save-interval", "2"),
        *("--zorse-plan", str(tmp_path / "plan.json")),
    ]


def latest(tmp_path: Path) -> str:
    return (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip()


@pytest.mark.parametrize(
    ("death", "name", "reason"),
    [
        ("kill:1:5", "rank 1 (group 0, layers 0)", "has been silent for"),
        ("raise:3:5", "rank 3 (group 2, layers 3)", "failed (ValueError: this rank has"),
    ],
)
def test_rank_that_dies_in_a_step(death: str, name: str, reason: str, tmp_path: Path) -> None:
    result = run_with_death(death, tmp_path)
    dead = int(death.split(":")[1])
    for rank, (code, output) in enumerate(zip(result.returncodes, result.outputs, strict=True)):
        if rank == dead:
            assert code not in (0, LOST_RANK)
            continue
        assert code == LOST_RANK, output
        lines = [line for line in output.splitlines() if line.startswith("zorse: error:")]
        assert len(lines) == 1, lines
        assert name in lines[0] and reason in lines[0]
    assert result.wall_s < TIMEOUT_S + 10, "start-up included"
    assert latest(tmp_path) == "4"
    resumed = run_recorded(
        [*flags(tmp_path), "--load", str(tmp_path / "checkpoints")], PLAN.world_size
    )
    assert [step["iteration"] for step in resumed.steps] == [5, 6, 7, 8]


def test_rank_that_dies_in_a_save(tmp_path: Path) -> None:
    """An interrupted save never becomes the latest checkpoint."""
    result = run_with_death("save:4:2", tmp_path, ZORSE_TEST_TIMEOUT_S="12")
    assert all(result.returncodes)
    assert latest(tmp_path) == "2"
