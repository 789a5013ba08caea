"""Runs one rank's list of actions, in its order and nothing else.

What a forward, a backward, a reduction or a step does is the business of a `ChunkRunner`; the
executor moves the tensors between chunks and keeps the order. A training step has two halves, as
Megatron's `train_step` calls the schedule first and the optimizer later: `run_until_step` runs the
list up to NORM, `run_rest` runs NORM and what follows.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch

from zorse_megatron.runtime.host_link import HostMemoryFull
from zorse_megatron.runtime.mailbox import Mailbox
from zorse_megatron.runtime.memory_ledger import MemoryLedger
from zorse_megatron.runtime.step_times import StepTimes
from zorse_megatron.schedule.actions import RECEIVES, SENDS, Action, Kind
from zorse_megatron.schedule.samples import MicroBatch
from zorse_megatron.trace import Trace


class ChunkRunner(Protocol):
    """What the actions mean for a real model."""

    def begin(self) -> None:
        """A forward or a backward is next; what it receives has not been waited for yet."""

    def forward(
        self, chunk: int, micro_batch: MicroBatch, activation: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run a forward; returns the activation for the next chunk (None on the last)."""

    def backward(
        self, chunk: int, micro_batch: MicroBatch, gradient: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run a backward; returns the gradient for the previous chunk (None on the first)."""

    def weight_gradient(self, chunk: int, micro_batch: MicroBatch) -> None:
        """Compute the gradients of weights that a backward has left out."""

    def reduce(self, chunk: int) -> None:
        """Sum the chunk's gradients over its group into the shards."""

    def tie(self) -> None:
        """Sum the tied embedding's gradient over its two copies."""

    def scale(self) -> None:
        """Divide all gradients by the number of tokens of the global batch."""

    def norm(self) -> None:
        """Norm and overflow of all gradients: decide whether to step, and clip."""

    def step(self, chunk: int) -> None:
        """Optimizer step on this rank's shard of the chunk, unless it was decided not to."""

    def unshard(self, chunk: int) -> None:
        """Unshard the chunk's parameters from the group's shards."""

    def reshard(self, chunk: int) -> None:
        """Drop the chunk's unsharded parameters, keep this rank's shard."""

    def fetch(self, chunk: int) -> None:
        """Start to bring the chunk's shard of parameters back from the host."""

    def offload(self, chunk: int) -> None:
        """Let the chunk's shard of parameters wait in the host."""

    def offload_gradients(self, chunk: int) -> None:
        """Let the chunk's shard of gradients wait in the host for the step."""


class Executor:
    """Executes action lists for one rank."""

    def __init__(
        self,
        *,
        micro_batches: Sequence[MicroBatch],
        chunks: Collection[int],
        last_chunk: int,
        mailbox: Mailbox,
        trace: Trace,
        ledger: MemoryLedger | None = None,
        enter: Callable[[str], None] | None = None,
        times: StepTimes | None = None,
    ) -> None:
        """`micro_batches`, `chunks`: this rank's; `last_chunk`: that of the whole model.

        Chunks are numbered in model order over all groups, from 0. `enter` is told in which phase
        this rank is: what the list is for (`during`), and the action of it. `times`: where to note
        how long actions take; None: nowhere.
        """
        self.micro_batches = tuple(micro_batches)
        self.chunks = frozenset(chunks)
        self.last_chunk = last_chunk
        self.mailbox = mailbox
        self.trace = trace
        self.ledger = ledger
        self.enter = enter
        self.during = ""
        self.step = -1
        self.current: Action | None = None
        self.rest: list[Action] = []
        self.num_run = 0
        self.to_send: dict[tuple[Kind, int, int], torch.Tensor] = {}
        self.handed_over: dict[tuple[bool, int, int], torch.Tensor] = {}
        """What this rank's neighbouring chunk made: (is activation, consumer, micro-batch)."""
        self.times = times
        mailbox.waiting = self._waiting
        if times is not None:
            mailbox.sent, mailbox.arrived = times.sent, times.arrived

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self.trace.waiting(), nullcontext() if self.times is None else self.times.waiting():
            yield

    @contextmanager
    def _recorded(self, action: Action) -> Iterator[None]:
        noted = nullcontext() if self.times is None else self.times.marking(action)
        with self.trace.record(self.step, action), noted:
            yield

    def run_until_step(self, actions: Sequence[Action], runner: ChunkRunner) -> None:
        """Start a new list and run it up to NORM, or to its end if it has none."""
        self.step += 1
        at = next((i for i, a in enumerate(actions) if a.kind is Kind.NORM), len(actions))
        self.rest = list(actions[at:])
        self.mailbox.begin(actions[:at])
        self._run(actions[:at], runner, num_before=0)
        self.num_run = at
        self.mailbox.flush()
        left = self.to_send or self.handed_over or self.mailbox.incoming
        assert not left, "actions left tensors behind"

    def run_rest(self, runner: ChunkRunner) -> None:
        """Run NORM and what follows it; once per `run_until_step`."""
        rest, self.rest = self.rest, []
        assert rest, "there is no step to run: run_until_step comes first"
        self._run(rest, runner, num_before=self.num_run)

    def _run(self, actions: Sequence[Action], runner: ChunkRunner, *, num_before: int) -> None:
        remaining = self._count_sends(actions)
        total = num_before + len(actions) + (0 if num_before else len(self.rest))
        for number, action in enumerate(actions, start=num_before + 1):
            self.current = action
            if self.enter is not None:
                self.enter(f"{self.during}, at {action} (action {number} of {total})")
            with self._recorded(action):
                try:
                    self.mailbox.come_to(number - 1)
                    self._execute(number - 1, action, runner, remaining)
                except torch.OutOfMemoryError as error:
                    if self.ledger is None:
                        raise
                    raise self.ledger.out_of_memory(action) from error
                except HostMemoryFull as error:
                    assert self.ledger is not None
                    raise self.ledger.out_of_host_memory(error, action) from error
            self.sample_memory()

    def sample_memory(self) -> None:
        """Let the ledger, if there is one, sample after each action or within a long one.

        Raises MemoryLimitError beyond the limit.
        """
        if self.ledger is not None and self.ledger.samples and self.current is not None:
            self.ledger.sample(self.step, self.current)

    @staticmethod
    def _count_sends(actions: Sequence[Action]) -> dict[tuple[Kind, int, int], int]:
        counts: dict[tuple[Kind, int, int], int] = {}
        for action in actions:
            if action.kind in SENDS:
                key = _produced(action)
                counts[key] = counts.get(key, 0) + 1
        return counts

    def _execute(
        self,
        position: int,
        action: Action,
        runner: ChunkRunner,
        remaining: dict[tuple[Kind, int, int], int],
    ) -> None:
        if action.kind in RECEIVES:
            self.mailbox.start_receive(position)
        elif action.kind in SENDS:
            self._send(position, action, remaining)
        elif action.kind is Kind.FORWARD:
            self._forward(action, runner)
        elif action.kind is Kind.BACKWARD:
            self._backward(action, runner)
        elif action.kind is Kind.WEIGHT_GRADIENT:
            runner.weight_gradient(*self._operands(action))
        else:
            self._on_state(action, runner)

    @property
    def message_bytes(self) -> int:
        """What is on its way between chunks, on this rank's device."""
        tensors = [*self.to_send.values(), *self.handed_over.values(), *self.mailbox.tensors()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def _forward(self, action: Action, runner: ChunkRunner) -> None:
        chunk, micro_batch = self._operands(action)
        runner.begin()
        activation = None
        if chunk != 0:
            activation = self._take(chunk, chunk - 1, micro_batch, activation=True)
        output = runner.forward(chunk, micro_batch, activation)
        if chunk != self.last_chunk:
            assert output is not None
            self._pass_on(Kind.SEND_F, chunk, chunk + 1, micro_batch, output)

    def _backward(self, action: Action, runner: ChunkRunner) -> None:
        chunk, micro_batch = self._operands(action)
        runner.begin()
        gradient = None
        if chunk != self.last_chunk:
            gradient = self._take(chunk, chunk + 1, micro_batch, activation=False)
        input_gradient = runner.backward(chunk, micro_batch, gradient)
        if chunk != 0:
            assert input_gradient is not None
            self._pass_on(Kind.SEND_B, chunk, chunk - 1, micro_batch, input_gradient)

    def _take(
        self, chunk: int, source: int, micro_batch: MicroBatch, *, activation: bool
    ) -> torch.Tensor:
        """What `chunk` consumes of its neighbour `source`."""
        if source in self.chunks:
            return self.handed_over.pop((activation, chunk, micro_batch.index))
        return self.mailbox.take(activation=activation, chunk=chunk, micro_batch=micro_batch)

    def _pass_on(
        self, kind: Kind, chunk: int, target: int, micro_batch: MicroBatch, tensor: torch.Tensor
    ) -> None:
        """Keep what `chunk` made for its neighbour `target`, here or after a send."""
        if target in self.chunks:
            key = kind is Kind.SEND_F, target, micro_batch.index
            self.handed_over[key] = tensor
        elif micro_batch.size:  # a rank that shares experts may have no samples
            self.to_send[kind, chunk, micro_batch.index] = tensor

    def _send(
        self, position: int, action: Action, remaining: dict[tuple[Kind, int, int], int]
    ) -> None:
        key = _produced(action)
        _, micro_batch = self._operands(action)
        self.mailbox.start_send(position, action, self.to_send[key], micro_batch)
        remaining[key] -= 1
        if not remaining[key]:
            del self.to_send[key]

    def _on_state(self, action: Action, runner: ChunkRunner) -> None:
        on_chunk = {
            Kind.REDUCE_GRAD: runner.reduce,
            Kind.STEP: runner.step,
            Kind.UNSHARD: runner.unshard,
            Kind.RESHARD: runner.reshard,
            Kind.FETCH: runner.fetch,
            Kind.OFFLOAD: runner.offload,
            Kind.OFFLOAD_GRAD: runner.offload_gradients,
        }
        on_rank = {Kind.TIE: runner.tie, Kind.SCALE: runner.scale, Kind.NORM: runner.norm}
        if action.kind in on_rank:
            on_rank[action.kind]()
            return
        assert action.chunk is not None
        on_chunk[action.kind](action.chunk)

    def _operands(self, action: Action) -> tuple[int, MicroBatch]:
        assert action.chunk is not None and action.micro_batch is not None
        return action.chunk, self.micro_batches[action.micro_batch]


def _produced(action: Action) -> tuple[Kind, int, int]:
    assert action.chunk is not None and action.micro_batch is not None
    return action.kind, action.chunk, action.micro_batch
