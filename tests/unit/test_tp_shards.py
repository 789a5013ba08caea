"""Sets: slices of sequences and uneven TP shards cover the whole, or are refused."""

from argparse import Namespace
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.action_words import parse_action_lists
from tests.examples import examples
from tests.strategies import in_ascending_order, plans, that_share_experts
from tests.unit.made_plans import plan_of, replica
from tests.unit.test_shards import elements, held
from zorse_megatron.costs.interface import TpShard
from zorse_megatron.errors import PlanError
from zorse_megatron.flags.check import check_arguments
from zorse_megatron.plan.plan import (
    Chunk,
    ExpertParallel,
    Group,
    ModelFingerprint,
    Offload,
    Plan,
    Schedule,
    TpShards,
    data_parallel_ranks,
    has_equal_tp_shards,
)
from zorse_megatron.plan.plan_file import dump_plan, parse_plan
from zorse_megatron.plan.rules import problems_of
from zorse_megatron.schedule.actions import (
    RECEIVES,
    SENDS,
    edges_of,
    parse_action,
)
from zorse_megatron.schedule.communicators import communicators_of, links_of
from zorse_megatron.schedule.lower import lower_plan, refuse_unsupported
from zorse_megatron.schedule.tensor_parallel_parts import (
    TpPartition,
    cut_part,
    has_uneven_tp_shards,
    owned_blocks,
    slice_of_rank,
    slice_pairs,
    whole_blocks_of,
)
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


tp_plans = plans(
    max_world=9,
    max_groups=3,
    max_chunks_per_group=2,
    max_ranks_per_replica=4,
    schedule_names=("breadth_first", "interleaved"),
    with_schedule_parameters=True,
).map(in_ascending_order)
any_plans = tp_plans | that_share_experts(tp_plans)


@settings(deadline=None, max_examples=examples(40))
@given(plan=any_plans, forward_only=st.booleans())
def test_lists_of_tp_groups_execute(plan: Plan, forward_only: bool) -> None:
    """All ranks of a replica compute in one order, with peers of their own."""
    lists = lower_plan(plan, forward_only=forward_only)
    of_replicas = [replica.ranks for group in plan.groups for replica in group.replicas]
    check_executable(lists, of_replicas)
    assert parse_action_lists(str(lists)) == lists
    for ranks in of_replicas:
        own = [[a for a in lists.ranks[rank] if a.kind not in SENDS | RECEIVES] for rank in ranks]
        assert all(each == own[0] for each in own)
    if not forward_only:
        assert list(links_of(plan)) == edges_of([lists])


@settings(deadline=None, max_examples=examples(40))
@given(plan=any_plans)
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
    word = "1SEND_F3>4[8:12,1:3/6]"
    assert str(parse_action(word)) == word
    with pytest.raises(ValueError, match="expected an action"):
        parse_action("1SEND_F3>4[8:12,1:3]")


def test_ranks_of_a_tp_group_that_compute_in_another_order_are_found() -> None:
    lists = parse_action_lists("rank 0: 0F0 0F1\nrank 1: 0F1 0F0")
    check_executable(lists)
    with pytest.raises(ScheduleError, match="no rank can proceed"):
        check_executable(lists, [(0, 1)])


def test_a_send_and_a_receive_of_other_parts_do_not_match() -> None:
    text = "rank 0: 0F0 0SEND_F0>1[0:1,0:1/2]\nrank 1: 1RECV_F0<0[0:1,1:2/2] 1F0"
    with pytest.raises(ScheduleError, match="where rank 1 has"):
        check_executable(parse_action_lists(text))


