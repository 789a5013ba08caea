"""Unequal parts of a set cover the whole, are said back, and are refused where they do not."""

from argparse import Namespace
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_sequence_slices import plan_with
from tests.unit.test_tensor_parts import elements, held
from zorse_megatron.costs.interface import RankPart
from zorse_megatron.flags.check import check_arguments
from zorse_megatron.plan.plan import (
    Chunk,
    Group,
    ModelFingerprint,
    Parts,
    Plan,
    data_parallel_ranks,
    holds_equal_parts,
)
from zorse_megatron.plan.plan_file import dump_plan, parse_plan
from zorse_megatron.plan.rules import problems_of
from zorse_megatron.schedule.communicators import communicators_of
from zorse_megatron.schedule.lower import lower_plan, refuse_unsupported
from zorse_megatron.schedule.tensor_parallel_parts import (
    SetParts,
    cut_part,
    has_uneven_parts,
    owned_blocks,
    whole_blocks_of,
)

counts = st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any).map(tuple)


@given(
    counts=counts, rows=st.integers(1, 3), blocks=st.sampled_from([1, 2]), axis=st.integers(0, 1)
)
def test_parts_are_the_whole_once(
    counts: tuple[int, ...], rows: int, blocks: int, axis: int
) -> None:
    parts = SetParts(degree=len(counts), parts=Parts(mlp_columns=counts))
    shape = [7, 7]
    shape[axis] = blocks * rows * sum(counts)
    pieces = []
    for index, count in enumerate(counts):
        part = cut_part(shape, axis, parts, "mlp_columns", index=index, blocks=blocks)
        local = part.local_shape[axis]
        assert local == blocks * rows * count
        if count:
            assert parts.whole_length("mlp_columns", index, local) == shape[axis]
            pieces.append(held(part))
    found = np.concatenate([piece.reshape(-1) for piece in pieces])
    assert sorted(found) == list(range(shape[0] * shape[1]))


