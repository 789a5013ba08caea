"""Links of a plan: those of its lists, and an order in which they connect at once."""

from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.strategies import lowerable_plans
from tests.unit.made_plans import even_plan
from zorse_megatron.runtime import transport
from zorse_megatron.runtime.transport import connect, link_groups, nccl_options, world_options
from zorse_megatron.schedule.actions import edges_of
from zorse_megatron.schedule.communicators import (
    WORLD_CTAS,
    communicators_of,
    in_rounds,
    links_of,
    planned_communicators,
)
from zorse_megatron.schedule.lower import lower_plan

EDGES = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda e: e[0] != e[1]), unique=True
)


@settings(deadline=None, max_examples=examples(30))
@given(plan=lowerable_plans())
def test_links_of_a_plan_are_those_of_its_lists(plan):
    """What is priced from the plan is what the ranks connect from their lists."""
    lists = lower_plan(plan), lower_plan(plan, forward_only=True)
    assert list(links_of(plan)) == edges_of(lists)
    assert planned_communicators(plan) == communicators_of(plan, lists)


@given(links=EDGES)
def test_links_connect_in_few_rounds(links):
    """A link waits for those before it with one of its ranks alone: the longest such chain is less
    than twice as long as the busiest rank has links."""
    order = in_rounds(links)
    assert sorted(order) == sorted(links)
    depth: Counter[int] = Counter()
    for source, target in order:
        depth[source] = depth[target] = max(depth[source], depth[target]) + 1
    busiest = Counter(rank for link in links for rank in link)
    assert max(depth.values(), default=0) <= max(0, 2 * max(busiest.values(), default=0) - 1)


class RecordedDist:
    """torch.distributed as one rank calls it."""

    isend, irecv = "send", "receive"
    ProcessGroup = dist.ProcessGroup

    def __init__(self):
        self.made, self.messages = [], []

    def new_group(self, ranks, timeout, pg_options):
        self.made.append((tuple(ranks), timeout, pg_options))
        return tuple(ranks)

    def P2POp(self, operation, tensor, peer, group):
        assert tensor.numel() == 1
        return operation, peer, group

    def batch_isend_irecv(self, operations):
        self.messages += operations
        return ()


@pytest.mark.parametrize("rank", range(4))
def test_every_rank_makes_all_groups_and_connects_its_own_by_a_message(rank, monkeypatch):
    recorded = RecordedDist()
    monkeypatch.setattr(transport, "dist", recorded)
    links = links_of(even_plan(2, 2, 4))
    timeout = timedelta(minutes=3)
    mine = link_groups(links, rank=rank, timeout=timeout, channels={})
    connect(mine, all_links=links, rank=rank, device=torch.device("cpu"))
    assert recorded.made == [(link, timeout, None) for link in links]
    expected = [
        ("send", target, link) if source == rank else ("receive", source, link)
        for link in in_rounds(links)
        for source, target in [link]
        if rank in link
    ]
    assert recorded.messages == expected and len(expected) == 2


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch is built without NCCL")
def test_options_have_the_timeout_of_the_group():
    """Of another one `new_group` warns, that it would be overridden."""
    options = nccl_options(4, timedelta(minutes=33))
    assert options.config.max_ctas == 4 and options._timeout == timedelta(minutes=33)


def test_the_world_has_few_channels_on_nccl_alone():
    minutes = timedelta(minutes=7)
    options = world_options("nccl", minutes)
    assert (options.config.max_ctas, options._timeout) == (WORLD_CTAS, minutes)
    assert world_options("gloo", minutes) is None
