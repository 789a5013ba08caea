"""Too little memory: every rank ends in time, one line says who, what and what would help.

The last checkpoint stays: training resumes from it.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.megatron.comparison import BASE_FLAGS, UNTIED, Recorded, run_recorded
from tests.megatron.launch import RunResult, run_ranks
from tests.megatron.plans import BOTH_ENDS, chunked_plan, in_the_host, replica
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.megatron.whole_checkpoint import assert_latest
from zorse_megatron.live.watched_rank import LOST_RANK
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import save_plan

TIMEOUT_S = 12.0
BAD_INPUT = 2
HIDDEN, SEQUENCE, VOCABULARY, NUM_LAYERS = 32, 32, 256, 4
LAYER = 12 * HIDDEN**2 + 13 * HIDDEN
PARAMETERS = NUM_LAYERS * LAYER + (2 * VOCABULARY + SEQUENCE + 2) * HIDDEN
IN_HOST = in_the_host(BOTH_ENDS)
# One rank owns all optimizer state, another one none.
STARVING = chunked_plan([(replica(0, 1, 4, 1.0), replica(1, 1, 4, 0.0))], [(0, 2), (0, 2)])


def run_with_fault(plan: Plan, work: Path, *more: str, fault: str = "none:0:0") -> RunResult:
    save_plan(plan, work / "plan.json")
    saving = ("--save", str(work / "checkpoints"), "--save-interval", "2")
    return run_ranks(
        [*flags(work), *saving, *more],
        plan.world_size,
        entry="tests.megatron.dying_entry",
        timeout_s=90,
        grace_after_failure_s=TIMEOUT_S,
        env={
            "ZORSE_TEST_DEATH": fault,
            "ZORSE_TEST_RECORD": str(work / "record"),
        },
    )


def flags(work: Path) -> list[str]:
    return [
        *BASE_FLAGS,
        *("--train-iters", "3", "--mock-data", "--split", "90,5,5", *TOKENIZER_FLAGS, *UNTIED),
        *("--zorse-plan", str(work / "plan.json")),
    ]


def assert_said(result: RunResult, culprit: int, *words: str) -> None:
    """The culprit says it, and the job's last line; every rank ends as it should."""
    for rank, code in enumerate(result.returncodes):
        assert code == (BAD_INPUT if rank == culprit else LOST_RANK), result.outputs[rank]
    own = result.outputs[culprit]
    own = own[own.index("zorse: error:") :]
    for text in (own, result.outputs[0].splitlines()[-1]):
        (line, *_) = [line for line in text.splitlines() if "expected" in line]
        assert all(word in line for word in words), line


