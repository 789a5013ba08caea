"""Replicas of several ranks, and what other frameworks do otherwise."""

import dataclasses
from collections.abc import Mapping

import pytest

from tests.unit.fake_costs import FakeComm, FakeCompute, FakeMemory
from tests.unit.simulation import run
from tests.unit.test_schedules import even_plan
from zorse_megatron.plan.plan import Plan
from zorse_megatron.simulate.assumptions import STOCK_1F1B, Framework, SimulationError
from zorse_megatron.simulate.memory_ledger import Category

SENDS_ALL = Framework(split_transfers=False)
PLAIN = even_plan(stages=3, replicas=2, count=5)


def in_sets(plan: Plan, size: int) -> Plan:
    """The same plan with `size` ranks in the place of each."""
    groups = tuple(
        dataclasses.replace(
            group,
            replicas=tuple(
                dataclasses.replace(
                    replica,
                    ranks=tuple(range(size * replica.ranks[0], size * (replica.ranks[0] + 1))),
                )
                for replica in group.replicas
            ),
        )
        for group in plan.groups
    )
    return dataclasses.replace(plan, groups=groups)


@pytest.mark.parametrize("tied", [False, True])
def test_a_set_runs_as_one_rank(tied):
    model = dataclasses.replace(PLAIN.model, tied_embeddings=tied)
    plain = dataclasses.replace(PLAIN, model=model)
    costs = {
        "memory": FakeMemory(boundary=8, embedding_count=64, head_count=64),
        "comm": FakeComm(latency_s=0.1, bytes_per_s=100.0),
    }
    one, many = run(plain, **costs), run(in_sets(plain, 4), framework=SENDS_ALL, **costs)
    assert many.iteration_s == pytest.approx(one.iteration_s)
    assert many.stands_in == tuple(rank - rank % 4 for rank in range(24))
    assert many.simulated_ranks == tuple(range(0, 24, 4))
    assert many.peak_memory_bytes == tuple(b for b in one.peak_memory_bytes for _ in range(4))
    assert [span.start_s for span in many.spans(20)] == pytest.approx(
        [span.start_s for span in one.spans(5)]
    )


@pytest.mark.parametrize(
    "ranks", [((0,), (1, 2)), ((0, 2), (1, 3)), ((1, 0), (2, 3)), ((0, 1), (2,))]
)
def test_sets_that_are_not_simulated(ranks):
    replicas = tuple(dataclasses.replace(PLAIN.groups[0].replicas[0], ranks=each) for each in ranks)
    group = dataclasses.replace(PLAIN.groups[0], replicas=replicas)
    chunk = dataclasses.replace(PLAIN.chunks[0], layers=(0, PLAIN.model.num_layers))
    plan = dataclasses.replace(PLAIN, groups=(group,), chunks=(chunk,))
    with pytest.raises(SimulationError, match="ranks in a row"):
        run(plan)


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


def test_split_transfers_send_a_part_of_each():
    sets = in_sets(even_plan(stages=2, replicas=1, count=1), 4)
    costs = {"memory": FakeMemory(boundary=16), "comm": FakeComm(bytes_per_s=16.0)}
    whole = run(sets, framework=SENDS_ALL, **costs)
    split = run(sets, **costs)
    assert whole.iteration_s - split.iteration_s == pytest.approx(2 * 0.75)
    assert [each.num_bytes for each in split.transfers()] == [4, 4]
    assert whole.peak_memory_bytes == split.peak_memory_bytes  # made whole again


def test_merging_leaves_sets_and_other_frameworks_alone():
    found = run(in_sets(PLAIN, 2), merge_equal_ranks=True)
    assert found.simulated_ranks == tuple(range(0, 12, 2))
    blocking = Framework(blocking_transfers=True)
    assert len(run(PLAIN, merge_equal_ranks=True, framework=blocking).simulated_ranks) == 6
