"""What other frameworks do otherwise."""

import dataclasses
from collections.abc import Mapping

import pytest

from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from tests.unit.simulation import run
from tests.unit.test_schedules import even_plan
from zorse_megatron.simulate.assumptions import STOCK_1F1B, Framework
from zorse_megatron.simulate.memory_ledger import Category

PLAIN = even_plan(stages=3, replicas=2, count=5)


def test_replicated_state():
    """All-reduce: as much as the scatter and the gather of gradients; no gather of parameters."""
    plan = even_plan(stages=1, replicas=4, count=1)
    comm = FakeComm(bytes_per_s=100.0)
    compute = FakeCompute(step_per_parameter_s=1e-3)
    parameters = 640 * plan.model.num_layers
    sharded = run(plan, comm=comm, compute=compute)
    whole = run(plan, comm=comm, compute=compute, framework=Framework(state="replicated"))
    assert sharded.iteration_s == pytest.approx(
        3.0 * plan.model.num_layers + 0.75 * (4 + 2) * parameters / 100 + 1e-3 * parameters / 4
    )
    assert whole.iteration_s == pytest.approx(
        3.0 * plan.model.num_layers + 0.75 * 2 * 4 * parameters / 100 + 1e-3 * parameters
    )
    state = [each.memory[0].by_category[Category.OPTIMIZER_STATE] for each in (sharded, whole)]
    assert [moment.num_bytes for moment in state] == [12 * parameters // 4, 12 * parameters]


def test_blocking_transfers_and_rebuilds_stop_the_ranks():
    """Two stages, one micro-batch: everything is in one row either way."""
    plan = even_plan(stages=2, replicas=1, count=1)
    costs = {"memory": FakeMemory(boundary=8), "comm": FakeComm(bytes_per_s=16.0)}
    in_a_row_s = 3.0 * plan.model.num_layers + 2 * 0.5
    assert run(plan, **costs).iteration_s == pytest.approx(in_a_row_s)
    blocking = Framework(blocking_transfers=True, rebuild_bytes_per_s=32.0)
    assert run(plan, framework=blocking, **costs).iteration_s == pytest.approx(
        in_a_row_s + 2 * 0.25
    )


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_blocking_transfers_are_not_hidden(stages):
    """With transfers of half a forward, a middle stage stops for them at every micro-batch."""
    plan = even_plan(stages=stages, replicas=1, count=20)
    costs = {"memory": FakeMemory(boundary=8), "comm": FakeComm(bytes_per_s=16.0)}
    hidden = run(plan, **costs).iteration_s
    blocking = run(plan, framework=Framework(blocking_transfers=True), **costs).iteration_s
    assert blocking >= hidden + 20 * 0.5


def test_stock_starts_an_activation_and_a_gradient_together():
    """Two stages in step: each micro-batch takes a forward, a backward and one transfer.

    Stage 1 runs them one after the other, from the first arrival on; then the last gradient
    travels and stage 0 runs its last backward. Started one after the other, there are two transfers
    for each micro-batch.
    """
    count, transfer_s = 20, 0.5
    plan = even_plan(stages=2, replicas=1, count=count)
    costs = {"memory": FakeMemory(boundary=8), "comm": FakeComm(bytes_per_s=16.0)}
    both_s = 3.0 * plan.model.num_layers / 2
    paired = run(plan, framework=STOCK_1F1B, **costs).iteration_s
    assert paired == pytest.approx((count + 1) * (both_s + transfer_s))
    alone = run(plan, framework=Framework(blocking_transfers=True), **costs).iteration_s
    assert alone >= paired + (count - 2) * transfer_s


@dataclasses.dataclass(kw_only=True)
class _CommByRanks(FakeComm):
    sums_s: Mapping[tuple[int, ...], float]

    def all_reduce_s(self, ranks, num_bytes):
        return self.sums_s[tuple(ranks)]


def test_stock_broadcasts_the_number_of_tokens_along_pipelines():
    """Half a sum of the slower pipeline, a sum over the slower stage; the loss is one, too."""
    plan = even_plan(stages=2, replicas=2, count=2)
    pipelines, stages = {(0, 2): 2.0, (1, 3): 4.0}, {(0, 1): 1.0, (2, 3): 16.0}
    comm = _CommByRanks(sums_s={(0, 1, 2, 3): 8.0, **pipelines, **stages})
    free_s = run(plan, framework=STOCK_1F1B, comm=FakeComm()).iteration_s
    found_s = run(plan, framework=STOCK_1F1B, comm=comm).iteration_s
    assert found_s - free_s == pytest.approx(4.0 / 2 + 16.0 + (1 + 1 + 3) * 8.0 + 16.0)


def test_merging_leaves_other_frameworks_alone():
    blocking = Framework(blocking_transfers=True)
    assert len(run(PLAIN, merge_equal_ranks=True, framework=blocking).simulated_ranks) == 6
