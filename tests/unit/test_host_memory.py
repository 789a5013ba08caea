"""Host memory of a run, and what its ranks hold of messages."""

import dataclasses
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.strategies import lowerable_plans, plans
from tests.unit.fake_costs import FakeComm, FakeMemory
from tests.unit.made_plans import even_plan
from tests.unit.simulation import run
from zorse_megatron.plan.plan import Plan
from zorse_megatron.runtime.executor import Executor
from zorse_megatron.runtime.host_budget import (
    HostMemoryError,
    HostMemoryNeed,
    available_host_bytes,
    check_host_memory,
)
from zorse_megatron.runtime.mailbox import ActivationSpec, Mailbox
from zorse_megatron.schedule.actions import parse_action
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.samples import MicroBatch, micro_batches
from zorse_megatron.schedule.transfer_windows import most_away
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.trace import Trace

GIB = 2**30


def need(rank, node, available, **by_category):
    names = {"parameters": 0, "optimizer state": 0, "activations": 0}
    given = {name.replace("_", " "): count for name, count in by_category.items()}
    return HostMemoryNeed(
        rank=rank, node=node, by_category_bytes=names | given, available_bytes=available
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0 0F1 0B0 0B1", 0),  # each would come back beside what follows
        ("0F0 0F1 0F2 0B0 0B1 0B2", 0),  # or when the next one has been computed
        ("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", 30),
        ("0F0 0F1 0F2 0B2 0B1 0B0", 10),
        ("0F0 0B0 0F1 0B1", 0),  # each backward comes next
        ("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1", 20),
        ("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", 20),
        ("0F0 1F0 0F1 1F1 0B0 1B0 0B1 1B1", 23),
        ("0REDUCE_GRAD 0STEP", 0),
    ],
)
def test_most_away(text, expected):
    assert most_away([parse_action(word) for word in text.split()], {0: 10, 1: 3}) == expected


def test_spare_memory_is_shared_on_each_node():
    needs = [
        need(0, "a", 100, parameters=30),
        need(1, "a", 90, activations=20),
        need(2, "b", 50),
    ]
    assert check_host_memory(needs, limit_bytes=None) == {0: 50, 1: 40, 2: 50}
    assert check_host_memory(needs, limit_bytes=60) == {0: 35, 1: 25, 2: 50}


def test_what_ranks_have_in_the_host_already_was_not_seen_free():
    """Rank 0 has put 30 bytes there: of the node's 100 both ranks see 70."""
    there = dataclasses.replace(need(0, "a", 70, parameters=30), held_bytes=30)
    other = need(1, "a", 70, optimizer_state=60)
    assert check_host_memory([there, other], limit_bytes=None) == {0: 35, 1: 65}
    with pytest.raises(HostMemoryError, match="expected at most 100 bytes"):
        check_host_memory([there, need(1, "a", 70, optimizer_state=71)], limit_bytes=None)


def test_every_node_with_too_little_is_named():
    needs = [
        need(0, "a", 100, parameters=30, optimizer_state=61),
        need(1, "a", 100, activations=20),
        need(2, "b", 5, activations=6),
        need(3, "c", 100, activations=6),
    ]
    with pytest.raises(HostMemoryError) as caught:
        check_host_memory(needs, limit_bytes=None)
    first, second = caught.value.problems
    assert first.where == "node a"
    assert first.found.startswith("111 bytes")
    assert "rank 0: parameters 30, optimizer state 61; rank 1: activations 20" in first.found
    assert first.expected.startswith("at most 100 bytes")
    assert "11 bytes are missing and most of it is optimizer state" in first.remedy
    assert second.where == "node b"


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(None, None, 8 * GIB), ("max", 0, 8 * GIB), (4 * GIB, GIB, 3 * GIB), (2, 3, 0)],
)
def test_available(limit, used, expected, tmp_path):
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {8 * 2**20} kB\n"
    )
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
    assert available_host_bytes(tmp_path / "meminfo", tmp_path) == expected


# Messages.


