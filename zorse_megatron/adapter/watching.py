"""How long each rank's iterations take, told to all; the run's status, and other counts for it."""

import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field, fields
from datetime import timedelta
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

from zorse_megatron.adapter.plan_run import PlanRun
from zorse_megatron.adapter.rank_plan import RankPlan
from zorse_megatron.errors import OutputError
from zorse_megatron.files.read_write import write_text
from zorse_megatron.inputs.status import RUNNING_PLAN_NAME, STATUS_NAME, Status, dump_status
from zorse_megatron.live.move import MoveError, take_request
from zorse_megatron.live.rebalance import (
    Balancer,
    Counts,
    Preparation,
    Prepared,
    counts_of,
    workers_of,
)
from zorse_megatron.live.run_status import IterationTimes, LinkTimes, RunStatus
from zorse_megatron.log import complain, say
from zorse_megatron.plan.plan import Halved, Plan
from zorse_megatron.plan.plan_file import dump_plan
from zorse_megatron.runtime.batch_sampler import MicroBatchAssignment, batches_ahead
from zorse_megatron.runtime.host_link import HostWorker
from zorse_megatron.runtime.step_times import CudaClock, StepTimes
from zorse_megatron.schedule.actions import edges_of
from zorse_megatron.schedule.pipeline_schedules import Worker
from zorse_megatron.schedule.samples import rank_micro_batches
from zorse_megatron.trace import Clock

# Agree on other counts of micro-batches, and on the iteration from which on they count.
#
# All ranks see the same times, so all wish for the same counts at the same moment. Each makes the
# lists beside the training. When all have told that they are done, they switch some iterations
# later: those of which data loaders may have cut samples already. That the ranks agree is not taken
# for granted: they tell a number of what they have made, and nothing changes unless it is one for
# all.


@dataclass(kw_only=True)
class _Candidate:
    """Counts that this rank makes lists for, or has."""

    counts: Counts
    made: Future[Prepared | str]

    @property
    def code(self) -> float:
        """What this rank tells of it: 0 while it is made, below 0 where it cannot be."""
        if not self.made.done():
            return 0.0
        number = 1 + zlib.crc32(repr(self.counts).encode())
        return float(number if isinstance(self.made.result(), Prepared) else -number)


@dataclass(kw_only=True)
class Switching:
    """One rank's part in the agreement."""

    balancer: Balancer
    preparation: Preparation
    assignment: MicroBatchAssignment
    rank: int
    num_prefetched: int
    """Micro-batches that a data loader has ready before they are wanted."""
    is_off: bool = False
    _worker: HostWorker = field(default_factory=HostWorker)
    _candidate: _Candidate | None = None
    _agreed: tuple[int, Prepared] | None = None

    @property
    def code(self) -> float:
        """What to tell the others."""
        return 0.0 if self._candidate is None or self._agreed else self._candidate.code

    def take(
        self, number: int, seconds: dict[Worker, float], codes: Sequence[float], *, done: int
    ) -> None:
        """What all ranks told: of iteration `number`, and of what they have made.

        `done`: iterations that have been run; the same on all ranks at this point.
        """
        if self.is_off:
            return
        if number > 0 and seconds:  # the first one is not like the others
            self.balancer.add(number, seconds)
        self._agree(codes, done)
        if self._candidate is None and self.balancer.proposal is not None:
            counts = self.balancer.proposal
            made = self._worker.submit(partial(self.preparation.prepare, counts))
            self._candidate = _Candidate(counts=counts, made=made)

    def from_iteration(self, number: int) -> Prepared | None:
        """What is run from this iteration on; None: as before."""
        if self._agreed is None or number < self._agreed[0]:
            return None
        (_, prepared), self._agreed, self._candidate = self._agreed, None, None
        self._say(number, prepared)
        self.balancer.change_to(prepared.plan)
        return prepared

    def _agree(self, codes: Sequence[float], done: int) -> None:
        if self._candidate is None or self._agreed is not None:
            return
        told = {code for code in codes if code}
        if len(told) > 1 or (told and self.code not in {0.0, *told}):
            say(f"ranks want different micro-batches ({sorted(told)}): they stay as they are")
            self.is_off, self._candidate = True, None
        elif told and len(codes) == sum(map(bool, codes)):
            made = self._candidate.made.result()
            if isinstance(made, Prepared):
                self._agree_on(made, done)
            else:
                say(f"micro-batches stay as they are: {made}")
                self.balancer.refuse(self._candidate.counts)
                self._candidate = None

    def _agree_on(self, prepared: Prepared, done: int) -> None:
        plans = (self.balancer.plan, prepared.plan)
        fewest = min(count for plan in plans for row in counts_of(plan) for count in row if count)
        first = done + batches_ahead(num_prefetched=self.num_prefetched, fewest=fewest)
        if mine := rank_micro_batches(prepared.plan, self.rank):
            self.assignment.change(first, mine)
        self._agreed = first, prepared

    def _say(self, number: int, prepared: Prepared) -> None:
        before, after = counts_of(self.balancer.plan), counts_of(prepared.plan)
        for group, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                say(
                    f"replicas of group {group} run {_listed(new)} micro-batches instead of "
                    f"{_listed(old)} from iteration {number + 1} of this run on"
                )


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