@given(counts=counts, axis=st.integers(0, 1), data=st.data())
def test_intervals_of_a_part_as_blocks_of_the_whole(
    counts: tuple[int, ...], axis: int, data: st.DataObject
) -> None:
    """In the order of the rank's own memory, also where rows of gate and up follow one another."""
    parts = SetParts(degree=len(counts), parts=Parts(mlp_columns=counts))
    blocks = 2 if axis == 0 else 1
    shape = [3, 3]
    shape[axis] = blocks * sum(counts)
    index = data.draw(st.sampled_from([i for i, count in enumerate(counts) if count]))
    part = cut_part(shape, axis, parts, "mlp_columns", index=index, blocks=blocks)
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
        parts = SetParts(degree=len(numbers), parts=Parts(mlp_columns=numbers))
        replicas.append(
            {
                rank + index: cut_part(shape, 0, parts, "mlp_columns", index=index, blocks=1)
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


def plan_of_parts(parts: Parts, **model: int) -> Plan:
    plan = plan_with((0, 1), **model)
    replica = replace(plan.groups[0].replicas[0], parts=parts)
    group = replace(plan.groups[0], replicas=(replica,))
    return replace(plan, groups=(group,))


def test_a_plan_with_parts_is_said_back() -> None:
    plan = plan_of_parts(Parts(kv_groups=(3, 1), mlp_columns=(8, 0)), num_query_groups=4)
    assert not problems_of(plan)
    assert parse_plan(dump_plan(plan).encode()) == plan
    refuse_unsupported(plan)  # raises nothing
    assert "parts" not in dump_plan(plan_with((0, 1)))


def test_a_rank_may_hold_none_of_anything() -> None:
    parts = Parts(kv_groups=(4, 0), mlp_columns=(16, 0), vocabulary_rows=(0, 16))
    sizes = {"num_query_groups": 4, "ffn_hidden_size": 16, "vocab_size": 16}
    plan = plan_of_parts(parts, **sizes)
    assert not problems_of(plan)
    assert parse_plan(dump_plan(plan).encode()) == plan
    refuse_unsupported(plan)  # raises nothing


def test_equal_parts_are_those_of_a_plan_that_names_none() -> None:
    """Replicas of which one names them are twins, with the data-parallel groups of twins."""
    plan = plan_with((0, 1))
    (silent,) = plan.groups[0].replicas
    for said in (Parts(), Parts(kv_groups=(2, 2), mlp_columns=(8, 8), vocabulary_rows=(9, 9))):
        naming = replace(silent, ranks=(2, 3), parts=said)
        group = replace(plan.groups[0], replicas=(silent, naming))
        assert SetParts.of(naming) == SetParts.of(silent)
        assert RankPart.of(naming, 3) == RankPart.of(silent, 1)
        assert holds_equal_parts(group) and not has_uneven_parts(group)
        assert data_parallel_ranks(group) == ((0, 2), (1, 3))
        both, none = (
            replace(plan, global_batch_size=2 * plan.global_batch_size, groups=(each,))
            for each in (group, replace(group, replicas=(silent, replace(naming, parts=None))))
        )
        assert lower_plan(both) == lower_plan(none)
        assert communicators_of(both, [lower_plan(both)]) == communicators_of(
            none, [lower_plan(none)]
        )
    columns = replace(silent, parts=Parts(kv_groups=(2, 2), mlp_columns=(15, 1)))
    assert SetParts.of(columns).parts == Parts(mlp_columns=(15, 1))


def test_unlike_parts_are_no_twins() -> None:
    plan = plan_of_parts(Parts(kv_groups=(3, 1)))
    (uneven,) = plan.groups[0].replicas
    twin = replace(uneven, ranks=(2, 3))
    assert holds_equal_parts(replace(plan.groups[0], replicas=(uneven, twin)))
    even = replace(twin, parts=None)
    assert not holds_equal_parts(replace(plan.groups[0], replicas=(uneven, even)))


def test_intervals_follow_one_another() -> None:
    parts = SetParts(degree=3, parts=Parts(vocabulary_rows=(1, 155, 100)))
    found = [parts.interval("vocabulary_rows", index, 256) for index in range(3)]
    assert found[0][0] == 0 and found[-1][1] == 256
    assert all(one[1] == other[0] for one, other in pairwise(found))


def flag_problems(plan: Plan, **given: object) -> list[str]:
    fitting = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return [
        f"{each.where}: {each.found}"
        for each in check_arguments(Namespace(**{**fitting, **given}), plan, again=True)
    ]


def test_flags_that_sets_cannot_keep_are_refused() -> None:
    plan = plan_of_parts(Parts(mlp_columns=(8, 0), vocabulary_rows=(9, 7)))
    assert flag_problems(plan) == []
    found = flag_problems(plan, hidden_dropout=0.1, attention_dropout=None, sft=True)
    assert [each.split(":")[0] for each in found] == [
        "--attention-dropout",  # Megatron's default is not 0
        "--hidden-dropout",
        "--sft",
    ]
    assert flag_problems(plan, swiglu=True, save="checkpoints") == []
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    assert flag_problems(plan, **fused) == [
        "--cross-entropy-fusion-impl: te, with unequal parts of the vocabulary"
    ]
    (split,) = flag_problems(plan, sequence_parallel=True, seq_length=33)
    assert "33 positions of a sequence" in split
    (rows,) = flag_problems(plan, padded_vocab_size=17)
    assert "16 rows of the vocabulary in all" in rows


def chain(*sets: tuple[int, ...]) -> Plan:
    """One group and one layer for each set."""
    groups = tuple(plan_with(ranks).groups[0] for ranks in sets)
    chunks = tuple(Chunk(group=n, layers=(n, n + 1)) for n in range(len(sets)))
    model = ModelFingerprint(num_layers=len(sets))
    return replace(plan_with(sets[0]), model=model, groups=groups, chunks=chunks)


def test_masks_do_not_reach_all_ranks_of_sets_in_between() -> None:
    """Stock's `get_batch_on_this_tp_rank` broadcasts them on the first and the last stage."""
    between, ends = chain((0,), (1, 2), (3,)), chain((0, 1), (2,), (3, 4))
    (found,) = flag_problems(between, reset_attention_mask=True)
    assert found.startswith("--reset-attention-mask: the flag, with a tensor-parallel set in")
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


def test_a_plan_without_sets_asks_nothing_of_the_flags() -> None:
    plan = plan_with((0,))
    assert flag_problems(plan, hidden_dropout=0.1, sft=True, sequence_parallel=True) == []
