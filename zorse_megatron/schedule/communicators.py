"""Which NCCL communicators a job needs, and how many of a GPU's processors each may use.

A communicator runs its kernels one after the other, on a stream of its own. A kernel that has
started occupies its processors until all of its ranks have come, so kernels of different
communicators that can wait at once must fit onto a GPU together, beside a computation: if one had
to wait for the end of another, two ranks could each wait for what the other has not room for.
`communicators` bounds what can wait at once; `scripts.launch_order` shows such hangs, and that
there are none within the bound.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zorse_megatron.plan.plan import Plan, communicating_ranks
from zorse_megatron.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    ActionLists,
    edges_of,
)
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.rank_messages import rank_messages
from zorse_megatron.schedule.samples import Boundaries
from zorse_megatron.schedule.transfer_windows import receives_posted_at, sends_waited_at

# All communicators of a GPU share this part of its multiprocessors, or have one each if that is
# more.
_PART_FOR_COMMUNICATION = 0.25
# NCCL's own limit is 32; a link of 25 GB/s is full with far fewer.
_MOST_CTAS = 16
WORLD_CTAS = 4
"""Of the communicator of all ranks, which sums numbers and exchanges a tied embedding."""
# Lowering a larger plan only to count kernels takes longer than is worth while.
_MOST_RANKS_COUNTED = 2048


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """Ranks that communicate, for one use.

    link: from the first of two ranks to the second. group: what ranks of a plan's group reduce and
    gather. region, across: the same in a hierarchical group, within a region and between regions.
    tp_group: what ranks of a replica do within its layers, a tensor-parallel group or such as share
    experts. world: what all ranks sum.
    """

    use: Literal["link", "group", "region", "across", "tp_group", "world"]
    ranks: tuple[int, ...]


def communicators_of(plan: Plan, each: Iterable[ActionLists]) -> tuple[Communicator, ...]:
    """All that the lists need, in one order that every rank derives. One rank needs none."""
    return _communicators(plan, edges_of(each))


def planned_communicators(plan: Plan) -> tuple[Communicator, ...]:
    """The same for a plan's lists of training, without lowering it."""
    return _communicators(plan, links_of(plan))


def _communicators(plan: Plan, edges: Iterable[tuple[int, int]]) -> tuple[Communicator, ...]:
    world = Communicator(use="world", ranks=tuple(range(plan.world_size)))
    groups = [
        Communicator(use=use, ranks=ranks)
        for group in plan.groups
        for use, ranks in communicating_ranks(group)
    ]
    tp_groups = [
        Communicator(use="tp_group", ranks=replica.ranks)
        for group in plan.groups
        for replica in group.replicas
    ]
    links = [Communicator(use="link", ranks=edge) for edge in edges]
    return tuple(found for found in (world, *groups, *tp_groups, *links) if len(found.ranks) > 1)


def resident_kernels(communicators: Iterable[Communicator]) -> Counter[int]:
    """Rank -> how many communicators it is in: the most kernels that could wait at once."""
    return Counter(rank for communicator in communicators for rank in communicator.ranks)


