"""Why nothing fits: the least memory that is missing, and what would fit."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from zorse_megatron.errors import Problem
from zorse_megatron.files.wording import number_of
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.planner.closed_form.candidate import Candidate, Estimate
from zorse_megatron.planner.closed_form.estimator import Estimator
from zorse_megatron.planner.evaluate import Evaluation, Evaluator
from zorse_megatron.planner.groupings.pools import Grouping
from zorse_megatron.planner.groupings.proposals import propose_groupings
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.planner.outcome import NoPlanError
from zorse_megatron.planner.simulate_plan import host_needs, host_problems, host_sentences
from zorse_megatron.simulate.memory_ledger import Category

_GROUPINGS = 10
_EVERY_LAYER = 10**9
_CHUNKS = {"1f1b": (1,), "interleaved": (1,), "breadth_first": (1, 4, 16, 64, _EVERY_LAYER)}
_STEP = 2**20
_MOST_BYTES = 2**45
_ROUNDS_OF_CHECKS = 12
_GIB = 2**30

GroupingSchedule = tuple[Grouping, str, int]
"""Groups, schedule, chunks of each group."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """So much more memory on every GPU of these kinds, and there is a plan."""

    kinds: tuple[str, ...]
    bytes_per_gpu: int
    num_gpus: int
    evaluation: Evaluation
    """On the plan that then fits."""

    @property
    def total_bytes(self) -> int:
        """Bytes missing on all GPUs together."""
        return self.bytes_per_gpu * self.num_gpus


def no_plan(inputs: Inputs) -> NoPlanError:
    """The error for a search that found nothing, with the smallest missing amount.

    Host memory comes first: where a plan fits in the GPUs if only the hosts were larger.
    """
    ways = _ways(inputs)
    host = list(_host_problems(inputs, ways))
    if host:
        return NoPlanError("no plan fits in host memory", host)
    counts = Counter(inputs.kinds)
    choices: list[tuple[str, ...]] = [(kind,) for kind in counts]
    if len(counts) > 1:
        choices.insert(0, tuple(counts))
    least: Shortage | None = None
    for kinds in choices:
        number = sum(counts[kind] for kind in kinds)
        most = _MOST_BYTES if least is None else least.total_bytes // number
        found = _shortage(inputs, kinds, ways, number=number, most=most)
        if found is not None and (least is None or found.total_bytes < least.total_bytes):
            least = found
    if least is None:
        return _more_than_memory(inputs)
    problems = [_problem(inputs, least), _totals(inputs, least.evaluation)]
    error = NoPlanError("no plan fits in memory", problems)
    error.missing_bytes = least.total_bytes
    error.bytes_per_gpu = least.bytes_per_gpu
    error.gpu_kinds = least.kinds
    return error


def gib_missing(num_bytes: int) -> str:
    """A missing amount for people: rounded up, so that it is enough.

    >>> gib_missing(2**30), gib_missing(2**30 + 1)
    ('1.00 GiB', '1.01 GiB')
    """
    return f"{math.ceil(100 * num_bytes / _GIB) / 100:.2f} GiB"


def fitting(inputs: Inputs) -> Evaluation | None:
    """A plan that the simulator says fits, the first that is found; None: none was found."""
    return _fitted(inputs, _ways(inputs))


def _problem(inputs: Inputs, least: Shortage) -> Problem:
    ranks = [rank for rank, kind in enumerate(inputs.kinds) if kind in least.kinds]
    capacity = min(inputs.capacities_bytes[rank] for rank in ranks)
    plan = least.evaluation.plan
    groups = ", ".join(
        f"{plan.num_layers_of_group(number)} layers on "
        f"{len(group.ranks)} GPU{'s' * (len(group.ranks) != 1)}"
        for number, group in enumerate(plan.groups)
    )
    more = (
        ""
        if inputs.space.recompute == ("none", "selective", "full")
        else (" Recomputation would need less, but the search space does not have all of it.")
    )
    return Problem(
        where=f"GPU memory of {', '.join(least.kinds)} ({len(ranks)} GPUs, first rank {ranks[0]})",
        found=f"{capacity / _GIB:.2f} GiB usable, after a margin of "
        f"{100 * inputs.memory_margin:.3g} %",
        expected=f"{gib_missing(least.bytes_per_gpu)} more on each, "
        f"{gib_missing(least.total_bytes)} in total, for {groups} to fit",
        remedy="Use more or larger GPUs, drop GPUs that are too small for one layer, use a smaller "
        f"model or a shorter sequence, or lower the margin.{more}",
    )


def _totals(inputs: Inputs, evaluation: Evaluation) -> Problem:
    """All that is needed against all that there is, by category at the ranks' peaks."""
    assert evaluation.result is not None, "it was simulated just now"
    total: Counter[Category] = Counter()
    for peak in evaluation.result.memory:
        total.update(peak.at_peak_bytes)
    needs = host_needs(inputs, evaluation.result)
    parts = [(each.label, count) for each, count in total.most_common() if count]
    listed = ", ".join(f"{label} {count / _GIB:.1f}" for label, count in parts)
    return Problem(
        where=f"memory of all {inputs.world_size} GPUs together",
        found=f"{sum(inputs.capacities_bytes) / _GIB:.1f} GiB",
        expected=f"{total.total() / _GIB:.1f} GiB for that plan: {listed}",
        remedy=f"Most of it is {parts[0][0]}. {' '.join(host_sentences(needs))}",
    )