def plan_with(ranks: tuple[int, ...], **model: int) -> Plan:
    return plan_of([replica(*ranks, count=2)], model=model)


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
def test_tp_groups_that_cannot_hold_parts_are_refused(
    ranks: tuple[int, ...], model: dict[str, int], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        refuse_unsupported(plan_with(ranks, **model))


@pytest.mark.parametrize(
    ("settings_of_group", "message"),
    [
        (
            {"grad_reduce_dtype": "bf16"},
            "grad_reduce_dtype: found bf16, with replicas of 1 and 2 ranks",
        ),
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


def sharing(*ranks: int, experts: tuple[int, ...] = (1, 3), **model: int) -> Plan:
    """Two ranks that share experts alone, the second without samples."""
    shared = ExpertParallel(experts=experts, samples=(1, 0))
    alone = replace(replica(*ranks, count=2), expert_parallel=shared)
    return plan_of([alone], model=model)


@pytest.mark.parametrize(
    ("plan", "settings_of_group", "message"),
    [
        (sharing(1, 0), {}, r"ranks: found \[1, 0\]; expected \[0, 1\], in ascending order"),
        (
            sharing(0, 1, num_experts=5),
            {},
            r"parallel.experts: found \[1, 3\], 4 in all; expected 5 in all, as the model has",
        ),
        (
            sharing(0, 1, ffn_hidden_size=5),
            {},
            "parallel: found expert_parallel, of a model without experts; expected a model with",
        ),
        (
            sharing(0, 1),
            {"grad_reduce_dtype": "bf16"},
            "dtype: found bf16, with replicas that share experts; expected all experts on each",
        ),
        (
            sharing(0, 1),
            {"offload": Offload(gradients=True)},
            "gradients: found true, with replicas that share experts; expected all experts on",
        ),
    ],
)
def test_what_ranks_that_share_experts_cannot_do_is_refused(
    plan: Plan, settings_of_group: dict[str, Any], message: str
) -> None:
    group = replace(plan.groups[0], **settings_of_group)
    unlike = replace(plan, groups=(group,), schedule=Schedule(name="breadth_first"))
    with pytest.raises(PlanError, match=message):
        refuse_unsupported(unlike)


# Unequal parts.

counts = st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any).map(tuple)


@given(
    counts=counts, rows=st.integers(1, 3), blocks=st.sampled_from([1, 2]), axis=st.integers(0, 1)
)
def test_parts_are_the_whole_once(
    counts: tuple[int, ...], rows: int, blocks: int, axis: int
) -> None:
    tp_shards = TpPartition(degree=len(counts), tp_shards=TpShards(mlp_columns=counts))
    shape = [7, 7]
    shape[axis] = blocks * rows * sum(counts)
    pieces = []
    for index, count in enumerate(counts):
        part = cut_part(shape, axis, tp_shards, "mlp_columns", index=index, blocks=blocks)
        local = part.local_shape[axis]
        assert local == blocks * rows * count
        if count:
            assert tp_shards.whole_length("mlp_columns", index, local) == shape[axis]
            pieces.append(held(part))
    found = np.concatenate([piece.reshape(-1) for piece in pieces])
    assert sorted(found) == list(range(shape[0] * shape[1]))


@given(counts=counts, axis=st.integers(0, 1), data=st.data())
def test_intervals_of_a_part_as_blocks_of_the_whole(
    counts: tuple[int, ...], axis: int, data: st.DataObject
) -> None:
    """In the order of the rank's own memory, also where rows of gate and up follow one another."""
    tp_shards = TpPartition(degree=len(counts), tp_shards=TpShards(mlp_columns=counts))
    blocks = 2 if axis == 0 else 1
    shape = [3, 3]
    shape[axis] = blocks * sum(counts)
    index = data.draw(st.sampled_from([i for i, count in enumerate(counts) if count]))
    part = cut_part(shape, axis, tp_shards, "mlp_columns", index=index, blocks=blocks)
    mine = held(part).reshape(-1)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(mine))] * 2)))
    found = [
        e for block in whole_blocks_of(part, (start, stop)) for e in elements((*shape,), block)
    ]
    assert found == list(mine[start:stop])


