"""Copies of all ranks' state in the memory of other nodes: written after iterations, and dropped.

All is done by all ranks together, between two iterations; with `--zorse-mirror-overlap` what
follows the copy of a rank's own state is done beside the next iterations. No rank writes a version
before all have the one before it, so that of the two that are kept one is whole whenever ranks die.
"""

import shutil
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zorse_megatron.adapter.moving.mirror_identity import identity_and_start
from zorse_megatron.adapter.moving.mirrored_state import MirroredState, packed
from zorse_megatron.adapter.moving.next_plan import frozen_problems
from zorse_megatron.adapter.moving.owned_parts import owned_parts
from zorse_megatron.adapter.moving.state import set_aside
from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.errors import ZorseError
from zorse_megatron.log import complain, say
from zorse_megatron.migration.mirror import files
from zorse_megatron.migration.mirror.choice import Copy, Whole
from zorse_megatron.migration.mirror.files import MirrorFolder
from zorse_megatron.migration.mirror.partners import MirrorError, mirror_nodes, mirror_ranks
from zorse_megatron.runtime.host_worker import HostTask, HostWorker

if TYPE_CHECKING:
    from zorse_megatron.adapter.session import PlanSession

_PIECE_BYTES = 1 << 24


class Mirror:
    """One rank's part; made by all ranks together."""

    def __init__(self, run: PlanRun, session: "PlanSession") -> None:
        """Raises MirrorError where a run begins on one node, FlagError for what does not fit."""
        assert run.mirror is not None
        self.every, self.overlaps = run.mirror.every, run.mirror.overlaps
        self.run, self.session = run, session
        self.group: Any = dist.new_group(backend="gloo", timeout=session.timeout)
        told = self.gathered((run.node, shutil.disk_usage(files.SHARED_MEMORY).free))
        self.nodes = tuple(node for node, _ in told)
        # Two ranks of a node may have seen it at different times.
        self._room = {node: max(1, min(n for m, n in told if m == node)) for node in self.nodes}
        self.is_alone = len(self._room) == 1
        training, self.start = identity_and_start(
            run.mirror.training, self.group, begins=not self.is_alone
        )
        if training is None:  # a run of this one node; of several nodes, one may be left
            mirror_nodes(self.nodes, [0] * len(self.nodes), self._room)
            raise AssertionError("found one node that can mirror; expected a MirrorError")
        if self.is_alone:
            say(f"node {run.node} is alone: no state is mirrored before there is another one")
        # Nodes that are pretended on one machine have folders of their own.
        self.folder = MirrorFolder((*training, run.node), node=run.node, root=files.SHARED_MEMORY)
        self.taken: Whole | None = None
        """What this start goes on from."""
        self._worker = HostWorker()
        self._under_way: HostTask | None = None
        """What is done beside the training, if anything."""
        self._takers: tuple[int, ...] | None = None
        self._has_older = True
        """Whether copies of the start before may be there: until one of this start is whole."""

    def gathered(self, mine: Any) -> list[Any]:
        """What every rank has, by rank."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    @property
    def dtypes(self) -> Any:
        """What groups compute in."""
        return tuple(sorted(set(self.session.dtypes)))

    def refuse_frozen(self) -> None:
        """When the model is there. Raises MirrorError on all ranks if one has what cannot move."""
        mine = list(frozen_problems(self.session, "Leave --zorse-mirror out: save checkpoints."))
        problems = [each for told in self.gathered(mine) for each in told]
        if problems:
            raise MirrorError("State cannot be mirrored", problems)

    def after(
        self, models: Sequence[Any], scheduler: Any, iteration: int, num_flops: float
    ) -> None:
        """Mirror what there is after an iteration; where a rank cannot, nobody keeps it."""
        if self.is_alone:
            return
        self.run.enter(f"in the mirroring of iteration {iteration}")
        self.wait()
        payload, problem = memoryview(b""), None
        try:
            payload = self._payload(models, scheduler, iteration, num_flops)
        except Exception as error:  # whatever it is, the training is whole
            problem = _told(error)
        spread = partial(self._spread, payload, problem, iteration)
        if self.overlaps:
            self._under_way = self._worker.submit(spread)
        else:
            spread()

    def wait(self) -> None:
        """Wait for what is done beside the training. Raises what it has raised."""
        task, self._under_way = self._under_way, None
        if task is not None:
            task.wait()

    def _spread(self, payload: memoryview, problem: str | None, iteration: int) -> None:
        """Write and send the copy of this rank's state."""
        try:
            if problem is None:
                self.folder.write(self._copy(self.session.rank, iteration), [payload])
        except Exception as error:
            problem = _told(error)
        if not self._all_could(iteration, problem):
            return
        sizes = self.gathered(len(payload))
        if self._takers is None:
            keepers = mirror_nodes(self.nodes, sizes, self._room)
            self._takers = mirror_ranks(self.nodes, sizes, keepers)
            say(
                f"state is mirrored every {self.every} iterations: {sum(sizes):,} bytes, of which "
                f"each node keeps its own and others': {_listed(self.nodes, sizes, keepers)}"
            )
        could = self._all_could(iteration, self._exchange(payload, sizes, iteration))
        if could and self._has_older:
            self.folder.keep_only(self.start)
            self._has_older = False

    def _payload(
        self, models: Sequence[Any], scheduler: Any, iteration: int, num_flops: float
    ) -> memoryview:
        session = self.session
        parts = list(owned_parts(models, session.optimizers, session.collection.dp_cp))
        aside = set_aside(session, parts, scheduler, iteration=iteration, num_flops=num_flops)
        return packed(MirroredState(aside=aside, dtypes=self.dtypes))

    def _exchange(self, payload: memoryview, sizes: Sequence[int], iteration: int) -> str | None:
        """Send the copy of this rank, write those of others; returns why one was not written."""
        assert self._takers is not None
        rank, problem = self.session.rank, None
        whole = torch.frombuffer(payload, dtype=torch.uint8)
        works = [
            dist.isend(piece, self._takers[rank], group=self.group, tag=number)
            for number, piece in enumerate(whole.split(_PIECE_BYTES))
        ]
        for source, taker in enumerate(self._takers):
            if taker != rank:
                continue
            pieces = self._received(source, sizes[source])
            try:
                self.folder.write(self._copy(source, iteration), pieces)
            except ZorseError as error:
                problem = str(error)
                for _ in pieces:  # its sender waits
                    pass
        for work in works:
            assert work is not None
            work.wait()
        return problem

    def _received(self, source: int, num_bytes: int) -> Iterator[memoryview]:
        for number, first in enumerate(range(0, num_bytes, _PIECE_BYTES)):
            count = min(_PIECE_BYTES, num_bytes - first)
            piece = torch.empty(count, dtype=torch.uint8, device="cpu")
            dist.recv(piece, source, group=self.group, tag=number)
            yield memoryview(piece.numpy())

    def _all_could(self, iteration: int, problem: str | None) -> bool:
        """Whether no rank has a problem; else the version is gone everywhere afterwards."""
        problems = {rank: p for rank, p in enumerate(self.gathered(problem)) if p is not None}
        if not problems:
            return True
        for rank in range(len(self.nodes)):
            self.folder.drop(self._copy(rank, iteration))
        rank, found = next(iter(problems.items()))
        complain(f"iteration {iteration} is not mirrored, as rank {rank} cannot: {found.strip()}")
        return False

    def _copy(self, rank: int, iteration: int) -> Copy:
        return Copy(
            iteration=iteration,
            world_size=len(self.nodes),
            start=self.start,
            rank=rank,
            node=self.run.node,
        )


def _told(error: Exception) -> str:
    if isinstance(error, ZorseError):
        return str(error)
    return "".join(traceback.format_exception_only(error))


def _listed(nodes: Sequence[str], sizes: Sequence[int], keepers: Sequence[str]) -> str:
    held = dict.fromkeys(nodes, 0)
    for node, keeper, count in zip(nodes, keepers, sizes, strict=True):
        held[node] += count
        held[keeper] += count
    return ", ".join(f"{node} {count:,}" for node, count in held.items())
