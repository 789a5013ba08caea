"""Samples, order and lowering: proven on random plans, and against Megatron's own 1F1B."""

import dataclasses

import pytest
from hypothesis import given

from tests.action_words import parse_action_lists
from tests.strategies import plans, sizes_as_they_run
from tests.unit.made_plans import even_plan
from zorse_megatron.errors import PlanError
from zorse_megatron.plan.plan import (
    Chunk,
    Group,
    ModelFingerprint,
    Offload,
    Plan,
    Recompute,
    Replica,
    Schedule,
)
from zorse_megatron.schedule.actions import (
    ON_LAYERS,
    RECEIVES,
    SENDS,
    Action,
    ActionLists,
    Kind,
    parse_action,
)
from zorse_megatron.schedule.lower import lower_plan, refuse_unsupported
from zorse_megatron.schedule.samples import micro_batches, pieces, rank_micro_batches
from zorse_megatron.schedule.validate import ScheduleError, check_executable


def computations(lists: ActionLists, rank: int) -> list[str]:
    return [
        f"{a.kind}{a.micro_batch}"
        for a in lists.ranks[rank]
        if a.kind in (Kind.FORWARD, Kind.BACKWARD)
    ]


def megatron_1f1b(stage: int, stages: int, count: int) -> list[str]:
    """The order of forward_backward_pipelining_without_interleaving, written from its rules."""
    warmup = min(stages - stage - 1, count)
    order = [f"F{i}" for i in range(warmup)]
    for i in range(count - warmup):
        order += [f"F{i + warmup}", f"B{i}"]
    return order + [f"B{i}" for i in range(count - warmup, count)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_equal_groups_give_megatrons_1f1b(stages: int, replicas: int, count: int) -> None:
    plan = even_plan(stages, replicas, count)
    lists = lower_plan(plan)
    for rank in range(plan.world_size):
        expected = megatron_1f1b(rank // replicas, stages, count)
        assert computations(lists, rank) == expected


@pytest.mark.parametrize(("replicas", "count", "size"), [(1, 4, 2), (2, 3, 1), (3, 4, 5)])
def test_equal_replicas_get_the_samples_of_megatrons_sampler(
    replicas: int, count: int, size: int
) -> None:
    plan = even_plan(2, replicas, count, size)
    for rank in range(plan.world_size):
        # MegatronPretrainingSampler: rank r takes [r * size, (r + 1) * size) of each round.
        expected = [(i * replicas * size + (rank % replicas) * size) for i in range(count)]
        assert [m.start for m in rank_micro_batches(plan, rank)] == expected


@pytest.mark.slow
@given(plan=plans())
def test_micro_batches_partition_the_global_batch(plan: Plan) -> None:
    for group in plan.groups:
        laid_out = micro_batches(group)
        assert [m.start for m in laid_out] == [0, *(m.stop for m in laid_out)][:-1]
        assert laid_out[-1].stop == plan.global_batch_size
        for number, replica in enumerate(group.replicas):
            mine = [m for m in laid_out if m.replica == number]
            assert [m.index for m in mine] == list(range(len(mine)))
            assert [m.size for m in mine] == sizes_as_they_run(replica)


@pytest.mark.slow
@given(plan=plans())
def test_pieces_equal_brute_force(plan: Plan) -> None:
    for left, right in zip(plan.groups, plan.groups[1:], strict=False):
        sources, targets = micro_batches(left), micro_batches(right)
        found = {
            (p.source, p.target): set(range(p.start, p.stop)) for p in pieces(sources, targets)
        }
        expected = {
            (a, b): overlap
            for a in sources
            for b in targets
            if (overlap := set(range(a.start, a.stop)) & set(range(b.start, b.stop)))
        }
        assert found == expected


def test_every_action_prints_and_parses_back() -> None:
    for kind in Kind:
        if kind in SENDS | RECEIVES:
            action = Action(kind=kind, chunk=2, micro_batch=11, peer=7, samples=(8, 12))
        elif kind in ON_LAYERS:
            action = Action(kind=kind, chunk=2, micro_batch=11)
        elif kind in (Kind.TIE, Kind.SCALE, Kind.NORM):
            action = Action(kind=kind)
        else:
            action = Action(kind=kind, chunk=2)
        assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    "word", ["", "F", "1X2", "1SEND_F2<3[0:1]", "1RECV_F2>3[0:1]", "STEPS", "-1F0"]
)
def test_what_is_no_action_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="expected an action"):
        parse_action(word)


def test_a_stuck_list_is_reported_with_every_rank() -> None:
    broken = parse_action_lists("rank 0: 0F0 0RECV_B0<1[0:1] 0B0\nrank 1: 1RECV_F0<0[0:1] 1F0 1B0")
    with pytest.raises(ScheduleError, match=r"no rank can proceed[\s\S]*»0RECV_B0[\s\S]*»1RECV_F0"):
        check_executable(broken)


def test_ends_that_do_not_match_are_reported() -> None:
    broken = parse_action_lists("rank 0: 0F0 0SEND_F0>1[0:2]\nrank 1: 1RECV_F0<0[0:1] 1F0")
    with pytest.raises(ScheduleError, match="rank 0 sends"):
        check_executable(broken)


def test_a_send_without_receive_is_reported() -> None:
    broken = parse_action_lists("rank 0: 0F0 0SEND_F0>1[0:1]\nrank 1: 1F0")
    with pytest.raises(ScheduleError, match=r"rank 0 at 1: 0F0 »0SEND_F0>1\[0:1\]«"):
        check_executable(broken)


def test_a_receive_after_its_computation_is_reported() -> None:
    broken = parse_action_lists("rank 0: 0F0 0SEND_F0>1[0:1]\nrank 1: 1F0 1RECV_F0<0[0:1]")
    with pytest.raises(ScheduleError, match="rank 1 has 1F0 before what it consumes"):
        check_executable(broken)


def test_what_cannot_be_lowered_or_executed_is_refused_all_at_once() -> None:
    replica = Replica(ranks=(1, 0), micro_batch_size=1, num_microbatches=1, shard_weight=1.0)
    plan = Plan(
        schema_version=2,
        global_batch_size=1,
        model=ModelFingerprint(num_layers=2),
        groups=(
            Group(
                replicas=(replica,),
                recompute=Recompute(mode="full"),
                offload=Offload(parameters=True),
            ),
        ),
        chunks=(Chunk(group=0, layers=(0, 1)), Chunk(group=0, layers=(1, 2))),
        schedule=Schedule(name="breadth_first"),
    )
    with pytest.raises(PlanError) as caught:
        refuse_unsupported(plan)
    assert [problem.where for problem in caught.value.problems] == ["groups[0].replicas[0].ranks"]
    with pytest.raises(PlanError) as caught:
        lower_plan(dataclasses.replace(plan, schedule=Schedule(name="1f1b")))
    assert [problem.where for problem in caught.value.problems] == [
        "groups[0]",
        "groups[0].replicas[0].ranks",
        "groups[0].offload.parameters",
    ]
    assert "interleaved or breadth_first" in caught.value.problems[0].remedy
    with pytest.raises(PlanError) as caught:
        lower_plan(plan)
    assert [problem.where for problem in caught.value.problems] == ["groups[0].replicas[0].ranks"]