def max_ctas(
    communicators: Sequence[Communicator], num_sms: Mapping[int, int] | Sequence[int]
) -> dict[Communicator, int]:
    """Communicator -> `max_ctas` of its NCCL configuration, the same on all of its ranks.

    A link's is a power of two, as NCCL rounds the channels of messages up to one
    (`ncclTopoComputeP2pChannels`), and would take more than it was given. `num_sms`: rank ->
    multiprocessors of its GPU. See `ranks_at_risk` for those that are too few.
    """
    budgets = {
        rank: max(1, most_ctas(num_sms[rank]) // count)
        for rank, count in resident_kernels(communicators).items()
    }
    return {each: _ctas(each, budgets) for each in communicators}


def _ctas(communicator: Communicator, budgets: Mapping[int, int]) -> int:
    if communicator.use == "world":
        return WORLD_CTAS
    most = min(_MOST_CTAS, *(budgets[rank] for rank in communicator.ranks))
    return 1 << most.bit_length() - 1 if communicator.use == "link" else most


def ranks_at_risk(plan: Plan, num_sms: Mapping[int, int] | Sequence[int]) -> dict[int, int]:
    """Rank -> multiprocessors that its waiting kernels may hold, where they may hold all of them.

    No rank's do where this is empty, so that no two ranks can wait for each other's. Looks at
    lists only if all communicators of some rank together would fill its GPU; of plans with more
    ranks than `_MOST_RANKS_COUNTED` it does not, and takes them for waiting at once.
    """
    ctas = max_ctas(planned_communicators(plan), num_sms)
    held: Counter[int] = Counter()
    for communicator, number in ctas.items():
        for rank in communicator.ranks:
            held[rank] += number
    suspects = {rank: number for rank, number in held.items() if number >= num_sms[rank]}
    if suspects and plan.world_size <= _MOST_RANKS_COUNTED:
        suspects = most_held(plan, suspects, ctas)
    return {rank: n for rank, n in sorted(suspects.items()) if n >= num_sms[rank]}


def most_held(plan: Plan, ranks: Iterable[int], ctas: Mapping[Communicator, int]) -> dict[int, int]:
    """Rank -> the most multiprocessors that its waiting kernels hold, in training or evaluation."""
    links = {(c.ranks[0], c.ranks[1]): number for c, number in ctas.items() if c.use == "link"}
    others: Counter[int] = Counter()
    for each, number in ctas.items():
        if each.use != "link":
            for rank in each.ranks:
                others[rank] += number
    steps = [lower_plan(plan, forward_only=forward_only) for forward_only in (False, True)]
    return {
        rank: max(
            most_waiting(rank, step.ranks[rank], link_ctas=links, others=others[rank])
            for step in steps
        )
        for rank in ranks
    }


def deadlock_note(plan: Plan, num_sms: Mapping[int, int] | Sequence[int]) -> str | None:
    """Say so of a plan under which kernels that wait for other ranks may fill a GPU."""
    at_risk = ranks_at_risk(plan, num_sms)
    if not at_risk:
        return None
    worst = max(at_risk, key=lambda rank: at_risk[rank] / num_sms[rank])
    return (
        f"kernels of NCCL that wait for other ranks may fill the GPUs of {len(at_risk)} of "
        f"{plan.world_size} ranks, for example of rank {worst}, where they hold up to "
        f"{at_risk[worst]} multiprocessors of {num_sms[worst]}: ranks could wait for each other "
        "forever. Fewer replicas in neighbouring groups, or micro-batch sizes that divide each "
        "other, need fewer."
    )


def threads_note(plan: Plan, nodes: Sequence[str], cores: Mapping[str, int]) -> str | None:
    """Say so of a plan under which threads of NCCL may keep all cores of a node busy.

    A communicator between nodes has a thread that runs without a pause while an operation of it
    waits for its other ranks (NCCL's `ncclProxyProgress`). `nodes`: rank -> its node. `cores`: of
    each node.
    """
    needed = planned_communicators(plan)
    between = {c: int(len({nodes[rank] for rank in c.ranks}) > 1) for c in needed}
    threads = resident_kernels(c for c in needed if between[c])
    crowded = _more_than_cores(threads, nodes, cores)
    if crowded and plan.world_size <= _MOST_RANKS_COUNTED:
        ranks = [rank for rank, node in enumerate(nodes) if node in crowded]
        crowded = _more_than_cores(most_held(plan, ranks, between), nodes, cores)
    if not crowded:
        return None
    worst = max(crowded, key=lambda node: crowded[node] / cores[node])
    return (
        f"NCCL may keep {crowded[worst]} threads of node {worst} busy, which has {cores[worst]} "
        "cores: one for each connection of its ranks to other nodes that waits at the same time. "
        "Ranks may have to wait for a core. Fewer replicas in neighbouring groups, or micro-batch "
        "sizes that divide each other, need fewer."
    )


def _more_than_cores(
    threads: Mapping[int, int], nodes: Sequence[str], cores: Mapping[str, int]
) -> dict[str, int]:
    """Node -> its ranks' threads, where these are more than its cores."""
    of_node: Counter[str] = Counter()
    for rank, number in threads.items():
        of_node[nodes[rank]] += number
    return {node: number for node, number in of_node.items() if number > cores[node]}


def most_ctas(num_sms: int) -> int:
    """What all communicators of a GPU may use together, unless that is less than one each."""
    return int(_PART_FOR_COMMUNICATION * num_sms)


# How many of a rank's NCCL kernels can wait for other ranks at the same time.
#
# A kernel occupies multiprocessors from when it starts until all of its ranks have started theirs.
# It starts after a point of the rank's main stream, and the main stream waits for its end at a
# later one; both are positions of the list. While the main stream stands between two computations,
# only kernels whose span covers that place can be on the GPU, and of each communicator only one, as
# it runs them one after the other. So the most that any place has is a bound, whatever other ranks,
# the host and the hardware queues do: it takes no more of the others' lists than that they are
# there.
#
# A bound below a GPU's multiprocessors proves that a kernel always finds room, and that room is
# left for the computations that others wait for. `scripts.launch_order` compares it with what can
# happen.


Link = tuple[int, int]
"""(source rank, target rank)."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A message's kernel may wait while the main stream comes to the actions first .. last."""

    first: int
    last: int
    link: Link


def message_spans(rank: int, actions: Sequence[Action]) -> Iterator[Span]:
    """Yield when the kernels of a rank's messages may wait, in the order of its list."""
    posted_at, waited_at = receives_posted_at(actions), sends_waited_at(actions)
    consumers = {
        action.computation: at for at, action in enumerate(actions) if action.kind in COMPUTE
    }
    for at, action in enumerate(actions):
        if action.kind in SENDS:
            assert action.peer is not None
            yield Span(first=at, last=waited_at[at], link=(rank, action.peer))
        elif action.kind in RECEIVES:
            assert action.peer is not None
            consumer = consumers[action.computation]
            yield Span(first=posted_at[at], last=consumer, link=(action.peer, rank))


def most_waiting(
    rank: int,
    actions: Sequence[Action],
    *,
    link_ctas: Mapping[Link, int] | None = None,
    others: int = 2,
) -> int:
    """Return the most multiprocessors that a rank's waiting kernels can hold at once.

    `link_ctas`: those of each link's kernels; None: one each, so that kernels are counted.
    `others`: those of the group's communicator and the world's together, which count as if they
    always waited. O(actions x log actions).
    """
    changes: list[tuple[int, int, Link]] = []
    for span in message_spans(rank, actions):
        changes += [(span.first, 1, span.link), (span.last + 1, -1, span.link)]
    changes.sort(key=lambda change: change[:2])
    there: Counter[Link] = Counter()
    held = most = 0
    for _, change, link in changes:
        before = there[link] > 0
        there[link] += change
        own = 1 if link_ctas is None else link_ctas[link]
        held += own * ((there[link] > 0) - before)
        most = max(most, held)
    return most + others


# Which ranks of a plan send to which, and in which order their connections are made.
#
# A link is one direction between two ranks. `schedule.actions.edges_of` finds the same in lowered
# lists; this asks the plan alone, so that a plan's communicators can be priced without its lists.


def links_of(plan: Plan) -> tuple[Link, ...]:
    """Return all links of training, sorted: activations one way, their gradients the other."""
    boundaries = Boundaries(plan)
    found: set[Link] = set()
    for chunk, boundary in enumerate(boundaries.after_chunk):
        if boundary.is_local:
            continue
        here, there = (
            plan.groups[boundaries.groups[number]].replicas for number in (chunk, chunk + 1)
        )
        # Between two replicas all pieces have the same ends, unless ranks have samples of theirs.
        pieces = [piece for each in boundary.by_source.values() for piece in each]
        if not any(replica.expert_parallel for replica in (*here, *there)):
            pieces = list({(p.source.replica, p.target.replica): p for p in pieces}.values())
        for piece in pieces:
            ends = here[piece.source.replica], there[piece.target.replica]
            for message in rank_messages(piece, *ends):
                edge = message.source, message.target
                found |= {edge, edge[::-1]}
    return tuple(sorted(found))


def in_rounds(links: Iterable[Link]) -> list[Link]:
    """Return the links in an order in which ranks need not wait long for one another.

    Connecting blocks both ends. In the order of the result, cut into rounds in which no rank
    appears twice, all of a round can connect at once; each link is in the first round that has
    neither of its ranks, so there are fewer than twice as many rounds as links of the busiest rank.
    """
    rounds: list[list[Link]] = []
    busy: list[set[int]] = []
    for link in links:
        number = next((n for n, ranks in enumerate(busy) if ranks.isdisjoint(link)), len(busy))
        if number == len(busy):
            rounds.append([])
            busy.append(set())
        rounds[number].append(link)
        busy[number].update(link)
    return [link for each in rounds for link in each]