@pytest.fixture(scope="module")
def needed_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """What the plan asks of the host, as the error says."""
    result = run_with_fault(
        IN_HOST, tmp_path_factory.mktemp("host"), "--zorse-host-memory-limit", "1e-4"
    )
    assert set(result.returncodes) == {BAD_INPUT}
    (found,) = re.findall(r"found ([\d,]+) bytes to offload to its memory", result.outputs[0])
    assert "expected at most 100,000 bytes, --zorse-host-memory-limit" in result.outputs[0]
    return int(found.replace(",", ""))


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run that nothing stops, and where it has written what ranks hold."""

    run: Recorded
    directory: Path


@pytest.fixture(scope="module")
def whole(needed_bytes: int, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """With all in the host, which has no more memory than is asked for."""
    work = tmp_path_factory.mktemp("whole")
    save_plan(IN_HOST, work / "plan.json")
    limit = ("--zorse-host-memory-limit", str(needed_bytes / 1e9))
    words = [*flags(work), *limit, "--zorse-memory", str(work)]
    return Whole(run=run_recorded(words, IN_HOST.world_size, timeout_s=90), directory=work)


@pytest.mark.parametrize(
    ("fault", "plan", "place"),
    [
        ("oom:2:3", BOTH_ENDS, "rank 2 at 1B0 (chunk 1)"),
        ("oom-step:1:3", IN_HOST, "rank 1 at 1STEP"),
    ],
)
def test_no_memory_left_in_a_step(fault: str, plan: Plan, place: str, tmp_path: Path) -> None:
    """`test_no_host_memory_left_in_a_step` goes on from the checkpoint that these leave too."""
    result = run_with_fault(plan, tmp_path, fault=fault)
    words = (place, "no memory left on the device", "Most of it is")
    assert_said(result, int(fault.split(":")[1]), *words)
    assert_latest(tmp_path / "checkpoints", 2)


def test_no_host_memory_left_in_a_step(whole: Whole, tmp_path: Path) -> None:
    result = run_with_fault(IN_HOST, tmp_path, fault="host:0:3")
    words = ("rank 0 at 0F0 (chunk 0)", "more for activations", "turn offload.activations off")
    assert_said(result, 0, *words)
    assert_latest(tmp_path / "checkpoints", 2)
    # From the checkpoint of the second step to the weights of a run that nothing has stopped.
    load = ("--load", str(tmp_path / "checkpoints"))
    resumed = run_recorded([*flags(tmp_path), *load], IN_HOST.world_size, timeout_s=90)
    assert resumed.steps == whole.run.steps[2:]
    for name, copies in resumed.final.items():
        assert torch.equal(copies[0], whole.run.final[name][0]), name


def test_a_shard_that_starves_its_rank(tmp_path: Path) -> None:
    """Rank 1 has room for what it holds, rank 0 not for all optimizer state."""
    run_with_fault(STARVING, tmp_path, "--zorse-memory", str(tmp_path)).check()
    totals = []
    for rank in (0, 1):
        peaks = json.loads((tmp_path / f"memory-rank{rank}.json").read_text())["peaks"]
        totals.append(peaks["total"]["num_bytes"])
    assert totals[0] > totals[1]
    limit = str((totals[0] - 1) / 1e9)
    result = run_with_fault(STARVING, tmp_path, "--zorse-memory-limit", limit)
    assert_said(result, 0, "rank 0 at", "bytes", "optimizer state")
    assert_latest(tmp_path / "checkpoints", 3)  # of the first run


def test_a_chunk_that_is_larger_than_the_device(tmp_path: Path) -> None:
    chunk_bytes = 4 * (2 * LAYER + (VOCABULARY + SEQUENCE) * HIDDEN)
    limit = str((chunk_bytes - 1) / 1e9)
    result = run_with_fault(STARVING, tmp_path, "--zorse-memory-limit", limit)
    assert set(result.returncodes) <= {BAD_INPUT, LOST_RANK}
    said = "\n".join(result.outputs)
    assert f"expected {chunk_bytes - 1:,} bytes" in said
    assert "Most of it is parameters: give the group more chunks" in said
    assert "(chunk 0)" in said


def test_too_little_host_memory_is_found_before_the_start(needed_bytes: int) -> None:
    """All parameters and moments once, each layer's input of what waits for its backward, and
    gradients of the last chunk, which is not the last of its group to be reduced.

    Group 0 (layers 0 and 3) runs chunk 0 for all samples. On the last chunk each backward follows
    its forward, and group 1 (layers 1 and 2) has two micro-batches, whose backwards come two
    computations after their forwards: these stay. Stock pads parameters to multiples of 64
    elements.
    """
    boundary = SEQUENCE * HIDDEN * 4
    activations = 8 * boundary
    last_chunk = LAYER + (VOCABULARY + 2) * HIDDEN
    expected = 4 * PARAMETERS + 8 * PARAMETERS + 4 * last_chunk + activations
    assert expected <= needed_bytes <= 1.01 * expected


def test_host_memory_that_suffices_is_enough(needed_bytes: int, whole: Whole) -> None:
    peaks = [
        json.loads((whole.directory / f"memory-rank{rank}.json").read_text())["peaks"]
        for rank in range(IN_HOST.world_size)
    ]
    categories = ("parameters", "optimizer state", "gradients", "activations")
    held = [
        peak[f"{category} in the host"]["num_bytes"]
        for peak in peaks
        for category in categories
        if f"{category} in the host" in peak
    ]
    assert 0.95 * needed_bytes <= sum(held) <= needed_bytes
