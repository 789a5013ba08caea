"""A node dies in an iteration: the others go on from what it has mirrored, under another plan.

One run saves checkpoints of iterations 2 and 4 and mirrors every iteration; in the second one node
b has no room for what it is to keep for others, and in the fifth one node c dies. Then the last
checkpoint is put aside: a start from the copies is compared with a start from it.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.megatron.comparison import (
    Recorded,
    chunked_plan,
    plan_of,
    plan_run,
    replica,
    stock_run,
)
from tests.megatron.launch import run_ranks
from tests.megatron.ministages import PAIR, in_the_host
from tests.megatron.test_checkpoints import MAX_DIFFERENCE, Saved
from tests.megatron.upstream import SCRIPT
from zorse_megatron.checkpoints.folder import TRACKER
from zorse_megatron.errors import RankFailure
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import save_plan

SAVED, FULL_IN, MIRRORED, LOST_IN, STEPS = 2, 2, 4, 5, 6
ENTRY = "tests.megatron.mirror_entry"
# Rank 1 owns a third of rank 0's share; chunks, their state and their parameters are in the host.
A = in_the_host(
    chunked_plan([PAIR, (replica(2, 4, 1), replica(3, 2, 2))], [(0, 1), (1, 1), (0, 1), (1, 1)])
)
B = plan_of(((replica(0, 2, 4),), 3), ((replica(1, 4, 2),), 1))


@dataclass(frozen=True, kw_only=True)
class Lost:
    """What is left of a run that lost node c."""

    directory: Path
    flags: tuple[str, ...]

    @property
    def save(self) -> Path:
        return self.directory / "checkpoints"

    def go_on(self, plan: Plan, nodes: str, *alive: str, more: tuple[str, ...] = ()) -> Recorded:
        """Start again, with the shared memory of these nodes, and without the last checkpoint."""
        shutil.rmtree(self.save / f"iter_{MIRRORED:07}", ignore_errors=True)
        shutil.rmtree(self.save / f"iter_{STEPS:07}", ignore_errors=True)
        (self.save / TRACKER).write_text(str(SAVED))
        shm = self.directory / f"shm of {nodes}"
        for node in alive:
            shutil.copytree(self.directory / "shm" / node, shm / node)
        env = {"ZORSE_TEST_NODES": nodes, "ZORSE_TEST_SHM": str(shm)}
        found = plan_run(plan, (*self.flags, *more), entry=ENTRY, env=env)
        assert not list(shm.glob("*/*"))  # it has come to its end
        return found


@pytest.fixture(scope="module")
def lost(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Lost:
    directory = tmp_path_factory.mktemp("mirror")
    flags = Saved(corpus).flags(
        *("--train-iters", str(STEPS), "--save", str(directory / "checkpoints")),
        *("--load", str(directory / "checkpoints"), "--zorse-mirror", "1"),
    )
    save_plan(A, directory / "a.json")
    died = run_ranks(
        [*SCRIPT, *flags, "--zorse-plan", str(directory / "a.json")],
        A.world_size,
        entry=ENTRY,
        timeout_s=90,
        grace_after_failure_s=30,
        env={
            "ZORSE_TEST_NODES": "a b c c",
            "ZORSE_TEST_SHM": str(directory / "shm"),
            "ZORSE_TEST_DEATH": f"c:{LOST_IN}",
            "ZORSE_TEST_FULL": f"b:{FULL_IN}",
            "ZORSE_TEST_RECORD": str(directory / "record"),
        },
    )
    assert all(died.returncodes) and "SIGKILL" in died.outputs[0], died.outputs[0]
    assert f"iteration {FULL_IN} is not mirrored, as rank 1 cannot" in died.outputs[0]
    kept = [path.name.split("-")[0] for path in (directory / "shm").glob("*/*/*")]
    assert set(kept) == {f"iter{MIRRORED - 1:010}", f"iter{MIRRORED:010}"}
    assert len(kept) == 2 * 2 * A.world_size  # two versions of two copies of each rank
    shutil.copytree(directory / "checkpoints", directory / "aside")
    return Lost(directory=directory, flags=tuple(flags))


@pytest.mark.slow
def test_goes_on_from_the_copies_as_from_a_checkpoint(lost: Lost, corpus: Path) -> None:
    found = lost.go_on(B, "a b", "a", "b", more=("--zorse-mirror-overlap", "on"))
    assert f"goes on from the state of iteration {MIRRORED} that 4 ranks" in found.outputs[0]
    assert all("written by zorse-host" in each for each in found.outputs)  # beside the training
    assert not any("written by MainThread" in each for each in found.outputs)
    aside = ("--load", str(lost.directory / "aside"), "--ckpt-step", str(MIRRORED))
    resumed = plan_run(B, [*Saved(corpus).flags("--train-iters", str(STEPS)), *aside])
    assert [step["iteration"] for step in found.steps] == list(range(MIRRORED + 1, STEPS + 1))
    assert found.steps == resumed.steps
    stock = stock_run(tuple(Saved(corpus).flags("--train-iters", str(STEPS))))
    for mine, theirs in zip(found.steps, stock.steps[MIRRORED:], strict=True):
        assert abs(mine["loss"]["lm loss"] - theirs["loss"]["lm loss"]) <= MAX_DIFFERENCE
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_goes_on_from_the_checkpoint_where_two_nodes_are_lost(lost: Lost) -> None:
    found = lost.go_on(B, "a a", "a")
    assert f"no mirrored state is taken: of iteration {MIRRORED} the cop" in found.outputs[0]
    assert "node a is alone: no state is mirrored" in found.outputs[0]
    assert [step["iteration"] for step in found.steps] == list(range(SAVED + 1, STEPS + 1))


@pytest.mark.slow
def test_a_run_on_one_node_is_refused(corpus: Path, tmp_path: Path) -> None:
    flags = Saved(corpus).flags("--save", str(tmp_path / "saved"), "--zorse-mirror", "1")
    env = {"ZORSE_TEST_NODES": "a a", "ZORSE_TEST_SHM": str(tmp_path)}
    with pytest.raises(RankFailure, match="all ranks on node a"):
        plan_run(B, flags, entry=ENTRY, env=env)