def _host_problems(inputs: Inputs, ways: Sequence[GroupingSchedule]) -> Iterator[Problem]:
    """Nodes with too little host memory; none where more of it would not help."""
    if all(host is None for host in inputs.host_bytes) or not inputs.space.offload:
        return
    unlimited = replace(inputs, host_bytes=(None,) * inputs.world_size)
    evaluation = _fitted(unlimited, ways)
    if evaluation is None or evaluation.result is None:
        return
    needs = host_needs(inputs, evaluation.result)
    yield from host_problems(needs, "as the GPUs alone have too little memory")


def _more_than_memory(inputs: Inputs) -> NoPlanError:
    return NoPlanError(
        "no plan",
        [
            Problem(
                where="search space",
                found=f"schedules {', '.join(inputs.space.schedules)} and at most "
                f"{inputs.space.max_groups or inputs.num_layers} groups",
                expected="a space with at least one plan, whatever the memory",
                remedy="Allow more schedules or more groups.",
            )
        ],
    )


def _shortage(
    inputs: Inputs,
    kinds: tuple[str, ...],
    ways: Sequence[GroupingSchedule],
    *,
    number: int,
    most: int,
) -> Shortage | None:
    """The least extra memory on every GPU of these kinds, below `most`; None where none helps.

    A way is looked at closer only if it fits with less than the best one so far.
    """
    asked = _Asked(inputs, kinds)
    best, way = most, None
    for each in ways:
        if best > _STEP and asked.estimate(best - _STEP, each) is not None:
            best, way = asked.least(each, best - _STEP), each
    if way is None:
        return None
    checked = _checked(inputs, kinds, best, way)
    if checked is None:
        return None
    return Shortage(kinds=kinds, bytes_per_gpu=checked[0], num_gpus=number, evaluation=checked[1])


