"""The tiny model that stands for a real one: TP groups cut both in the same way."""

import dataclasses

import pytest

from tests.megatron.plans import expert_replica, plan_of, tp_replica
from tests.unit.test_simulate_tp import tp_groups_of
from zorse_megatron.cli.commands.emulate import EmulationOptions
from zorse_megatron.emulate.tiny_model import TinyShape
from zorse_megatron.errors import ZorseError
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.divided_replicas import DividedSizes, divided_problems
from zorse_megatron.plan.plan import TpShards

MODEL = dataclasses.replace(MODELS["llama-3b"], num_query_groups=8)


def with_tp_shards(plan, parts):
    (group,) = plan.groups
    replica = dataclasses.replace(group.replicas[0], tp_shards=parts)
    return dataclasses.replace(plan, groups=(dataclasses.replace(group, replicas=(replica,)),))


def divided(shape):
    return DividedSizes(
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_heads,
        ffn_hidden_size=shape.ffn_hidden_size,
        vocab_size=shape.vocabulary_rows,
        sequence_length=shape.sequence_length,
    )


def test_without_tp_groups_it_is_always_the_same():
    plan = tp_groups_of([(0,), (1,)])
    shape = TinyShape.of(MODEL, [plan])
    assert shape == TinyShape()
    assert shape.flags() == []
    assert shape.plan(plan).groups == plan.groups


def test_all_tp_groups_of_all_plans_divide_it():
    plans = [
        tp_groups_of([(0, 1)], [(2, 3, 4, 5)]),
        tp_groups_of([(0, 1)], [(2, 3, 4, 5, 6, 7, 8, 9)]),
    ]
    shape = TinyShape.of(MODEL, plans)
    assert not [problem for plan in plans for problem in divided_problems(plan, divided(shape))]


@pytest.mark.parametrize(
    ("columns", "proportion"), [((6480, 2160), 0.75), ((5760, 2880), 2 / 3), ((8640, 0), 1.0)]
)
def test_unequal_parts_keep_their_proportion(columns, proportion):
    tp_shards = TpShards(kv_groups=(7, 1), mlp_columns=columns, vocabulary_rows=(31999, 1))
    plan = with_tp_shards(tp_groups_of([(0, 1)]), tp_shards)
    shape = TinyShape.of(MODEL, [plan])
    tiny = shape.plan(plan)
    assert not list(divided_problems(tiny, divided(shape)))
    found = tiny.groups[0].replicas[0].tp_shards
    assert found.kv_groups == (7, 1)
    assert found.mlp_columns[0] / sum(found.mlp_columns) == pytest.approx(proportion)
    assert found.vocabulary_rows == (255, 1)


def test_ranks_share_as_few_experts_as_they_can():
    shared = [expert_replica((0, 1), counts, (1, 1), 4) for counts in ((48, 16), (32, 32), (64, 0))]
    plans = [plan_of(((each,), 2)) for each in shared]
    shape = TinyShape.of(MODEL, plans)
    found = [shape.plan(plan).groups[0].replicas[0].expert_parallel.experts for plan in plans]
    assert found == [(3, 1), (2, 2), (4, 0)]
    assert TinyShape.of(MODEL, plans[-1:]).num_experts == 2  # as many as a token has


def test_tp_groups_beside_ranks_that_share_experts_are_refused():
    groups = ((expert_replica((0, 1), (1, 1), (1, 1), 4),), 1), ((tp_replica((2, 3), 2, 4),), 1)
    with pytest.raises(ZorseError, match=r"groups\[0\].replicas\[0\].expert_parallel: found it in"):
        EmulationOptions().refuse(plan_of(*groups), "plan.json")
    EmulationOptions().refuse(plan_of(groups[0]), "plan.json")
