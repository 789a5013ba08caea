"""Options that perturb the simulated or emulated machines, or routing: parsed and validated."""

import difflib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Annotated

import typer

from zorse_megatron.cli.console import refusal, refuse
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import Problem

if TYPE_CHECKING:
    from zorse_megatron.costs.interface import CommCost
    from zorse_megatron.costs.shared_experts import ExpertLoad
    from zorse_megatron.inputs.model import Experts
    from zorse_megatron.simulate.assumptions import Perturbation


_NAMED_LINKS = 6  # how many valid names an error lists
_LARGEST_FACTOR = 1e6
_SLOW = re.compile(r"(.+)=([^=@]+)(?:@([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?)?")


@dataclass(frozen=True, kw_only=True)
class SlowMachines:
    """How GPUs and links are perturbed."""

    jitter: Annotated[
        float,
        typer.Option(help="Vary compute times at random: relative standard deviation, e.g. 0.05."),
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Seed for --jitter.")] = 0
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FACTOR",
            help="Slow a rank (3=1.5), all GPUs of a kind (T4=1.5) or a link (new/nic0:out=4: the "
            "outgoing side of node new's first NIC) down by FACTOR; repeatable. An unknown name "
            "lists valid ones. Where a run is emulated, 3=1.5@31-90 is rank 3 in iterations 31 to "
            "90 only; without -90, to the end.",
        ),
    ] = None

    @property
    def is_slow(self) -> bool:
        """Whether anything is."""
        return bool(self.jitter or self.slow)

    def perturbation(self, costs: WorkloadCosts, *, may_end: bool = True) -> "Perturbation":
        """Parse the options. Raises CommandError with everything that is wrong with them.

        `may_end`: whether a rank may be slow in some iterations only. A link that takes n times as
        long has 1/n of its bandwidth.
        """
        from zorse_megatron.simulate.assumptions import Perturbation, SlowSpell

        told = [(text, _Slow.of(text)) for text in self.slow or ()]
        found = [each for _, each in told if each is not None]
        kinds, world_size = costs.cluster.kinds, costs.cluster.world_size
        ranks = {str(rank): rank for rank in range(world_size)}
        has_links = not {each.name for each in found} <= ranks.keys() | kinds.keys()
        links = link_names(costs.inputs.comm, world_size) if has_links else ()
        problems = [*self._jitter_problems(), *_named_twice(found)]
        problems += _problems(told, ranks, kinds, links, may_end=may_end)
        refuse(problems)
        always = {each.name: each.factor for each in found if each.first is None}
        return Perturbation(
            jitter=self.jitter,
            seed=self.seed,
            rank_factors={rank: always[name] for name, rank in ranks.items() if name in always},
            kind_factors={name: always[name] for name in kinds if name in always},
            link_factors={name: 1 / always[name] for name in links if name in always},
            spells=tuple(
                SlowSpell(
                    rank=ranks[each.name],
                    factor=each.factor,
                    first_iteration=each.first,
                    last_iteration=each.last,
                )
                for each in found
                if each.first is not None
            ),
        )

    def _jitter_problems(self) -> Iterator[Problem]:
        if not 0 <= self.jitter <= 10:  # NaN is neither
            yield Problem(
                where="--jitter",
                found=f"{self.jitter}",
                expected="a number from 0 to 10",
                remedy="0.05 varies compute times by about 5 %.",
            )


@dataclass(frozen=True, kw_only=True)
class _Slow:
    """`NAME=FACTOR[@FIRST[-LAST]]`."""

    name: str
    factor: float
    first: int | None
    """Iteration, counted from 1; None: slow all the time."""
    last: int | None
    """None: it stays slow."""

    @classmethod
    def of(cls, text: str) -> "_Slow | None":
        """None: it is something else."""
        if (match := _SLOW.fullmatch(text)) is None:
            return None
        first, last = (int(each) if each else None for each in match.groups()[2:])
        try:
            factor = float(match[2])
        except ValueError:
            return None
        is_spell = first is None or last is None or first <= last
        if not is_spell or not 0 < factor <= _LARGEST_FACTOR:  # NaN is neither
            return None
        return cls(name=match[1], factor=factor, first=first, last=last)


