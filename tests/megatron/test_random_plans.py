"""Random plans of random models follow stock Megatron: `test_exactness` says how closely."""

from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.megatron.comparison import (
    GLOBAL_BATCH_SIZE,
    MODELS,
    SEQUENCE_PARALLEL,
    UNTIED,
    Model,
    assert_follows,
    assert_same_bits,
)
from tests.megatron.plans import offloading_gradients
from tests.megatron.test_exactness import Row, some_leave, started, stock_of
from tests.strategies import trained_plans
from zorse_megatron.plan.plan import has_equal_tp_shards


@settings(
    max_examples=examples(20),
    deadline=None,
    # A failing plan is small enough to read; shrinking it would take an hour.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(
    data=st.data(),
    model=st.sampled_from(MODELS),
    splits_sequences=st.booleans(),
    where=st.booleans(),
)
def test_any_plan_follows_stock(
    *, data: st.DataObject, model: Model, splits_sequences: bool, where: bool, corpus: Path
) -> None:
    """And gradients that wait in the host change no bit."""
    plan = data.draw(
        trained_plans(
            *(model.sizes, GLOBAL_BATCH_SIZE),
            max_world=5,
            max_ranks_per_replica=3,
            in_tp_groups=model.in_tp_groups,
        )
    )
    degrees = [len(replica.ranks) for group in plan.groups for replica in group.replicas]
    splits = splits_sequences and model.in_tp_groups and max(degrees) == 2
    sequences = SEQUENCE_PARALLEL if splits else ()
    row = Row(plan=plan, flags=(*model.flags, *sequences))
    run = started(row, corpus)
    assert_follows(run, stock_of(row.command(corpus)))
    may_wait = all(map(has_equal_tp_shards, plan.groups))
    if may_wait and some_leave(plan, tied=UNTIED[0] not in model.flags):
        moved = replace(row, plan=offloading_gradients(plan, where))
        if moved.plan != plan:
            assert_same_bits(started(moved, corpus), run)