# The status of a run: a file, lines of the log, and scalars of Megatron's own writers.


_EVERY_S = 5.0


class StatusReporter:
    """Rank 0 writes the file and the log, the last rank the scalars: both follow all ranks."""

    def __init__(self, status: RunStatus, *, directory: Path | None) -> None:
        self.status = status
        self.directory = directory if dist.get_rank() == 0 else None
        self._written_s = float("-inf")
        self._thread: threading.Thread | None = None
        self._complained = False
        self._wrote_plan = False

    def take(self, ranks: tuple[IterationTimes, ...]) -> None:
        """One iteration's times of all ranks."""
        self.status.take(ranks)
        for line in self.status.news():
            say(line)
        self._chart(self.status.first_iteration + ranks[0].number + 1)
        if time.monotonic() - self._written_s >= _EVERY_S:
            self._write()

    def close(self, *, ended: bool) -> None:
        """Write what is known at the end; `ended`: of the training, and not by a failure."""
        self.status.ended = ended
        if self._thread is not None:
            self._thread.join()
        self._write()
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        """In a thread, as a file system may take its time; none after one that still writes."""
        if self.directory is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._written_s = time.monotonic()
        now = self.status.now(written_s=time.time())
        self._thread = threading.Thread(target=self._put, args=(self.directory, now))
        self._thread.start()

    def _put(self, directory: Path, now: Status) -> None:
        try:
            if not self._wrote_plan:  # before a status that names it
                text = dump_plan(self.status.plan)
                plan = directory / RUNNING_PLAN_NAME
                write_text(plan, text, parents=True, follows_link=False)
                self._wrote_plan = True
            text = dump_status(now)
            write_text(directory / STATUS_NAME, text, parents=True, follows_link=False)
        except OutputError as error:
            if not self._complained:  # no reason to lose the training
                complain(str(error))
            self._complained = True

    def _chart(self, iteration: int) -> None:
        if iteration % get_args().tensorboard_log_interval:
            return
        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        scalars = self.status.scalars() if board or wandb else {}
        for name, value in scalars.items() if board else ():
            board.add_scalar(name, value, iteration)
        if wandb and scalars:
            wandb.log(dict(scalars), iteration)


# A few numbers of each rank, told to all between two iterations; nobody waits for them.
#
# They travel over gloo, on the hosts, beside whatever the GPUs do: what is told after an iteration
# is read after the next one. All ranks then have the same numbers.


class Exchange:
    """Tells rows of numbers; a collective call to make, and then one for each iteration."""

    def __init__(self, *, timeout: timedelta | None = None) -> None:
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._under_way: tuple[Any, torch.Tensor, torch.Tensor] | None = None

    def swap(self, row: Sequence[float]) -> list[list[float]] | None:
        """Start to tell `row`; return what the ranks told the time before, None the first time."""
        before = self._under_way
        mine = torch.tensor([row], dtype=torch.float64, device="cpu")
        shape = (self.group.size(), len(row))
        rows = torch.empty(shape, dtype=torch.float64, device="cpu")
        work = dist.all_gather_into_tensor(rows, mine, group=self.group, async_op=True)
        self._under_way = work, rows, mine
        if before is None:
            return None
        before[0].wait()
        rows_before: list[list[float]] = before[1].tolist()
        return rows_before

    def finish(self) -> None:
        """Wait for what is under way."""
        if self._under_way is not None:
            self._under_way[0].wait()
            self._under_way = None


# Requests for another plan: rank 0 finds them, and tells all ranks after an iteration.


class PlanRequests:
    """One rank's view. All ranks hear of a request after the same iteration."""

    def __init__(self, directory: Path | None) -> None:
        """`directory`: where rank 0 looks; None: another rank."""
        self._directory = directory
        self._number = 0
        """Of the request that rank 0 has found last."""
        self._heard = 0
        self._answered = 0
        self._complaint = ""
        self.data: bytes | None = None
        """On rank 0: what is asked for."""

    @classmethod
    def of(cls, directory: Path | None, *, rank: int, is_first: bool) -> "PlanRequests":
        """Those that a rank knows of; `is_first`: no plan was left for this one.

        Then what lies there was asked of an earlier run, and is dropped.
        """
        requests = cls(directory if rank == 0 else None)
        if is_first and requests._take() is not None:
            say(
                f"a request for another plan in {directory} is older than this run and is dropped: "
                "ask again with zorse move"
            )
        return requests

    def code(self) -> float:
        """What to tell the others: a number that grows with each request."""
        if self._number == self._answered and (found := self._take()) is not None:
            self._number, self.data = self._number + 1, found
        return float(self._number)

    def _take(self) -> bytes | None:
        try:
            return None if self._directory is None else take_request(self._directory)
        except MoveError as error:
            if str(error) != self._complaint:  # which stays for as long as its cause
                self._complaint = str(error)
                complain(self._complaint)
            return None

    def hear(self, code: float) -> None:
        """What rank 0 has told."""
        self._heard = int(code)

    @property
    def is_open(self) -> bool:
        """Whether all ranks know of a request that has not been answered."""
        return self._heard > self._answered

    def answer(self) -> None:
        """It is done with, granted or not."""
        self._answered, self.data = self._heard, None


