"""What ranks on GPUs launch cannot hang; and the checker finds what can."""

from dataclasses import replace

import pytest

from scripts.launch_order import check
from scripts.launch_order.check import IN_ORDER, LIMITS, WAYS, Launched, random_plans, tell_in_order
from scripts.launch_order.happens_before import most_waiting_exactly
from scripts.launch_order.hardware_queues import find_hang, most_seen
from scripts.launch_order.launches import CHOICES, MAIN, ROWS, Launch, launches_of
from tests.action_words import parse_action_lists
from tests.unit.made_plans import even_plan
from zorse_megatron.plan.divided_replicas import replicas_that_share_experts
from zorse_megatron.plan.plan import has_equal_tp_shards
from zorse_megatron.schedule import communicators
from zorse_megatron.schedule.communicators import Communicator
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.validate import executes_in_order

AS_LAUNCHED, WHEN_OPENED = WAYS
IN_TIME = "rank 0: 0F0 0F1 0B1 0B0\nrank 1: 0F0 0F1 0B0 0B1"
TOO_LATE = "rank 0: 0F1 0B1 0F0 0B0\nrank 1: 0F0 0F1 0B0 0B1"
LINKS = [Communicator(use="link", ranks=edge) for edge in ((0, 1), (1, 0))]


@pytest.fixture(scope="module")
def plans():
    return random_plans(48, 7)


def kernel(rank: int, link: Communicator, *after: Launch, number: int = 0) -> Launch:
    kind = "send" if link.ranks[0] == rank else "receive"
    return Launch(
        rank=rank,
        stream=link,
        word=f"{kind} {link.ranks}",
        after=after,
        operation=(link, number),
        kind=kind,
    )


def there_and_back(rank: int) -> list[Launch]:
    """Rank 0 launches its receive of the answer before its question; rank 1 answers."""
    if rank == 0:
        return [kernel(0, LINKS[1]), kernel(0, LINKS[0])]
    question = kernel(1, LINKS[0])
    answer = Launch(rank=1, stream=MAIN, word="answer", after=(question,))
    return [question, answer, kernel(1, LINKS[1], answer)]


def test_a_kernel_that_waits_for_the_others_holds_its_place():
    """The question starts beside the receive of its answer, if there is room for both."""
    both = [there_and_back(0), there_and_back(1)]
    assert find_hang(both) is None
    assert find_hang(both, num_resident=2) is None
    hangs = [find_hang(both, num_resident=1, seed=seed) for seed in range(20)]
    assert None in hangs, "rank 0 may start the question first"
    stuck = next(hang for hang in hangs if hang is not None)
    assert "rank 0: next send (0, 1); resident receive (1, 0)" in stuck


def test_the_first_of_a_hardware_queue_holds_back_the_others():
    """A receive that cannot start, because what it waits for is behind it."""
    work = Launch(rank=0, stream=MAIN, word="work")
    receive = kernel(0, LINKS[1], work)
    other = [kernel(1, LINKS[1])]
    assert find_hang([[work, receive], other], num_queues=1) is None
    assert find_hang([[receive, work], other], num_queues=2) is None
    stuck = find_hang([[receive, work], other], num_queues=1)
    assert stuck is not None and "rank 0: next receive (1, 0)" in stuck


def test_a_host_that_waits_launches_nothing_more():
    """What another rank needs before it comes to where both meet."""
    both = Communicator(use="tp_group", ranks=(0, 1))
    meets = [kernel(rank, both) for rank in (0, 1)]
    for each in meets:
        each.kind = "choices"
    told = Launch(rank=0, stream=MAIN, word="told", after=(meets[0],))
    receive = kernel(1, LINKS[0])
    meets[1].after = (receive,)
    ranks = [[meets[0], told, kernel(0, LINKS[0])], [receive, meets[1]]]
    assert find_hang(ranks) is None
    assert most_waiting_exactly(ranks) == [2, 1]
    told.holds_host = True
    stuck = find_hang(ranks)
    assert stuck is not None and "rank 0: next told" in stuck


def test_different_operations_are_not_one():
    group = Communicator(use="group", ranks=(0, 1))
    ends = [
        [Launch(rank=r, stream=group, word=word, operation=(group, 0), kind=word)]
        for r, word in enumerate(("0UNSHARD", "0REDUCE_GRAD"))
    ]
    assert find_hang(ends) is not None
    assert find_hang([ends[0]]) is not None


def hanging(plans, way, *limits):
    return sum(
        any(
            Launched.of(plan, way, forward_only=forward_only).hang(*limits) is not None
            for forward_only in (False, True)
        )
        for plan in plans
    )


def test_plans_hold_all_that_launches(plans):
    """None of it is drawn by chance alone."""
    drawn = {
        "tensor-parallel": [
            any(r.tp_degree > 1 for g in p.groups for r in g.replicas) for p in plans
        ],
        "in two levels": [any(group.hierarchical for group in p.groups) for p in plans],
        "16-bit gradients": [any(group.grad_reduce_dtype for group in p.groups) for p in plans],
        "sharing experts": [bool(shared_experts(p)) for p in plans],
        "overlapped": [any(each.overlap for each in shared_experts(p)) for p in plans],
        "with parts of layers": [
            any(not has_equal_tp_shards(group) for group in p.groups) for p in plans
        ],
        "tied": [bool(p.model.tied_embeddings) for p in plans],
        "loss told": [p.world_size - 1 not in p.groups[p.chunks[-1].group].ranks for p in plans],
    }
    assert min(map(sum, drawn.values())) > 2, {what: sum(each) for what, each in drawn.items()}