def _named_twice(found: list[_Slow]) -> Iterator[Problem]:
    counts = Counter(each.name for each in found if each.first is None)
    for name, count in counts.items():
        if count > 1:
            yield Problem(
                where="--slow",
                found=f'"{name}" {count} times',
                expected="one factor for each",
                remedy="Leave out all but one.",
            )


def _problems(
    told: Iterable[tuple[str, _Slow | None]],
    ranks: Collection[str],
    kinds: Collection[str],
    links: Collection[str],
    *,
    may_end: bool,
) -> Iterator[Problem]:
    """Yield texts that are no factor, unknown names, and iterations where there are none."""
    for text, each in dict(told).items():
        if each is None:
            expected = "NAME=FACTOR with a factor above 0"
            remedy = "For example, with --slow 3=1.3 rank 3 is 30 % slower."
        elif each.name not in (*ranks, *kinds, *links):
            # The closest names first.
            some = difflib.get_close_matches(each.name, links, n=_NAMED_LINKS, cutoff=0.0)
            expected = (
                f"a rank from 0 to {len(ranks) - 1}, one of the kinds {', '.join(kinds)}, or one "
                f"of the {len(links)} links between GPUs, such as {', '.join(some)}"
            )
            remedy = "Link names are built from the node and switch names in the cluster file."
        elif each.first is not None and not (may_end and each.name in ranks):
            expected = "iterations of a rank only, and where several are emulated"
            remedy = "Leave them out, from @ on."
        else:
            continue
        yield Problem(where="--slow", found=f'"{text}"', expected=expected, remedy=remedy)


ExpertLoadText = Annotated[
    str | None,
    typer.Option(
        "--expert-load",
        metavar="LOAD",
        help="How uneven routing is: the busiest expert's tokens over the mean, as 2.5, or what "
        "each expert of a layer gets in any unit, as 910,233,...",
    ),
]


def with_expert_load(costs: WorkloadCosts, text: str, *, may_be_list: bool = True) -> WorkloadCosts:
    """The same where routing is as uneven as the option says. Raises CommandError.

    `may_be_list`: whether it may say what each expert gets. A plan is found for any order of them.
    """
    from zorse_megatron.planner.inputs.search_inputs import with_load

    experts = costs.workload.model.experts
    if experts is None:
        raise refusal(
            "--expert-load",
            f"{text}, for a model without experts",
            "a model with experts",
            "Leave it out.",
        )
    load = _expert_load(text, experts)
    if not (load.anywhere or may_be_list):
        raise refusal(
            "--expert-load",
            "what each expert gets",
            "the busiest expert's tokens over the mean, as 2.5",
            "Each layer has other busy experts; zorse explain tells what a plan takes with these.",
        )
    note = f"all times and memory are for routing as uneven as --expert-load {text} says"
    return replace(
        costs,
        notes=(*costs.notes, note),
        to_do=(*costs.to_do, note),
        inputs=with_load(costs.inputs, load),
        inputs_for=lambda model, batch: with_load(costs.inputs_for(model, batch), load),
    )


def _expert_load(text: str, experts: "Experts") -> "ExpertLoad":
    from zorse_megatron.costs.shared_experts import ExpertLoad

    number, most = experts.num_experts, experts.num_experts / experts.per_token
    try:
        loads = [float(each) for each in text.split(",")]
        total = math.fsum(loads)
    except (ValueError, OverflowError):  # of the sum
        loads, total = [], 0.0
    busiest = loads[0] if len(loads) == 1 else max(loads, default=0) * number / (total or math.inf)
    is_list = len(loads) == number and min(loads) >= 0
    if not (len(loads) == 1 or is_list) or not 1 - 1e-9 <= busiest <= most * (1 + 1e-9):
        raise refusal(
            "--expert-load",
            f'"{text}"',
            f"a number from 1 to {most:g}, or {number} loads of which none is negative or above "
            f"1/{experts.per_token} of their sum",
            f"Each token passes {experts.per_token} of {number} experts, so that none can have "
            f"more than {most:g} times the mean.",
        )
    if len(loads) == 1:
        return ExpertLoad.falling(busiest, number)
    return ExpertLoad(shares=tuple(load / total for load in loads))


def link_names(comm: "CommCost", world_size: int) -> tuple[str, ...]:
    """Names of the links between any two GPUs: slow if there are many GPUs."""
    pairs = permutations(range(world_size), 2)
    return tuple(dict.fromkeys(name for pair in pairs for name, _ in comm.shared_links(*pair)))