# Follow how long each rank's iterations take; all ranks know the same of all.


_TIMES = tuple(field.name for field in fields(IterationTimes))
"""What a rank tells begins with them; then what it has made of other counts, and requests."""
_OF_LINKS = len(_TIMES) + 2
"""Where the numbers of links begin in what a rank tells."""


@dataclass(kw_only=True)
class RunWatch:
    """What one rank notes, tells and hears."""

    plan: Plan
    times: StepTimes
    exchange: Exchange
    reporter: StatusReporter
    links: LinkTimes
    rank: int
    switching: Switching | None = None
    requests: PlanRequests | None = None

    def begin(self, number: int) -> Prepared | None:
        """Iteration `number` of this run begins; returns what is run from it on if that changes."""
        if number == 0:  # a checkpoint has been loaded, if there is one
            self.reporter.status.first_iteration = get_args().iteration
        self.times.begin(number)
        prepared = None if self.switching is None else self.switching.from_iteration(number)
        if prepared is not None:
            self.reporter.status.change(number, counts_of(prepared.plan))
        return prepared

    def end(self, done: int) -> None:
        """So many iterations have been run. A collective call that waits for nobody."""
        self.times.end()
        read = self.times.read()
        own = read or _times_of([-1.0] + [0.0] * len(_TIMES))
        code = 0.0 if self.switching is None else self.switching.code
        told = self.exchange.swap(
            (
                *astuple(own),
                code,
                0.0 if self.requests is None else self.requests.code(),
                *self.links.row(self.rank, self.times.messages if read else None),
            )
        )
        if told is not None:
            self._hear(told, done)

    def _hear(self, told: list[list[float]], done: int) -> None:
        ranks = tuple(map(_times_of, told))
        # A GPU may be an iteration behind the others; what is told is of one iteration or ignored.
        known = len({each.number for each in ranks}) == 1 and ranks[0].number >= 0
        if known:
            self.links.take([row[_OF_LINKS:] for row in told])
            self.reporter.take(ranks)
        if self.requests is not None:
            self.requests.hear(told[0][_OF_LINKS - 1])
        if self.switching is not None:
            seconds = self._seconds(ranks) if known else {}
            codes = [row[_OF_LINKS - 2] for row in told]
            self.switching.take(ranks[0].number, seconds, codes, done=done)

    def _seconds(self, ranks: tuple[IterationTimes, ...]) -> dict[Worker, float]:
        """Of a micro-batch of each replica: of a TP group's slowest rank."""
        return {
            (group, index): max(
                ranks[rank].micro_batch_s for rank in self.plan.groups[group].replicas[index].ranks
            )
            for group, index in workers_of(self.plan)
        }


def _times_of(row: Sequence[float]) -> IterationTimes:
    told: dict[str, Any] = dict(zip(_TIMES, row, strict=False))
    return IterationTimes(**{**told, "number": int(row[0])})


# Of torch's DataLoader, for each worker.
_PREFETCH_FACTOR = 2


def make_watch(
    at: RankPlan, run: PlanRun, assignment: MicroBatchAssignment, clock: Clock
) -> RunWatch | None:
    """Make it if it was asked for; a collective call. `assignment`: of the training."""
    options = run.options
    if not options.rebalances and options.status is None:
        return None
    links = LinkTimes(edges=edges_of((at.batch.lists,)), world_size=at.plan.world_size)
    status = RunStatus(
        plan=at.plan,
        links=links,
        tokens_per_iteration=at.plan.global_batch_size * at.sequence_length,
        first_iteration=0,
        moves=list(run.moves),
    )
    group, index = at.plan.replica_of_rank(at.rank)
    halved = at.plan.groups[group].replicas[index].halved or Halved()
    return RunWatch(
        plan=at.plan,
        times=StepTimes(
            clock,
            behind=int(isinstance(clock, CudaClock)),
            halved=(halved.first, halved.last),
        ),
        exchange=Exchange(timeout=at.timeout),
        switching=_switching(at, assignment) if options.rebalances else None,
        links=links,
        rank=at.rank,
        reporter=StatusReporter(status, directory=options.status),
        requests=PlanRequests.of(options.status, rank=at.rank, is_first=not run.moves)
        if run.may_move
        else None,
    )


def _switching(at: RankPlan, assignment: MicroBatchAssignment) -> Switching:
    links = frozenset(edges_of((at.batch.lists, at.evaluation)))
    if dist.get_backend() != "nccl":  # which has a communicator for each link, made at the start
        links = frozenset(permutations(range(at.plan.world_size), 2))
    return Switching(
        balancer=Balancer(plan=at.plan),
        preparation=Preparation.of(
            at.plan,
            at.batch.lists,
            tied=at.tied_embeddings,
            links=links,
            in_order=at.loads_in_order,
        ),
        assignment=assignment,
        rank=at.rank,
        num_prefetched=_PREFETCH_FACTOR * get_args().num_workers,
    )
