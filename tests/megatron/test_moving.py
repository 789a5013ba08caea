"""To another plan between two steps: as if saved under the one and loaded under the other.

One run of eight steps is asked three times. After two steps for a plan of another batch, and after
four a rank fails before all have agreed: the training goes on as it was. After six it moves.
"""

import contextlib
import io
import json
import re
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from tests.megatron.checkpoint_jobs import read_checkpoint
from tests.megatron.comparison import Recorded, plan_run
from tests.megatron.plans import TWO_BY_TWO, chunked_plan, in_the_host, plan_of, replica, tp_replica
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.test_checkpoints import Saved
from zorse_megatron.inputs.status import RUNNING_PLAN_NAME, STATUS_NAME, load_status
from zorse_megatron.live.move import REQUEST_NAME
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import save_plan

MOVED, STEPS = 6, 8
FP16 = ("--fp16", "--initial-loss-scale", "64")  # nothing overflows
OTHER_SCALE = ("--initial-loss-scale", "16")
STATE_BYTES = 3 * 4
"""Of an element: main parameter and two moments."""
# Chunks of which a rank keeps shards, with all that may be in the host; then with a TP group of
# ranks. The shards end within rows, so a rank has several blocks of a parameter.
PAIR = tuple(
    replace(each, shard_weight=weight)
    for each, weight in zip(TWO_BY_TWO.groups[0].replicas, (1.0, 2.7), strict=True)
)
A = in_the_host(
    replace(
        TWO_BY_TWO, groups=(replace(TWO_BY_TWO.groups[0], replicas=PAIR), *TWO_BY_TWO.groups[1:])
    )
)
B = in_the_host(
    chunked_plan(
        [(tp_replica((0, 2), 4, 2),), (replica(1, 4, 2),)], [(0, 1), (1, 1), (0, 1), (1, 1)]
    )
)

OTHER_BATCH = plan_of(((replica(0, 4, 1),), 1), ((replica(1, 4, 1), replica(2, 4, 0)), 3))


ANOTHERS = "somebody's file"


@dataclass(frozen=True, kw_only=True)
class Runs:
    moved: Recorded
    resumed: Recorded
    """From what the other one saved when it moved."""
    directory: Path


def both_runs(a: Plan, b: Plan, directory: Path, flags: list[str], *others: str) -> Runs:
    """`others`: flags with which the resumed run starts, and that a checkpoint overrules."""
    status, saves = directory / "status", directory / "moved"
    status.mkdir(parents=True)
    save_plan(b, status / REQUEST_NAME)  # of a run before this one
    (directory / "another's").write_text(ANOTHERS)
    for name in (STATUS_NAME, RUNNING_PLAN_NAME):
        (status / name).symlink_to(directory / "another's")
    save_plan(OTHER_BATCH, status / "first.json")
    save_plan(b, status / "then.json")
    moved = plan_run(
        a,
        [*flags, "--save", str(saves), "--zorse-status", str(status)],
        entry="tests.megatron.moving_entry",
        env={"ZORSE_TEST_MOVES": str(status)},
    )
    load = ("--load", str(saves), "--ckpt-step", str(MOVED), "--save", str(directory / "resumed"))
    return Runs(moved=moved, resumed=plan_run(b, [*flags, *load, *others]), directory=directory)


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    """All tensors to the bit, and where the training is."""
    (tensors, common), (others, other_common) = map(read_checkpoint, (found, expected))
    assert tensors.keys() == others.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in tensors)
    for key, tensor in others.items():
        assert not isinstance(tensor, torch.Tensor) or torch.equal(tensors[key], tensor), key
    for key in ("iteration", "opt_param_scheduler", "num_floating_point_operations_so_far"):
        assert common[key] == other_common[key], key
    assert common["optimizer"] == other_common["optimizer"]
    for name in ("consumed_train_samples", "consumed_valid_samples"):
        assert getattr(common["args"], name) == getattr(other_common["args"], name), name


