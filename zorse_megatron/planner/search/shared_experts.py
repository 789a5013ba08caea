"""Plans in which ranks with samples of their own share the experts of each layer.

The search and its closed forms know experts that each rank has whole, or a tensor-parallel group
divides. Here such a plan, and stock's layouts with expert parallelism, are where a climb starts:
ranks of a group share experts or not, those of neighbouring groups in one node become one group,
with exchanges that overlap computation or do not, more or fewer experts and samples on each kind of
GPU, other numbers of micro-batches, other settings, and a layer more or less. All are simulated.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, pairwise, permutations

from zorse_megatron.plan.divided_replicas import replicas_that_share_experts
from zorse_megatron.plan.memory_settings import settings_in
from zorse_megatron.plan.plan import (
    Chunk,
    ExpertParallel,
    Group,
    Offload,
    Plan,
    Recompute,
    Replica,
    Schedule,
)
from zorse_megatron.planner.build_plan import sharing_experts, with_regions
from zorse_megatron.planner.evaluate import Evaluation, Evaluator
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.orders import with_times
from zorse_megatron.planner.outcome import OnProgress, SearchProgress, structure
from zorse_megatron.planner.search.effort import Effort
from zorse_megatron.planner.search.kept_state import with_state_kept, without_fractions
from zorse_megatron.planner.search.tensor_parallel_choices import rounded

_STARTS, _OF_BEST = 5, 2
"""Plans that are climbed from; first those of the best plan."""
_UNLIKE, _MOST_BEHIND = 8, 1.4
"""Plans of unlike groups in which ranks may share experts, none slower than the best by that."""
_OF_STARTS = 0.5
"""The part of what may be simulated that finds where to start."""
_OF_KEPT = 0.5
"""The part that finds plans that keep state."""
_LEAST_GAIN = 0.999
"""What a step must bring, in parts of the iteration."""
_MOST_SIMULATED = 240
_MOST_COMPUTATIONS = 400_000
"""Forwards and backwards of all simulations, of large plans fewer simulations."""
_PARTS = (0.25, 0.07, 0.0)
"""Of all experts, or samples of a micro-batch, that move to another kind of GPU; one at least."""

Parts = tuple[tuple[int, ...], ...]
"""Numbers of replicas of a group, each once."""
Change = Callable[[Replica], Replica | None]


def with_shared_experts(
    evaluator: Evaluator,
    best: Evaluation,
    others: Sequence[Evaluation],
    on_progress: OnProgress,
) -> Evaluation | None:
    """The fastest such plan that fits; None: there is none, or it is not faster.

    `others`: plans that fit, of which those that are such plans are climbed from, too.
    """
    climb = _Climb(evaluator, on_progress)
    first, *unlike = _unlike(best, others, climb.inputs.kinds)
    own = climb.starts(first)[:_OF_BEST]
    rest = [each for each in others if any(replicas_that_share_experts(each.plan))]
    for plan in unlike:
        rest += climb.starts(plan)[:1]
    starts = [*own, *sorted(rest, key=_seconds)][:_STARTS]
    ends = []
    for left, each in zip(range(len(starts), 0, -1), starts, strict=True):
        climb.limit = climb.spent + (1 - climb.spent) / left  # as much for each
        ends.append(climb.climbed(each))
    fastest = min(ends, key=_seconds, default=None)
    return fastest if fastest is not None and _seconds(fastest) < _seconds(best) else None


def with_state_kept_by_ranks_that_share(
    evaluator: Evaluator, best: Evaluation, on_progress: OnProgress
) -> Evaluation:
    """The plan, or a faster one near it: what is free has room for state (`kept_state`)."""
    kept = with_state_kept(evaluator, best)
    is_near = not best.is_extrapolated and any(replicas_that_share_experts(best.plan))
    if kept is best or not is_near:
        return kept
    climb = _Climb(evaluator, on_progress)
    climb.limit, climb.keeping_below_s = _OF_KEPT, kept.iteration_s
    return climb.climbed(kept)


def _unlike(best: Evaluation, others: Sequence[Evaluation], kinds: Sequence[str]) -> list[Plan]:
    """The best plan, and the fastest of other groups."""
    found: dict[object, Plan] = {}
    for each in (best, *others):
        if each.iteration_s < _MOST_BEHIND * best.iteration_s and not each.is_extrapolated:
            found.setdefault(structure(each.plan, kinds), each.plan)
    return [*found.values()][:_UNLIKE]


def _seconds(each: Evaluation) -> float:
    return each.iteration_s


class _Climb:
    def __init__(self, evaluator: Evaluator, on_progress: OnProgress) -> None:
        self.evaluator, self.tell = evaluator, on_progress
        self.inputs: Inputs = evaluator.inputs.members.base
        assert self.inputs.model.num_experts is not None, "of a model with experts"
        self.experts: int = self.inputs.model.num_experts
        self.space = evaluator.inputs.space
        self.simulated, self.computed = evaluator.num_simulated, evaluator.num_computations
        self.most = min(_MOST_COMPUTATIONS, Effort.of(self.inputs).climb)
        self.keeping_below_s = 0.0
        """Plans that are not much slower keep optimizer state where there is room for it."""
        self.limit = _OF_STARTS
        """Up to which part of what may be simulated it goes on."""

    def evaluated(self, plan: Plan) -> Evaluation | None:
        """What the simulator says of a plan that fits."""
        found = self.evaluator.evaluate_plan(self._ordered(without_fractions(plan)))
        fits = found is not None and found.fits
        if found is not None and fits and found.iteration_s < _MOST_BEHIND * self.keeping_below_s:
            found = with_state_kept(self.evaluator, found)
        self.tell(
            SearchProgress(
                phase="sharing experts",
                done=min(100, round(100 * self.spent)),
                total=100,
                best=found if fits else None,
            )
        )
        return found if fits else None

    @property
    def spent(self) -> float:
        """The part of what may be simulated."""
        evaluator = self.evaluator
        return max(
            (evaluator.num_simulated - self.simulated) / _MOST_SIMULATED,
            (evaluator.num_computations - self.computed) / self.most,
        )

    def _ordered(self, plan: Plan) -> Plan:
        """Its orders follow the times that it has now, if they follow any."""
        plan = with_regions(plan, self.inputs.spec)
        follows = any(each.compute_s for group in plan.groups for each in group.replicas)
        return with_times(self.inputs, plan) if follows else plan

    def climbed(self, here: Evaluation) -> Evaluation:
        """To the first faster plan that is near, and on."""
        while True:
            limit_s = _LEAST_GAIN * here.iteration_s
            tries = (self.evaluated(plan) for plan in self._near(here.plan))
            better = (each for each in tries if each is not None and each.iteration_s < limit_s)
            found = next(better, None)
            if found is None:
                return here
            here = found
            self.keeping_below_s = min(self.keeping_below_s, here.iteration_s)

    # Where it starts.

    def starts(self, plan: Plan) -> list[Evaluation]:
        """The plan with ranks that share experts, where that fits; fastest first."""
        near = (self.evaluated(each) for each in self.of_plan(plan) if self.spent < self.limit)
        return sorted((each for each in near if each is not None), key=_seconds)

    def of_plan(self, plan: Plan) -> Iterator[Plan]:
        """The plan with ranks that share experts: in all groups, and in those of the same GPUs."""
        whole = plan
        for numbers in self._alike(plan):
            partitions = list(self._partitions(plan.groups[numbers[0]]))
            for parts in partitions:
                if (found := self._at_all(plan, numbers, parts)) is not None:
                    yield found
            if partitions:
                whole = self._at_all(whole, numbers, partitions[0]) or whole
        yield whole
        yield from self._with_fewer_groups(plan, tuple(self._neighbours(plan)))

    def _alike(self, plan: Plan) -> list[list[int]]:
        """Numbers of groups of the same kinds of GPUs in the same replicas, together."""
        found: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for number, group in enumerate(plan.groups):
            kinds = tuple(self._kinds(replica.ranks) for replica in group.replicas)
            found.setdefault(kinds, []).append(number)
        return list(found.values())

    def _at_all(self, plan: Plan, numbers: Sequence[int], parts: Parts) -> Plan | None:
        """The plan whose groups have these replicas joined."""
        groups = [self._with_joined(plan.groups[number], parts) for number in numbers]
        return next(self._each_with(plan, numbers, groups), None)

    def _neighbours(self, plan: Plan) -> Iterator[tuple[int, int]]:
        """Groups of one replica each whose layers follow each other, and whose GPUs are in one
        node."""
        nodes = [{self.inputs.spec.node_of(rank) for rank in each.ranks} for each in plan.groups]
        taken: set[int] = set()
        for pair in pairwise(chunk.group for chunk in plan.chunks):
            have_one = all(
                len(plan.groups[at].replicas) == 1 and plan.groups[at].replicas[0].tp_degree == 1
                for at in pair
            )
            in_one_node = pair[0] != pair[1] and len(nodes[pair[0]] | nodes[pair[1]]) == 1
            if have_one and in_one_node and taken.isdisjoint(pair):
                taken.update(pair)
                yield pair

    def _with_fewer_groups(self, plan: Plan, pairs: Sequence[tuple[int, int]]) -> Iterator[Plan]:
        """The plan with each pair of groups as one, whose ranks share experts of all its layers."""
        groups, taken_by = [*plan.groups], {number: number for number in range(len(plan.groups))}
        for first, second in pairs:
            joined = self._as_one(groups[first], groups[second])
            if joined is None:
                return
            groups[first], taken_by[second] = joined, first
        order = dict.fromkeys(taken_by.values())
        numbers = {number: at for at, number in enumerate(order)}
        parts = [(numbers[taken_by[chunk.group]], chunk.layers) for chunk in plan.chunks]
        runs = [(number, [*run]) for number, run in groupby(parts, key=operator.itemgetter(0))]
        if pairs and len(runs) == len(order):
            yield replace(
                plan,
                groups=tuple(groups[number] for number in order),
                chunks=tuple(
                    Chunk(group=number, layers=(run[0][1][0], run[-1][1][1]))
                    for number, run in runs
                ),
                schedule=Schedule(name="1f1b"),
            )

    def _as_one(self, one: Group, other: Group) -> Group | None:
        """Both run all samples; together each rank runs a part of them."""
        members = [_with_own_settings(group, group.replicas[0]) for group in (one, other)]
        joined, total = self._joined(members), members[0].num_samples
        count = _count_near(total, joined.micro_batch_size)
        speeds = [self._speed(rank) for rank in joined.ranks]
        replica = self._dealt(joined, total, count, speeds)
        return None if replica is None else replace(_bare(one), replicas=(replica,))

    def _partitions(self, group: Group) -> Iterator[Parts]:
        """Which replicas of a group may share experts: all, those of a node, or pairs."""
        count = len(group.replicas)
        if count == 1 or any(len(each.ranks) > 1 for each in group.replicas):
            return
        nodes = [self.inputs.spec.node_of(each.ranks[0]) for each in group.replicas]
        by_node = tuple(
            tuple(at for at in range(count) if nodes[at] == node) for node in dict.fromkeys(nodes)
        )
        pairs = tuple(
            members[at : at + 2] for members in by_node for at in range(0, len(members), 2)
        )
        yield from dict.fromkeys((by_node, pairs, (tuple(range(count)),)))

    def _with_joined(self, group: Group, parts: Parts) -> Group | None:
        """The group with these of its replicas as one each."""
        if sum(map(len, parts)) != len(group.replicas):
            return None
        found = []
        for part in parts:
            members = [_with_own_settings(group, group.replicas[at]) for at in part]
            joined = members[0] if len(members) == 1 else self._sharing(members)
            if joined is None or any(len(each.ranks) > 1 for each in members):
                return None
            found.append(joined)
        return replace(_bare(group), replicas=tuple(found))

    def _sharing(self, members: Sequence[Replica]) -> Replica | None:
        """One replica of several, which runs all of their samples; None: there are none."""
        members = sorted(members, key=lambda each: each.ranks)
        total, joined = sum(each.num_samples for each in members), self._joined(members)
        if len({each.num_microbatches for each in members}) == 1:
            return joined if total else None
        size = sum(each.micro_batch_size for each in members if each.num_microbatches)
        count = _count_near(total, size)
        return self._dealt(joined, total, count, [each.num_samples for each in members])

    def _joined(self, replicas: Sequence[Replica]) -> Replica:
        """One replica of several."""
        working = [each for each in replicas if each.num_microbatches]
        speeds = [self._speed(rank) for rank in sorted(r for each in replicas for r in each.ranks)]
        return replace(
            sharing_experts(replicas, _deal(self.experts, speeds)),
            halved=None,
            region=None,
            max_in_flight=_sum([each.max_in_flight for each in working]),
            max_delayed_wgrad=_sum([each.max_delayed_wgrad for each in working]),
        )

    def _speed(self, rank: int) -> float:
        return (
            1 / self.inputs.compute.layer(self.inputs.kinds[rank], self.space.sample_block).both_s
        )

    def _dealt(
        self, replica: Replica, total: int, count: int, weights: Sequence[float]
    ) -> Replica | None:
        """The replica with so many samples in so many micro-batches, and each rank's part of them
        in proportion to weights."""
        shared = replica.expert_parallel
        assert shared is not None, "of ranks that share experts"
        block = self._block(shared)
        if count < 1 or total % (count * block):
            return None
        samples = tuple(block * each for each in _deal(total // count // block, weights))
        if self.space.max_micro_batch_size and max(samples) > self.space.max_micro_batch_size:
            return None
        return replace(
            replica,
            micro_batch_size=sum(samples),
            num_microbatches=count,
            expert_parallel=replace(shared, samples=samples),
        )

    def _block(self, shared: ExpertParallel) -> int:
        """What a rank's samples are multiples of, as each half's are of the space's."""
        return shared.parts * self.space.sample_block

    # Where it goes.

    def _near(self, plan: Plan) -> Iterator[Plan]:
        """Plans one step away, as long as they may be simulated."""
        for near in self._steps(plan):
            if self.spent >= self.limit:
                return
            yield near

    def _steps(self, plan: Plan) -> Iterator[Plan]:
        yield from self.of_plan(plan)
        for numbers in self._alike(plan):
            first = plan.groups[numbers[0]]
            for at, replica in enumerate(first.replicas):
                for change in self._changes(replica):
                    groups = [_changed(plan.groups[number], at, change) for number in numbers]
                    yield from self._each_with(plan, numbers, groups)
            if any(each.expert_parallel for each in first.replicas):
                for settings in self._settings_near(first):
                    changed = [_with_settings(plan.groups[at], **settings) for at in numbers]
                    yield from self._each_with(plan, numbers, changed)
                halves = [self._in_two(plan.groups[number]) for number in numbers]
                yield from self._each_with(plan, numbers, halves)
        yield from _layers_moved(plan)
        for pair in self._neighbours(plan):
            yield from self._with_fewer_groups(plan, (pair,))
        for numbers in self._alike(plan):
            for overlap, step in ((True, 0), (True, -1), (False, 0)):
                others = [self._with_overlap(plan.groups[at], overlap, step) for at in numbers]
                yield from self._each_with(plan, numbers, others)

    @staticmethod
    def _each_with(
        plan: Plan, numbers: Sequence[int], groups: Sequence[Group | None]
    ) -> Iterator[Plan]:
        if None in groups:
            return
        changed = dict(zip(numbers, groups, strict=True))
        yield replace(
            plan, groups=tuple(changed.get(at) or each for at, each in enumerate(plan.groups))
        )

    def _with_overlap(self, group: Group, overlap: bool, step: int) -> Group | None:
        """The group whose exchanges overlap computation, or do not; None: they are so, or cannot.

        `step`: to another number of micro-batches, of which there may be more samples then.
        """
        replicas = [_overlapping(each, overlap) for each in group.replicas]
        if tuple(replicas) == group.replicas or (overlap and not self.space.may_overlap):
            return None
        found = []
        for each in replicas:
            changes = each.expert_parallel is not None and each.num_samples
            other = self._with_count(each, step=step) if changes else each
            if other is None:
                return None
            found.append(other)
        return replace(group, replicas=tuple(found))

    def _changes(self, replica: Replica) -> Iterator[Change]:
        """Other numbers of micro-batches, and other parts of experts and of samples."""
        shared = replica.expert_parallel
        if shared is None:
            return
        yield from (partial(self._with_count, step=step) for step in (-1, 1))
        block = self._block(shared)
        for kinds in permutations(dict.fromkeys(self._kinds(replica.ranks)), 2):
            for part in _PARTS:
                experts = max(1, int(part * self.experts))
                yield partial(self._with_moved, kinds=kinds, experts=experts)
                samples = block * max(1, int(part * replica.micro_batch_size / block))
                yield partial(self._with_moved, kinds=kinds, samples=samples)

    def _with_count(self, replica: Replica, *, step: int) -> Replica | None:
        shared, total = replica.expert_parallel, replica.num_samples
        counts = _divisors(total)
        if not total:
            return None
        at = counts.index(replica.num_microbatches) + step
        assert shared is not None
        if not 0 <= at < len(counts):
            return None
        return self._dealt(replica, total, counts[at], shared.samples)

    def _with_moved(
        self, replica: Replica, *, kinds: tuple[str, str], experts: int = 0, samples: int = 0
    ) -> Replica | None:
        """With so many experts and samples less on GPUs of the first kind, and more on the other.

        Of one kind the ranks that have most give first, and those that have least get first.
        """
        shared, of_ranks = replica.expert_parallel, self._kinds(replica.ranks)
        assert shared is not None, "of ranks that share experts"
        found = {"experts": [*shared.experts], "samples": [*shared.samples]}
        for name, moved in (("experts", experts), ("samples", samples)):
            counts, step = found[name], 1 if name == "experts" else self._block(shared)
            for _ in range(moved // step):
                givers, takers = (
                    [at for at, each in enumerate(of_ranks) if each == kind] for kind in kinds
                )
                giver = max(givers, key=lambda at: (counts[at], -at))
                if counts[giver] < step:
                    return None
                taker = min(takers, key=lambda at: (counts[at], at))
                counts[giver] -= step
                counts[taker] += step
        most = self.space.max_micro_batch_size
        if most and max(found["samples"]) > most:
            return None
        shared = replace(shared, experts=tuple(found["experts"]), samples=tuple(found["samples"]))
        return replace(replica, expert_parallel=shared)

    def _kinds(self, ranks: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.inputs.kinds[rank] for rank in ranks)

    def _settings_near(self, group: Group) -> Iterator[dict[str, object]]:
        settings = settings_in(group, group.replicas[0])
        for mode in self.space.recompute:
            recompute = None if mode == "none" else Recompute(mode=mode)  # type: ignore[arg-type]
            if recompute != settings.recompute:
                yield {"recompute": recompute}
        if self.space.offload:
            state = not settings.offload.optimizer_state
            yield {"offload": Offload(optimizer_state=True) if state else None}

    def _in_two(self, group: Group) -> Group | None:
        """Half of the ranks each share experts, with half of the samples."""
        whole, *others = group.replicas
        shared, half = whole.expert_parallel, len(whole.ranks) // 2
        if shared is None or others or len(whole.ranks) % 2 or half < 2:
            return None
        parts = []
        for part in (slice(half), slice(half, None)):
            ranks, samples = whole.ranks[part], shared.samples[part]
            if not sum(samples):
                return None
            experts = _deal(self.experts, [self._speed(rank) for rank in ranks])
            parts.append(
                replace(
                    whole,
                    ranks=ranks,
                    micro_batch_size=sum(samples),
                    shard_weight=whole.shard_weight / 2,
                    max_in_flight=whole.max_in_flight and -(-whole.max_in_flight // 2),
                    max_delayed_wgrad=whole.max_delayed_wgrad and whole.max_delayed_wgrad // 2,
                    expert_parallel=ExpertParallel(
                        experts=experts, samples=samples, overlap=shared.overlap
                    ),
                )
            )
        return replace(group, replicas=tuple(parts))


def _changed(group: Group, at: int, change: Change) -> Group | None:
    """The group with a change of one of its replicas that share experts."""
    replica = group.replicas[at]
    other = None if replica.expert_parallel is None else change(replica)
    if other is None:
        return None
    return replace(group, replicas=(*group.replicas[:at], other, *group.replicas[at + 1 :]))


def _deal(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to weights."""
    return rounded([total * each / sum(weights) for each in weights], total)


def _sum(limits: Sequence[int | None]) -> int | None:
    known = [each for each in limits if each is not None]
    return sum(known) if known and len(known) == len(limits) else None


def _count_near(total: int, size: int) -> int:
    """How many micro-batches of about `size` samples `total` are."""
    return min(_divisors(total), key=lambda each: (abs(each * size - total), each))


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _bare(group: Group) -> Group:
    """Without what its replicas say for themselves, and what sharing excludes."""
    return replace(group, recompute=None, offload=None, hierarchical=None, grad_reduce_dtype=None)


def _with_own_settings(group: Group, replica: Replica) -> Replica:
    """What is packed (`adapter.data_parallel.mixed_tp_shards`) never waits in the host."""
    settings = settings_in(group, replica)
    offload = replace(settings.offload, parameters=False, gradients=False)
    return replace(
        replica,
        recompute=settings.recompute,
        offload=None if offload == Offload() else offload,
    )


def _with_settings(group: Group, **settings: object) -> Group:
    """What its replicas say for themselves goes."""
    bare = dict.fromkeys(settings)
    replicas = tuple(replace(each, **bare) for each in group.replicas)  # type: ignore[arg-type]
    recompute = settings.get("recompute")
    if isinstance(recompute, Recompute) and recompute.mode == "full":  # runs no halves
        replicas = tuple(_overlapping(each, False) for each in replicas)
    return replace(group, replicas=replicas, **settings)  # type: ignore[arg-type]


def _overlapping(replica: Replica, overlap: bool) -> Replica:
    """The same where no experts are shared."""
    shared = replica.expert_parallel
    if shared is None:
        return replica
    return replace(replica, expert_parallel=replace(shared, overlap=overlap))


def _layers_moved(plan: Plan) -> Iterator[Plan]:
    """One layer from a chunk to another, neighbours first; those between move on by one."""
    counts, numbers = [chunk.num_layers for chunk in plan.chunks], range(len(plan.chunks))
    for source, target in sorted(permutations(numbers, 2), key=lambda pair: abs(pair[0] - pair[1])):
        if counts[source] > 1:
            moved = [count + (at == target) - (at == source) for at, count in enumerate(counts)]
            seams = [*accumulate(moved, initial=0)]
            yield replace(
                plan,
                chunks=tuple(
                    replace(chunk, layers=layers)
                    for chunk, layers in zip(plan.chunks, pairwise(seams), strict=True)
                ),
            )