class _Asked:
    """What fits in closed form with so much more memory on GPUs of these kinds."""

    def __init__(self, inputs: Inputs, kinds: tuple[str, ...]) -> None:
        self.inputs = inputs
        self.kinds = kinds
        self._with: dict[int, Estimator] = {}

    def estimate(self, extra: int, way: GroupingSchedule) -> Estimate | None:
        """None where this way does not fit."""
        if extra not in self._with:
            self._with[extra] = Estimator(_more(self.inputs, self.kinds, extra))
        return _estimate(self._with[extra], way)

    def least(self, way: GroupingSchedule, enough: int) -> int:
        """By bisection, to a MiB or a hundredth; `enough` fits."""
        low, high = 0, 64 * _STEP
        while high < enough and self.estimate(high, way) is None:
            low, high = high, 2 * high
        high = min(high, enough)
        while high - low > max(_STEP, high // 100):
            middle = (low + high) // 2
            if self.estimate(middle, way) is None:
                low = middle
            else:
                high = middle
        return high


def _ways(inputs: Inputs) -> list[GroupingSchedule]:
    most = min(inputs.space.max_groups or inputs.num_layers, inputs.num_layers)
    groupings = [
        each.grouping for each in propose_groupings(inputs.spec, max_groups=most, limit=_GROUPINGS)
    ]
    # Breadth first takes least memory; with one chunk a group, interleaved takes more than 1f1b.
    schedules = [each for each in ("breadth_first", "1f1b") if each in inputs.space.schedules]
    return [
        (grouping, schedule, chunks)
        for schedule in schedules or inputs.space.schedules
        for chunks in _CHUNKS[schedule][::-1]
        for grouping in groupings
    ]


def _more(inputs: Inputs, kinds: tuple[str, ...], extra: int) -> Inputs:
    capacities = tuple(
        capacity + (extra if kind in kinds else 0)
        for capacity, kind in zip(inputs.capacities_bytes, inputs.kinds, strict=True)
    )
    return replace(inputs, capacities_bytes=capacities)


def _estimate(estimator: Estimator, way: GroupingSchedule) -> Estimate | None:
    (grouping, schedule, chunks), inputs = way, estimator.inputs
    members = tuple(estimator.device_groups.of(group) for group in grouping)
    candidate = Candidate(
        device_groups=members,
        levels=(inputs.space.sample_block,) * len(members),
        schedule=schedule,
        num_chunks=min(chunks, inputs.num_layers),
    )
    return next(iter(estimator.best(candidate)), None)


def _fitted(inputs: Inputs, ways: Sequence[GroupingSchedule]) -> Evaluation | None:
    """The first way that fits in closed form and, perhaps with some memory kept free, for true."""
    evaluator = Evaluator(inputs)
    estimator, tried = evaluator.estimator, 0
    for way in ways:
        estimate = _estimate(estimator, way)
        if estimate is None:
            continue
        evaluation = evaluator.evaluate(estimate)
        if evaluation is not None and evaluation.fits:
            return evaluation
        tried += 1
        if evaluation is not None:
            reserves = tuple(max(0, over) + _STEP for over in evaluation.overflow_bytes)
            again = estimator.estimate(
                replace(estimate.candidate, reserves=reserves), estimate.layers
            )
            evaluation = evaluator.evaluate(again) if again is not None else None
            if evaluation is not None and evaluation.fits:
                return evaluation
        if tried == _ROUNDS_OF_CHECKS:
            return None
    return None


def _checked(
    inputs: Inputs, kinds: tuple[str, ...], extra: int, way: GroupingSchedule
) -> tuple[int, Evaluation] | None:
    """Ask the simulator, and add what it finds missing."""
    for _ in range(_ROUNDS_OF_CHECKS):
        evaluator = Evaluator(_more(inputs, kinds, extra))
        estimate = _estimate(evaluator.estimator, way)
        if estimate is not None:
            evaluation = evaluator.evaluate(estimate)
            if evaluation is not None and evaluation.fits:
                return extra, evaluation
            if evaluation is not None:
                extra += max(0, *evaluation.overflow_bytes)
        extra += _STEP
    return None


# The longest sequence, most layers and largest batch that fit when the request does not.


MakeInputs = Callable[[ModelShape, int], Inputs]
"""Inputs for a model and a global batch on the same cluster."""

_STEPS = 6  # of each bisection: a sequence to a 64th of what was asked for


@dataclass(frozen=True, kw_only=True)
class WhatFits:
    """Each alone, the rest as it was asked for; None where not even the least that was tried fits.

    `reasons` says of those why.
    """

    sequence_length: int | None
    num_layers: int | None
    global_batch_size: int | None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """One quantity: what of it was asked for, and how to describe so many of it."""

    asked: int
    make: Callable[[int], Inputs]
    describe: Callable[[int], str]

    @property
    def step(self) -> int:
        """It is tried in multiples of this, the least of which comes first."""
        return max(1, self.asked >> _STEPS)

    def largest(self) -> int | None:
        """The largest below what was asked for that fits; None if even the least does not."""
        low, high = 0, -(-self.asked // self.step)  # in steps; the upper one does not fit
        while high - low > 1:
            middle = (low + high) // 2
            if fitting(self.make(middle * self.step)) is not None:
                low = middle
            else:
                high = middle
        return low * self.step or None

    def reason(self) -> str:
        """Why not even the least fits."""
        if self.asked <= self.step:
            return f"{self.describe(self.asked)} is the least there is"
        missing = no_plan(self.make(self.step))
        if missing.bytes_per_gpu:
            kinds = " and ".join(missing.gpu_kinds)
            lacks = f"{gib_missing(missing.bytes_per_gpu)} more is needed on each {kinds}"
        else:
            first = missing.problems[0]
            lacks = f"{first.where}: {first.found}; needed is {first.expected}"
        return f"not even {self.describe(self.step)} fits: {lacks}"


def what_fits(make: MakeInputs, model: ModelShape, batch: int) -> WhatFits:
    """Find each by bisection; of each a simulated plan has fitted, and slightly more may, too."""
    tried = (
        _Tried(
            asked=model.seq_length,
            make=lambda length: make(_with_length(model, length), batch),
            describe=lambda length: f"a sequence of {number_of(length, 'token')}",
        ),
        _Tried(
            asked=model.num_layers,
            make=lambda layers: make(replace(model, num_layers=layers), batch),
            describe=lambda layers: f"a model of {number_of(layers, 'layer')}",
        ),
        _Tried(
            asked=batch,
            make=lambda size: make(model, size),
            describe=lambda size: f"a batch of {size}",
        ),
    )
    length, layers, size = found = [each.largest() for each in tried]
    return WhatFits(
        sequence_length=length,
        num_layers=layers,
        global_batch_size=size,
        reasons=tuple(
            each.reason() for each, fits in zip(tried, found, strict=True) if fits is None
        ),
    )


def fits_problem(found: WhatFits, model: ModelShape, batch: int) -> Problem:
    """Tell it beside the reasons of a misfit."""
    said = [
        f"{words} of at most {number}{unit}"
        for words, number, unit in (
            ("sequences", found.sequence_length, " tokens"),
            ("models", found.num_layers, " layers"),
            ("batches", found.global_batch_size, ""),
        )
        if number
    ]
    one = "Each alone, the rest as it is. Simulated plans fit with these; a little more may."
    none = "Neither a shorter sequence, fewer layers nor a smaller batch alone makes a plan fit."
    why = "".join(f" {reason[0].upper()}{reason[1:]}." for reason in found.reasons)
    return Problem(
        where="what would fit",
        found=f"{model.num_layers} layers, sequences of {model.seq_length} tokens and batches of "
        f"{batch}",
        expected=", or ".join(said) if said else "larger GPUs, more of them or another model",
        remedy=(one if said else none) + why,
    )


def not_looked_for(found: str, expected: str) -> Problem:
    """Say that nothing smaller was tried, and why."""
    return Problem(
        where="what would fit",
        found=found,
        expected=expected,
        remedy="Shorter sequences, fewer layers and smaller batches were not tried: ask for one.",
    )


def _with_length(model: ModelShape, length: int) -> ModelShape:
    """Learned positions stay: a table that is too long does no harm."""
    return replace(model, seq_length=length)