@given(first=counts, second=counts, weights=st.sampled_from([(1.0, 1.0), (0.0, 2.0), (3.0, 1.0)]))
def test_owners_of_unlike_parts(
    first: tuple[int, ...], second: tuple[int, ...], weights: tuple[float, float]
) -> None:
    shape = (sum(first) * sum(second), 3)
    replicas, rank = [], 0
    for numbers in (first, second):
        tp_shards = TpPartition(degree=len(numbers), tp_shards=TpShards(mlp_columns=numbers))
        replicas.append(
            {
                rank + index: cut_part(shape, 0, tp_shards, "mlp_columns", index=index, blocks=1)
                for index in range(len(numbers))
            }
        )
        rank += len(numbers)
    held_by = {
        r: set(held(part).flat)
        for replica in replicas
        for r, part in replica.items()
        if part.pieces
    }
    owned = []
    for each in owned_blocks(replicas, weights):
        inside = elements(shape, each.block)
        owned += inside
        assert all(set(inside) <= held_by[r] for r in each.holders)
        assert len(each.holders) == len(each.contributors) == 2
    assert sorted(owned) == list(range(shape[0] * 3))


def plan_of_tp_shards(tp_shards: TpShards, **model: int) -> Plan:
    plan = plan_with((0, 1), **model)
    replica = replace(plan.groups[0].replicas[0], tp_shards=tp_shards)
    group = replace(plan.groups[0], replicas=(replica,))
    return replace(plan, groups=(group,))


def test_a_plan_with_parts_is_said_back() -> None:
    plan = plan_of_tp_shards(TpShards(kv_groups=(3, 1), mlp_columns=(8, 0)), num_query_groups=4)
    assert not problems_of(plan)
    assert parse_plan(dump_plan(plan).encode()) == plan
    refuse_unsupported(plan)  # raises nothing
    assert "tp_shards" not in dump_plan(plan_with((0, 1)))


def test_a_rank_may_hold_none_of_anything() -> None:
    tp_shards = TpShards(kv_groups=(4, 0), mlp_columns=(16, 0), vocabulary_rows=(0, 16))
    sizes = {"num_query_groups": 4, "ffn_hidden_size": 16, "vocab_size": 16}
    plan = plan_of_tp_shards(tp_shards, **sizes)
    assert not problems_of(plan)
    assert parse_plan(dump_plan(plan).encode()) == plan
    refuse_unsupported(plan)  # raises nothing


def test_equal_parts_are_those_of_a_plan_that_names_none() -> None:
    """Replicas of which one names them are twins, with the data-parallel groups of twins."""
    plan = plan_with((0, 1))
    (silent,) = plan.groups[0].replicas
    for said in (
        TpShards(),
        TpShards(kv_groups=(2, 2), mlp_columns=(8, 8), vocabulary_rows=(9, 9)),
    ):
        naming = replace(silent, ranks=(2, 3), tp_shards=said)
        group = replace(plan.groups[0], replicas=(silent, naming))
        assert TpPartition.of(naming) == TpPartition.of(silent)
        assert TpShard.of(naming, 3) == TpShard.of(silent, 1)
        assert has_equal_tp_shards(group) and not has_uneven_tp_shards(group)
        assert data_parallel_ranks(group) == ((0, 2), (1, 3))
        both, none = (
            replace(plan, global_batch_size=2 * plan.global_batch_size, groups=(each,))
            for each in (group, replace(group, replicas=(silent, replace(naming, tp_shards=None))))
        )
        assert lower_plan(both) == lower_plan(none)
        assert communicators_of(both, [lower_plan(both)]) == communicators_of(
            none, [lower_plan(none)]
        )
    columns = replace(silent, tp_shards=TpShards(kv_groups=(2, 2), mlp_columns=(15, 1)))
    assert TpPartition.of(columns).tp_shards == TpShards(mlp_columns=(15, 1))


def test_unlike_parts_are_no_twins() -> None:
    plan = plan_of_tp_shards(TpShards(kv_groups=(3, 1)))
    (uneven,) = plan.groups[0].replicas
    twin = replace(uneven, ranks=(2, 3))
    assert has_equal_tp_shards(replace(plan.groups[0], replicas=(uneven, twin)))
    even = replace(twin, tp_shards=None)
    assert not has_equal_tp_shards(replace(plan.groups[0], replicas=(uneven, even)))


def test_intervals_follow_one_another() -> None:
    tp_shards = TpPartition(degree=3, tp_shards=TpShards(vocabulary_rows=(1, 155, 100)))
    found = [tp_shards.interval("vocabulary_rows", index, 256) for index in range(3)]
    assert found[0][0] == 0 and found[-1][1] == 256
    assert all(one[1] == other[0] for one, other in pairwise(found))


