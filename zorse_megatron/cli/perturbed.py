"""Options that perturb the simulated or emulated machines: parsed and validated."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Annotated

import typer

from zorse_megatron.cli.console import CommandError
from zorse_megatron.cli.options import factor_problems, factors
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import Problem
from zorse_megatron.inputs.cluster import Cluster

if TYPE_CHECKING:
    from zorse_megatron.costs.interface import CommCost
    from zorse_megatron.simulate.assumptions import Perturbation, SlowSpell


_NAMED_LINKS = 6  # how many valid names an error lists


@dataclass(frozen=True, kw_only=True)
class SlowGpus:
    """How GPUs are perturbed."""

    jitter: Annotated[
        float,
        typer.Option(help="Vary compute times at random: relative standard deviation, e.g. 0.05."),
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Seed for --jitter.")] = 0
    slow_rank: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RANK=FACTOR", help="Slow a rank's computations down by FACTOR; repeatable."
        ),
    ] = None
    slow_kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=FACTOR", help="Slow all GPUs of a kind down by FACTOR; repeatable."
        ),
    ] = None

    def perturbation(self, costs: WorkloadCosts) -> "Perturbation":
        """Parse the options. Raises CommandError with everything that is wrong with them."""
        return perturbation_of(costs, self)


@dataclass(frozen=True, kw_only=True)
class SlowMachines(SlowGpus):
    """How GPUs and links are perturbed."""

    slow_link: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINK=FACTOR",
            help="Divide a link's bandwidth by FACTOR; repeatable. new/nic0:out is the outgoing "
            "side of node new's first NIC; an unknown name lists valid ones.",
        ),
    ] = None

    @property
    def is_slow(self) -> bool:
        """Whether anything is."""
        return bool(self.jitter or self.slow_rank or self.slow_kind or self.slow_link)

    def perturbation(self, costs: WorkloadCosts) -> "Perturbation":
        """The same."""
        return perturbation_of(costs, self, self.slow_link or ())


@dataclass(frozen=True, kw_only=True)
class SlowIterations(SlowMachines):
    """The same over several iterations: a rank may be slow in some of them."""

    slow_rank: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RANK=FACTOR[@FIRST[-LAST]]",
            help="Slow a rank's computations down by FACTOR, in these iterations or all; "
            "repeatable.",
        ),
    ] = None


def link_names(comm: "CommCost", world_size: int) -> tuple[str, ...]:
    """Names of the links between any two GPUs."""
    pairs = permutations(range(world_size), 2)
    return tuple(dict.fromkeys(name for pair in pairs for name, _ in comm.shared_links(*pair)))


def perturbation_of(
    costs: WorkloadCosts, options: SlowGpus, slow_link: Sequence[str] = ()
) -> "Perturbation":
    """Parse the options. Raises CommandError with everything that is wrong with them.

    A link that takes n times as long has 1/n of its bandwidth.
    """
    from zorse_megatron.simulate.assumptions import Perturbation

    always, spells = tuple(options.slow_rank or ()), tuple[_Spell, ...]()
    if isinstance(options, SlowIterations):
        always, spells = _spells_of(always)
    texts = {
        "--slow-rank": always,
        "--slow-kind": options.slow_kind or (),
        "--slow-link": slow_link,
    }
    ranks, kinds, links = map(factors, texts.values())
    # Of all pairs of GPUs: slow if there are many.
    known_links = link_names(costs.inputs.comm, costs.inputs.world_size) if links else ()
    problems = [
        *(problem for option, each in texts.items() for problem in factor_problems(each, option)),
        *_unknown({**ranks, **{each.rank: 1.0 for each in spells}}, kinds, costs.cluster),
        *_unknown_links(links, known_links),
    ]
    if not 0 <= options.jitter <= 10:  # NaN is neither
        problems.append(
            Problem(
                where="--jitter",
                found=f"{options.jitter}",
                expected="a number from 0 to 10",
                remedy="0.05 varies compute times by about 5 %.",
            )
        )
    if problems:
        raise CommandError("the command cannot be run", problems)
    return Perturbation(
        jitter=options.jitter,
        seed=options.seed,
        rank_factors={int(key): factor for key, factor in ranks.items()},
        kind_factors=kinds,
        link_factors={name: 1 / factor for name, factor in links.items()},
        spells=tuple(each.known() for each in spells),
    )


@dataclass(frozen=True, kw_only=True)
class _Spell:
    """`RANK=FACTOR@FIRST[-LAST]`, parsed; the rank may be unknown."""

    rank: str
    factor: float
    first_iteration: int
    last_iteration: int | None

    def known(self) -> "SlowSpell":
        """The same of a rank that is known."""
        from zorse_megatron.simulate.assumptions import SlowSpell

        return SlowSpell(**(vars(self) | {"rank": int(self.rank)}))


def _spells_of(texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[_Spell, ...]]:
    """Return the texts that are no spells, whether they are valid or not, and the spells."""
    parsed = {text: _spell(text) for text in texts}
    others = tuple(text for text in texts if parsed[text] is None)
    return others, tuple(spell for text in texts if (spell := parsed[text]) is not None)


def _spell(text: str) -> _Spell | None:
    slow, at, when = text.partition("@")
    first, dash, last = when.partition("-")
    factor = factors([slow])
    if not (at and factor and _is_iteration(first) and (not dash or _is_iteration(last))):
        return None
    if dash and int(last) < int(first):
        return None
    ((rank, times),) = factor.items()
    return _Spell(
        rank=rank,
        factor=times,
        first_iteration=int(first),
        last_iteration=int(last) if dash else None,
    )


def _is_iteration(text: str) -> bool:
    return text.isdecimal() and len(text) < 10 and int(text) > 0


def _unknown(ranks: Iterable[str], kinds: Iterable[str], cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem for each rank and kind that the cluster does not have."""
    highest = cluster.world_size - 1
    for key in ranks:
        if not (key.isdecimal() and len(key) < 10 and str(int(key)) == key and int(key) <= highest):
            yield Problem(
                where="--slow-rank",
                found=f'"{key}"',
                expected=f"a rank from 0 to {highest}",
                remedy="zorse check prints which ranks a plan has.",
            )
    for key in kinds:
        if key not in cluster.kinds:
            yield Problem(
                where="--slow-kind",
                found=f'"{key}"',
                expected=f"one of {', '.join(cluster.kinds)}, the kinds of this cluster",
                remedy="Use a kind of the cluster file, as the table of ranks shows it.",
            )


def _unknown_links(links: Iterable[str], known: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each unknown link, listing the closest valid names first."""
    for name in links:
        if name not in known:
            some = difflib.get_close_matches(name, known, n=_NAMED_LINKS, cutoff=0.0)
            yield Problem(
                where="--slow-link",
                found=f'"{name}"',
                expected=f"one of the {len(known)} links between GPUs, such as {', '.join(some)}",
                remedy="Link names are built from the node and switch names in the cluster file.",
            )