def shared_experts(plan):
    return [shared for _, _, shared in replicas_that_share_experts(plan)]


def of_a_rank_that_shares_experts(launches):
    """A rank's launches between it and those with which it shares experts, in order."""
    of_ranks = (
        [each for each in items if each.kind.endswith((CHOICES, ROWS))] for items in launches
    )
    return next(filter(None, of_ranks), [])


def test_ranks_that_launch_in_unlike_order_are_found(plans):
    """One of those that share experts sends rows before it tells whose they are."""
    num_planted = 0
    for plan in plans:
        launches = Launched.of(plan, AS_LAUNCHED).launches
        if exchanged := of_a_rank_that_shares_experts(launches):
            num_planted += 1
            told, sent = exchanged[:2]
            told.kind, sent.kind = sent.kind, told.kind
            assert "found" in str(find_hang(launches))
    assert num_planted


def test_ranks_of_which_one_alone_runs_no_halves_are_found(plans):
    num_planted = 0
    for plan in plans:
        lists = lower_plan(plan)
        launches, whole = launches_of(plan, lists), launches_of(in_whole_micro_batches(plan), lists)
        ranks = (r for r in range(len(launches)) if len(launches[r]) != len(whole[r]))
        if (rank := next(ranks, None)) is not None:
            num_planted += 1
            launches[rank] = whole[rank]
            assert "found" in str(find_hang(launches))
    assert num_planted


def in_whole_micro_batches(plan):
    groups = []
    for group in plan.groups:
        replicas = [
            replace(each, expert_parallel=replace(each.expert_parallel, overlap=False))
            if each.expert_parallel
            else each
            for each in group.replicas
        ]
        groups.append(replace(group, replicas=tuple(replicas)))
    return replace(plan, groups=tuple(groups))


@pytest.mark.parametrize("limits", [limits for limits in LIMITS if limits[1] == "fit"])
def test_what_is_launched_ends_if_all_that_can_wait_at_once_fits(plans, limits):
    assert hanging(plans, AS_LAUNCHED, *limits) == 0


@pytest.mark.parametrize("limits", [limits for limits in LIMITS if limits[1] == "fit"])
def test_hosts_that_wait_for_loads_hang_in_no_plan_that_is_accepted(plans, limits):
    """As `global_aux_loss` lets them wait, here on every chunk."""
    accepted = tell_in_order(plans)
    assert len(accepted) > len(plans) / 2
    assert hanging(accepted, IN_ORDER, *limits) == 0


@pytest.mark.parametrize(("text", "hangs"), [(IN_TIME, False), (TOO_LATE, True)])
def test_a_host_that_waits_for_loads_that_come_too_late_is_found(text, hangs):
    """Rank 0 has samples 0 and 2, rank 1 has 1 and 3."""
    plan, lists = even_plan(1, 2, 2), parse_action_lists(text)
    assert executes_in_order(plan, lists) != hangs
    assert find_hang(launches_of(plan, lists)) is None
    stuck = find_hang(launches_of(plan, lists, in_order=True))
    assert (stuck is not None and "rank 0: 0B1 waits for loads" in stuck) == hangs


def test_without_room_it_hangs(plans):
    assert hanging(plans, AS_LAUNCHED, None, 1) > 5


def test_receives_that_are_launched_when_they_are_opened_hang(plans):
    assert hanging(plans, WHEN_OPENED, None, "fit") == 0
    assert hanging(plans, WHEN_OPENED, 8, "fit") > 0
    assert hanging(plans, WHEN_OPENED, 1, "fit") > 5


def test_more_kernels_than_the_bound_never_wait_at_once(plans):
    """What is seen is at most what can happen, and that at most the bound."""
    for plan in plans:
        launched = Launched.of(plan, AS_LAUNCHED)
        exact = most_waiting_exactly(launched.launches)
        seen = [
            max(each)
            for each in zip(*(most_seen(launched.launches, seed=s) for s in (1, 2)), strict=True)
        ]
        for rank, bound in enumerate(launched.resident):
            assert seen[rank] <= exact[rank] <= bound


@pytest.mark.parametrize("left_out", ["sends", "three"])
def test_a_bound_that_is_too_small_is_found(plans, monkeypatch, left_out):
    """As if a send never waited, or three kernels fewer than can: more can wait at once than that,
    and with so little room plans hang."""
    spans, most = communicators.message_spans, check.most_waiting

    def without_sends(rank, actions):
        return (span for span in spans(rank, actions) if span.link[0] != rank)

    def fewer(*args, **options):
        return max(1, most(*args, **options) - 3)

    if left_out == "sends":
        monkeypatch.setattr(communicators, "message_spans", without_sends)
    else:
        monkeypatch.setattr(check, "most_waiting", fewer)
        assert hanging(plans, AS_LAUNCHED, None, "fit") > 0
    each = [Launched.of(plan, AS_LAUNCHED) for plan in plans]
    exact = [most_waiting_exactly(launched.launches) for launched in each]
    assert any(
        one > bound
        for launched, found in zip(each, exact, strict=True)
        for one, bound in zip(found, launched.resident, strict=True)
    )


def test_kernels_that_can_wait_at_once():
    """A stage in the middle: four links on which messages wait, its group, and the world. The last
    two never wait at the same time, and only when all messages have arrived."""
    launched = Launched.of(even_plan(3, 2, 4), AS_LAUNCHED)
    assert launched.resident == [4, 4, 6, 6, 4, 4]
    assert most_waiting_exactly(launched.launches) == [2, 2, 4, 4, 2, 2]