def flag_problems(plan: Plan, **given: object) -> list[str]:
    fitting = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return [
        f"{each.where}: {each.found}"
        for each in check_arguments(Namespace(**{**fitting, **given}), plan, again=True)
    ]


def test_flags_that_tp_groups_cannot_keep_are_refused() -> None:
    plan = plan_of_tp_shards(TpShards(mlp_columns=(8, 0), vocabulary_rows=(9, 7)))
    assert flag_problems(plan) == []
    found = flag_problems(plan, hidden_dropout=0.1, attention_dropout=None, sft=True)
    assert [each.split(":")[0] for each in found] == [
        "--attention-dropout",  # Megatron's default is not 0
        "--hidden-dropout",
    ]
    assert flag_problems(plan, sft=True, sequence_parallel=True) == []
    assert flag_problems(plan, swiglu=True, save="checkpoints") == []
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    assert flag_problems(plan, **fused) == [
        "--cross-entropy-fusion-impl: te, with uneven TP shards of the vocabulary"
    ]
    (split,) = flag_problems(plan, sequence_parallel=True, seq_length=33)
    assert "33 positions of a sequence" in split
    (rows,) = flag_problems(plan, padded_vocab_size=17)
    assert "16 rows of the vocabulary in all" in rows


def test_layers_of_experts_have_no_columns_to_divide() -> None:
    plan = plan_of_tp_shards(TpShards(experts=(3, 1)))
    command = {"num_experts": 4, "ffn_hidden_size": 33}
    assert flag_problems(plan, **command) == []
    assert flag_problems(plan, **command, moe_layer_freq=[1] * plan.model.num_layers) == []
    (dense,) = flag_problems(plan, **command, moe_layer_freq=[0] * plan.model.num_layers)
    assert "33 columns of the MLP" in dense
    (more,) = flag_problems(plan, **command | {"num_experts": 5})
    assert "4 experts in all" in more
    (none,) = flag_problems(plan_of_tp_shards(TpShards(mlp_columns=(32, 1))), **command)
    assert "no experts, of a model with 4 in each layer" in none


def chain(*tp_groups: tuple[int, ...]) -> Plan:
    """One group and one layer for each TP group."""
    groups = tuple(plan_with(ranks).groups[0] for ranks in tp_groups)
    chunks = tuple(Chunk(group=n, layers=(n, n + 1)) for n in range(len(tp_groups)))
    model = ModelFingerprint(num_layers=len(tp_groups))
    return replace(plan_with(tp_groups[0]), model=model, groups=groups, chunks=chunks)


def test_masks_do_not_reach_all_ranks_of_tp_groups_in_between() -> None:
    """Stock's `get_batch_on_this_tp_rank` broadcasts them on the first and the last stage."""
    between, ends = chain((0,), (1, 2), (3,)), chain((0, 1), (2,), (3, 4))
    (found,) = flag_problems(between, reset_attention_mask=True)
    assert found.startswith("--reset-attention-mask: the flag, with a tensor-parallel group in")
    assert "groups[1].replicas[0].ranks" in found
    assert flag_problems(ends, reset_attention_mask=True) == []
    without = {"reset_attention_mask": True, "create_attention_mask_in_dataloader": False}
    assert flag_problems(between, **without) == []


def test_replicas_that_cut_layers_differently_have_no_hashes_to_compare() -> None:
    hashes = {"check_weight_hash_across_dp_replicas_interval": 2}
    alike = chain((0, 1), (2,))
    assert flag_problems(alike, **hashes) == []
    other = Group(replicas=(*alike.groups[0].replicas, *alike.groups[1].replicas))
    (found,) = flag_problems(replace(alike, groups=(other,)), **hashes)
    assert "2, with replicas in groups[0] that cut layers differently" in found


def test_a_plan_without_tp_groups_asks_nothing_of_the_flags() -> None:
    plan = plan_with((0,))
    assert flag_problems(plan, hidden_dropout=0.1, sft=True, sequence_parallel=True) == []