@dataclass
class Allocator:
    """What torch's allocator has given out: it takes memory back when the host lets go of it.

    A block goes to the next who asks for one in the order of the stream, so the host's order is all
    that counts; a GPU behind it holds nothing longer.
    """

    now: int = 0
    most: int = 0
    known: set[int] = field(default_factory=set)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.known:
            self.known.add(id(tensor))
            self.now += tensor.nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(tensor, self._give_back, id(tensor), tensor.nbytes)
        return tensor

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Count it no longer: it is no message from now on."""
        self.now -= tensor.nbytes
        weakref.finalize(tensor, self._give_back, 0, -tensor.nbytes)

    def _give_back(self, which: int, num_bytes: int) -> None:
        self.known.discard(which)
        self.now -= num_bytes


@dataclass(frozen=True, kw_only=True)
class CountedSpec(ActivationSpec):
    allocator: Allocator

    def empty(self, num_samples, dtype, positions=None) -> torch.Tensor:
        return self.allocator.take(super().empty(num_samples, dtype, positions))


class NothingIsDone:
    """A GPU that has done nothing yet: it is told to wait, and the host goes on."""

    def launch(self) -> None:
        pass

    def wait(self) -> None:
        pass


@dataclass
class FarBehind:
    allocator: Allocator

    def send(self, tensor, *, peer, tag):
        self.allocator.take(tensor)
        return NothingIsDone()

    def open(self, buffer, *, peer, tag):
        return NothingIsDone()


@dataclass
class Passes:
    """Makes what a model would; what a forward is given becomes one of its activations."""

    spec: CountedSpec
    last_chunk: int

    def forward(self, chunk: int, micro_batch: MicroBatch, activation: torch.Tensor | None):
        if activation is not None:
            self.spec.allocator.hand_over(activation)
        if chunk == self.last_chunk:
            return None
        return self.spec.empty(micro_batch.size, self.spec.dtype)

    def backward(self, chunk: int, micro_batch: MicroBatch, gradient: torch.Tensor | None):
        return self.spec.empty(micro_batch.size, self.spec.dtype) if chunk else None

    def _nothing(self, *_: int | MicroBatch) -> None:
        pass

    begin = weight_gradient = reduce = tie = scale = norm = step = unshard = reshard = fetch = (
        _nothing
    )
    offload = offload_gradients = _nothing


def held_by_a_host_that_is_ahead(plan: Plan, rank: int) -> int:
    """The most bytes of messages that the runtime holds on a rank."""
    allocator = Allocator()
    executor, spec = executor_of(plan, rank, allocator)
    executor.run_until_step(lower_plan(plan).ranks[rank], Passes(spec, len(plan.chunks) - 1))
    assert allocator.now == 0
    return allocator.most


def executor_of(plan: Plan, rank: int, allocator: Allocator) -> tuple[Executor, CountedSpec]:
    """One rank's, whose messages never arrive."""
    group = plan.group_of_rank(rank)
    chunks = plan.chunks_of_group(group)
    replica = next(n for n, each in enumerate(plan.groups[group].replicas) if rank in each.ranks)
    spec = CountedSpec(
        sequence_length=2,
        hidden_size=3,
        dtype=torch.uint8,
        device=torch.device("cpu"),
        allocator=allocator,
    )
    executor = Executor(
        micro_batches=[m for m in micro_batches(plan.groups[group]) if m.replica == replica],
        chunks=chunks,
        last_chunk=len(plan.chunks) - 1,
        mailbox=Mailbox(
            transport=FarBehind(allocator),
            spec=spec,
            global_batch_size=plan.global_batch_size,
        ),
        trace=Trace(num_steps=0),
    )
    return executor, spec


def test_computations_begin_before_what_they_receive_is_waited_for() -> None:
    """So copies that begin then do not wait for other ranks; the simulator's do not either."""
    plan = even_plan(3, 1, 2)
    executor, spec = executor_of(plan, 1, Allocator())
    runner, events = Passes(spec, 2), []
    take = executor.mailbox.take
    runner.begin = lambda: events.append("begin")  # type: ignore[method-assign]
    executor.mailbox.take = lambda **what: (events.append("wait"), take(**what))[1]  # type: ignore
    executor.run_until_step(lower_plan(plan).ranks[1], runner)
    assert events == ["begin", "wait"] * 4


def simulated(plan: Plan, bytes_per_s: float) -> list[int]:
    result = run(plan, memory=FakeMemory(boundary=6), comm=FakeComm(bytes_per_s=bytes_per_s))
    return [rank.by_category_bytes[Category.BUFFERS] for rank in result.memory]


@settings(deadline=None, max_examples=examples(20))
@given(plan=st.one_of(plans(5, 3), lowerable_plans(5, 3)))
def test_the_runtime_holds_what_is_simulated(plan: Plan) -> None:
    expected = simulated(plan, bytes_per_s=1.0)
    held = [held_by_a_host_that_is_ahead(plan, rank) for rank in range(plan.world_size)]
    assert held == expected


def test_neither_slow_links_nor_long_batches_hold_more() -> None:
    """Where each message had stayed until it was seen to have left, all outputs did."""
    most = {
        simulated(even_plan(4, 1, num_micro_batches), bytes_per_s)[0]
        for num_micro_batches in (16, 32)
        for bytes_per_s in (0.01, 100.0)
    }
    assert len(most) == 1
