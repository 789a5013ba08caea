"""Ranks die at any instant of copying and of starting again: what is left is one whole version.

Ranks are generators that stop wherever a kill may come, and go on in any order that the points
allow where all wait for each other. Their folders are real. What they do is what `Mirror.after`
and `starting_point` do, in that order.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoint_folders import save
from tests.unit.test_mirror_files import content
from zorse_megatron.checkpoints.folder import TRACKER, Checkpoint, set_tracker
from zorse_megatron.checkpoints.position import NONE, UNKNOWN, position_at_a_look
from zorse_megatron.migration.mirror.choice import Copy, Whole, newest_whole
from zorse_megatron.migration.mirror.files import MirrorFolder
from zorse_megatron.migration.mirror.partners import mirror_nodes

TOGETHER = "all wait for each other"
ITERATIONS = 4
Events = Iterator[str]


class _KilledError(Exception):
    """In the middle of a write."""


class Job:
    """Ranks on nodes of which one dies, at an event that is drawn."""

    def __init__(self, root: Path, nodes: Sequence[str], start: str) -> None:
        self.root, self.nodes, self.start = root, nodes, start
        self.keepers = mirror_nodes(nodes, [1] * len(nodes), dict.fromkeys(nodes, 1))
        self.done = 0
        """The last iteration that all ranks know to be copied."""

    def folder(self, node: str) -> MirrorFolder:
        return MirrorFolder((node,), node=node, root=self.root)

    def copy(self, rank: int, iteration: int, node: str) -> Copy:
        return Copy(
            iteration=iteration,
            world_size=len(self.nodes),
            start=self.start,
            rank=rank,
            node=node,
        )

    def writes(self, rank: int, iteration: int, node: str) -> Events:
        def cut() -> Iterator[bytes]:
            yield content(iteration)[0]
            raise _KilledError

        here, copy = self.folder(node), self.copy(rank, iteration, node)
        with pytest.raises(_KilledError):
            here.write(copy, cut())
        yield "half"
        here.write(copy, content(iteration))
        yield "whole"

    def rank(self, rank: int, first: int, settles: Callable[[MirrorFolder], None]) -> Events:
        here = self.folder(self.nodes[rank])
        here.clear_unfinished()
        yield TOGETHER
        settles(here)
        yield TOGETHER  # as in every iteration that is trained
        for iteration in range(first, first + ITERATIONS):
            yield from self.writes(rank, iteration, self.nodes[rank])
            yield TOGETHER
            for source, keeper in enumerate(self.keepers):
                # One of the node's ranks: here the first one.
                if keeper == self.nodes[rank] and self.nodes.index(keeper) == rank:
                    yield from self.writes(source, iteration, keeper)
            yield TOGETHER
            self.done = max(self.done, iteration)
            if iteration == first:
                here.keep_only(self.start)

    def run(self, first: int, settles: Callable[[MirrorFolder], None], data: st.DataObject) -> None:
        """Until a number of events has happened that is drawn; then all processes are dead."""
        ranks = {each: self.rank(each, first, settles) for each in range(len(self.nodes))}
        waiting: set[int] = set()
        for _ in range(data.draw(st.integers(0, 80))):
            able = sorted(ranks.keys() - waiting)
            if not able:
                waiting, able = set(), sorted(ranks)
            if not able:
                return
            rank = data.draw(st.sampled_from(able))
            event = next(ranks[rank], None)
            if event is None:
                del ranks[rank]
            elif event is TOGETHER:
                waiting.add(rank)

    def found(self, alive: Sequence[str]) -> Whole | None:
        return newest_whole(copy for node in alive for copy in self.folder(node).copies())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_node_may_die_at_any_instant(data: st.DataObject) -> None:
    nodes = data.draw(
        st.lists(st.sampled_from("abc"), min_size=2, max_size=4).filter(lambda n: len(set(n)) > 1)
    )
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory), nodes, "s")
        job.run(1, MirrorFolder.clear, data)
        dead = data.draw(st.sampled_from([None, *sorted(set(nodes))]))
        alive = [each for each in sorted(set(nodes)) if each != dead]
        shutil.rmtree(job.folder(dead or "none").path, ignore_errors=True)
        whole = job.found(alive)
        assert_whole(job, whole, job.done)
        if whole is None or dead is not None:
            return
        # They start again from it, and all die once more: nothing newer is lost, nothing is mixed.
        again = Job(job.root, nodes, "t")
        kept = (whole.start, whole.iteration)
        again.run(whole.iteration + 1, lambda here: here.keep_only(*kept), data)
        assert_whole(again, again.found(alive), max(again.done, whole.iteration))


def assert_whole(job: Job, whole: Whole | None, at_least: int) -> None:
    if whole is None:
        assert at_least == 0
        return
    assert at_least <= whole.iteration <= at_least + 1
    for rank, node in enumerate(whole.nodes):
        copy = Copy(
            iteration=whole.iteration,
            world_size=len(whole.nodes),
            start=whole.start,
            rank=rank,
            node=node,
        )
        assert job.folder(node).read(copy) == b"".join(content(whole.iteration))


def test_how_far_a_checkpoint_is_that_cannot_be_loaded(tmp_path: Path) -> None:
    """State that is newer than a damaged checkpoint needs none of it."""
    assert position_at_a_look(tmp_path) == NONE
    save(tmp_path, 10)
    set_tracker(Checkpoint(root=tmp_path, iteration=10))
    assert position_at_a_look(tmp_path) == 10
    shutil.rmtree(tmp_path / "iter_0000010")
    assert position_at_a_look(tmp_path) == 10
    (tmp_path / TRACKER).write_text("ten")
    assert position_at_a_look(tmp_path) == UNKNOWN
    (tmp_path / TRACKER).write_text("release")
    assert position_at_a_look(tmp_path) == NONE
