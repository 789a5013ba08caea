"""Sets of any two degrees exchange each position of a sequence once; lists with sets execute."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.strategies import plans
from zorse_megatron.errors import PlanError
from zorse_megatron.plan.plan import (
    Chunk,
    Group,
    ModelFingerprint,
    Offload,
    Plan,
    Replica,
    Schedule,
)
from zorse_megatron.schedule.actions import (
    RECEIVES,
    SENDS,
    edges_of,
    parse_action,
    parse_action_lists,
)
from zorse_megatron.schedule.communicators import links_of
from zorse_megatron.schedule.lower import lower_plan, refuse_unsupported
from zorse_megatron.schedule.tensor_parallel_parts import slice_of_rank, slice_pairs
from zorse_megatron.schedule.validate import ScheduleError, check_executable

degrees = st.integers(1, 9)


@given(sources=degrees, targets=degrees, length=st.integers(1, 300))
def test_each_position_goes_from_who_has_it_to_who_needs_it_once(
    sources: int, targets: int, length: int
) -> None:
    crossed: Counter[int] = Counter()
    for pair in slice_pairs(sources, targets):
        start, stop = pair.positions.bounds(length) if pair.positions else (0, length)
        crossed.update(range(start, stop))
        for index, degree in ((pair.source, sources), (pair.target, targets)):
            first, last = slice_of_rank(index, degree).bounds(length)
            assert first <= start <= stop <= last
    assert crossed == Counter(range(length))


def with_sets(plan: Plan) -> Plan:
    """The plan, with the ranks of each set in ascending order."""
    groups = tuple(
        replace(
            group,
            replicas=tuple(replace(r, ranks=tuple(sorted(r.ranks))) for r in group.replicas),
        )
        for group in plan.groups
    )
    return replace(plan, groups=groups)


set_plans = plans(
    max_world=9,
    max_groups=3,
    max_chunks_per_group=2,
    max_ranks_per_replica=4,
    schedule_names=("breadth_first", "interleaved"),
    with_schedule_parameters=True,
).map(with_sets)


@settings(deadline=None, max_examples=examples(40))
@given(plan=set_plans, forward_only=st.booleans())
def test_lists_of_sets_execute(plan: Plan, forward_only: bool) -> None:
    """All ranks of a set compute the same in one order, with peers of their own."""
    lists = lower_plan(plan, forward_only=forward_only)
    sets = [replica.ranks for group in plan.groups for replica in group.replicas]
    check_executable(lists, sets)
    assert parse_action_lists(str(lists)) == lists
    for ranks in sets:
        own = [[a for a in lists.ranks[rank] if a.kind not in SENDS | RECEIVES] for rank in ranks]
        assert all(each == own[0] for each in own)
    if not forward_only:
        assert list(links_of(plan)) == edges_of([lists])


@settings(deadline=None, max_examples=examples(40))
@given(plan=set_plans)
def test_each_element_of_an_activation_crosses_once(plan: Plan) -> None:
    length = 2520  # which all degrees divide
    sent: Counter[tuple[object, ...]] = Counter()
    for actions in lower_plan(plan).ranks:
        for a in actions:
            if a.kind in SENDS:
                assert a.samples is not None
                start, stop = a.positions.bounds(length) if a.positions else (0, length)
                for sample in range(*a.samples):
                    sent[a.kind, a.chunk, sample] += stop - start
    assert set(sent.values()) <= {length}


def test_a_part_is_printed_and_read_back() -> None:
    word = "1SA3>4[8:12,1:3/6]"
    assert str(parse_action(word)) == word
    with pytest.raises(ValueError, match="expected an action"):
        parse_action("1SA3>4[8:12,1:3]")


def test_ranks_of_a_set_that_compute_in_another_order_are_found() -> None:
    lists = parse_action_lists("rank 0: 0F0 0F1\nrank 1: 0F1 0F0")
    check_executable(lists)
    with pytest.raises(ScheduleError, match="no rank can proceed"):
        check_executable(lists, [(0, 1)])


def test_a_send_and_a_receive_of_other_parts_do_not_match() -> None:
    text = "rank 0: 0F0 0SA0>1[0:1,0:1/2]\nrank 1: 1RA0<0[0:1,1:2/2] 1F0"
    with pytest.raises(ScheduleError, match="where rank 1 has"):
        check_executable(parse_action_lists(text))


def plan_with(ranks: tuple[int, ...], **model: int) -> Plan:
    replica = Replica(ranks=ranks, micro_batch_size=1, num_microbatches=2, shard_weight=1.0)
    return Plan(
        schema_version=1,
        global_batch_size=2,
        model=ModelFingerprint(num_layers=1, **model),
        groups=(Group(replicas=(replica,)),),
        chunks=(Chunk(group=0, layers=(0, 1)),),
        schedule=Schedule(name="1f1b"),
    )


@pytest.mark.parametrize(
    ("ranks", "model", "message"),
    [
        ((1, 0), {}, r"found \[1, 0\]; expected \[0, 1\], in ascending order"),
        ((0, 1, 2), {"num_query_groups": 2}, "found 3 ranks .* for 2 KV groups; expected at most"),
        ((0, 1, 2), {"num_attention_heads": 8}, "for 8 KV groups; expected a divisor of 8"),
        ((0, 1), {"ffn_hidden_size": 33}, "for 33 columns of the MLP"),
        ((0, 1), {"vocab_size": 257}, "for 257 rows of the vocabulary"),
    ],
)
def test_sets_that_cannot_hold_parts_are_refused(
    ranks: tuple[int, ...], model: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        refuse_unsupported(plan_with(ranks, **model))


@pytest.mark.parametrize(
    ("settings_of_group", "message"),
    [
        ({"gradient_wire": "bf16"}, "gradient_wire: found bf16, with replicas of 1 and 2 ranks"),
        ({"offload": Offload(parameters=True)}, "offload.parameters: found true, with replicas of"),
    ],
)
def test_what_replicas_of_unlike_parts_cannot_do_is_refused(
    settings_of_group: dict[str, Any], message: str
) -> None:
    plan = plan_with((0, 1))
    single = replace(plan.groups[0].replicas[0], ranks=(2,))
    group = replace(plan.groups[0], replicas=(*plan.groups[0].replicas, single))
    group = replace(group, **settings_of_group)
    unlike = replace(
        plan, global_batch_size=4, groups=(group,), schedule=Schedule(name="breadth_first")
    )
    with pytest.raises(PlanError, match=message):
        refuse_unsupported(unlike)
