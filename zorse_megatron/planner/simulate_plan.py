"""Simulates a plan with the costs of its search; checks its host memory against the nodes'."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.errors import Problem
from zorse_megatron.files.wording import memory
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.schedule.actions import ActionLists
from zorse_megatron.simulate.assumptions import (
    NO_PERTURBATION,
    RUNTIME,
    Framework,
    Perturbation,
)
from zorse_megatron.simulate.iteration import simulate
from zorse_megatron.simulate.result import SimulationResult, host_bytes


def simulate_plan(
    inputs: Inputs,
    plan: Plan,
    *,
    perturbation: Perturbation = NO_PERTURBATION,
    framework: Framework = RUNTIME,
    merge_equal_ranks: bool = False,
    lists: ActionLists | None = None,
) -> SimulationResult:
    """Simulate with what processes take beside tensors. See `simulate`, also for what is raised."""
    return simulate(
        plan,
        inputs,
        fixed_bytes=inputs.fixed_bytes(plan),
        perturbation=perturbation,
        framework=framework,
        merge_equal_ranks=merge_equal_ranks,
        lists=lists,
    )


# A plan's host memory per node, against what the node has.


_MOST_TOLD = 6


@dataclass(frozen=True, kw_only=True)
class NodeHostMemory:
    """One node's host memory."""

    node: str
    by_category_bytes: tuple[tuple[str, int], ...]
    """(category, bytes that wait there at most), largest first."""
    has_bytes: int | None
    """None where the cluster does not say."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all categories."""
        return sum(count for _, count in self.by_category_bytes)

    @property
    def description(self) -> str:
        """For people."""
        parts = ", ".join(f"{name} {memory(n)}" for name, n in self.by_category_bytes)
        has = "" if self.has_bytes is None else f" of {memory(self.has_bytes)}"
        return f"{memory(self.num_bytes)}{has} in node {self.node} ({parts})"

    @property
    def missing_bytes(self) -> int:
        """What the node has too little; 0 if it has enough or its size is unknown."""
        return 0 if self.has_bytes is None else max(0, self.num_bytes - self.has_bytes)


def host_needs(inputs: Inputs, result: SimulationResult) -> tuple[NodeHostMemory, ...]:
    """Nodes in whose memory something waits, in the order of ranks; in blocks of pinned memory."""
    found = []
    by_stand_in: dict[int, Mapping[str, int]] = {}
    for node, spec in enumerate(inputs.spec.nodes):
        ranks = inputs.spec.ranks_of(node)
        total: Counter[str] = Counter()
        for rank in ranks:
            stand_in = result.stands_in[rank]
            if stand_in not in by_stand_in:
                by_stand_in[stand_in] = host_bytes(result, stand_in)
            total.update(by_stand_in[stand_in])
        if total.total():
            has_bytes = inputs.host_bytes_on(ranks)
            rows = tuple((name, count) for name, count in total.most_common() if count)
            found.append(
                NodeHostMemory(node=spec.name, by_category_bytes=rows, has_bytes=has_bytes)
            )
    return tuple(found)


def extended(
    one: Sequence[NodeHostMemory], two: Sequence[NodeHostMemory], times: float
) -> tuple[NodeHostMemory, ...]:
    """What a batch needs that is `times` one of which `one` is known, and `two` of twice as much.

    A straight line: activations grow with the batch or not at all, the rest stays.
    """
    before = {need.node: dict(need.by_category_bytes) for need in one}
    found = []
    for need in two:
        rows = []
        for name, count in need.by_category_bytes:
            grown = max(0, count - before.get(need.node, {}).get(name, 0))
            rows.append((name, count + math.ceil(grown * (times - 2))))
        found.append(replace(need, by_category_bytes=tuple(rows)))
    return tuple(found)


def host_sentences(needs: Sequence[NodeHostMemory]) -> Iterator[str]:
    """Say what is offloaded, what is missing, or that nothing is offloaded."""
    if not needs:
        yield "Nothing is offloaded to host memory."
        return
    listed = "; ".join(need.description for need in needs[:_MOST_TOLD])
    more = f"; {len(needs) - _MOST_TOLD} more nodes" if len(needs) > _MOST_TOLD else ""
    yield f"Offloaded to host memory: {listed}{more}."
    for need in needs:
        if need.missing_bytes:
            missing = memory(need.missing_bytes)
            yield f"That exceeds the host memory of node {need.node} by {missing}."
    if any(need.has_bytes is None for need in needs):
        yield "The cluster file does not give host memory."


def host_problems(needs: Sequence[NodeHostMemory], why: str) -> Iterator[Problem]:
    """Yield every node with too little; `why` so much has to wait there."""
    for need in needs:
        if need.missing_bytes:
            assert need.has_bytes is not None
            yield Problem(
                where=f"host memory of node {need.node}",
                found=memory(need.has_bytes),
                expected=f"{memory(need.num_bytes)} for what has to wait there "
                f"({', '.join(f'{name} {memory(n)}' for name, n in need.by_category_bytes)})"
                f", {why}",
                remedy="Give the node more memory, or GPUs with more; correct host_memory in the "
                "cluster file if the node has more.",
            )