def owned(directory: Path, rank: int, when: str) -> set[tuple[str, tuple[int, ...]]]:
    """Every element, by name and place."""
    blocks = json.loads((directory / f"owned-rank{rank}.json").read_text())[when]
    return {
        (name, at)
        for name, offset, size in blocks
        for at in product(*(range(o, o + n) for o, n in zip(offset, size, strict=True)))
    }


def assert_bytes(runs: Runs, world_size: int) -> None:
    """What was sent is what the new owners did not have; the peak is within what was expected."""
    status = runs.directory / "status"
    lacking = sum(
        len(owned(status, rank, "after") - owned(status, rank, "before"))
        for rank in range(world_size)
    )
    (line,) = re.findall(r"zorse: (moved .*)", runs.moved.outputs[0])
    sent, had_to, held, expected = (
        int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", line)
    )
    assert sent == had_to == STATE_BYTES * lacking > 0
    assert 0 < held <= expected


def assert_runs(runs: Runs, world_size: int) -> None:
    """All of it: moved once, not the first time, and with nothing changed by either."""
    said = runs.moved.outputs[0]
    assert "is older than this run and is dropped" in said
    assert "the training goes on as it is: rank 0: The command does not fit the plan" in said
    assert "--global-batch-size: found 8; expected 4" in said
    assert "the training goes on as it is: rank 1: MemoryError: no room for it" in said
    assert f"from iteration {MOVED + 1} on the training runs under plan" in said
    assert [step["iteration"] for step in runs.moved.steps] == list(range(1, STEPS + 1))
    assert runs.moved.steps[MOVED:] == runs.resumed.steps
    checkpoints = [runs.directory / each / f"iter_{STEPS:07}" for each in ("moved", "resumed")]
    run_megatron_ranks(1, assert_same_checkpoint, *checkpoints)
    assert_bytes(runs, world_size)
    moves = load_status(runs.directory / "status").moves
    why = [move.refused for move in moves]
    assert why[0] is not None and "--global-batch-size: found 8; expected 4" in why[0]
    assert why[1:] == ["rank 1: MemoryError: no room for it", None]
    assert (runs.directory / "another's").read_text() == ANOTHERS, "written through a link"


def test_goes_on_as_from_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    flags = [*Saved(corpus).flags(*FP16), "--train-iters", str(STEPS)]
    runs = both_runs(A, B, tmp_path, flags, *OTHER_SCALE)
    assert_runs(runs, A.world_size)
    alone = plan_run(A, [*flags, "--train-iters", str(MOVED)])
    assert runs.moved.steps[:MOVED] == alone.steps


def test_adapters_move_and_their_base_comes_again(corpus: Path, tmp_path: Path) -> None:
    """In fp32, with a group that cuts matrices of unlike width between its ranks."""
    lora = ("--zorse-lora", "rank=3,alpha=6,targets=q,o,up,down")
    flags = [*Saved(corpus).flags(*lora), "--train-iters", str(STEPS)]
    assert_runs(both_runs(A, B, tmp_path, flags), A.world_size)


def look_for_requests(directory: Path) -> tuple[list[float], str]:
    """What rank 0 tells in a few iterations, and writes, where there is something else first."""
    from zorse_megatron.adapter.watching import PlanRequests

    request = directory / REQUEST_NAME
    request.mkdir()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        requests = PlanRequests.of(directory, rank=0, is_first=True)
        codes = [requests.code() for _ in range(3)]
        request.rmdir()
        request.write_text("{}")
        codes.append(requests.code())
    return codes, said.getvalue()


def test_a_request_that_is_no_file_is_told_once(tmp_path: Path) -> None:
    ((codes, said),) = run_megatron_ranks(1, look_for_requests, tmp_path)
    assert codes == [0, 0, 0, 1]
    assert said.count(f"{REQUEST_NAME}: found a directory; expected a plan file") == 1
