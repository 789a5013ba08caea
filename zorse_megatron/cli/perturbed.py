"""Options that perturb the simulated or emulated machines: parsed and validated."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Annotated

import typer

from zorse_megatron.cli.console import CommandError
from zorse_megatron.cli.options import factor_problems, factors
from zorse_megatron.cli.slow_spells import spells_of
from zorse_megatron.errors import Problem
from zorse_megatron.schema.cluster.cluster import Cluster

if TYPE_CHECKING:
    from zorse_megatron.costs.interface import CommCost
    from zorse_megatron.simulate.perturb import Perturbation

Jitter = Annotated[
    float,
    typer.Option(help="Vary compute times at random: relative standard deviation, e.g. 0.05."),
]
Seed = Annotated[int, typer.Option(help="Seed for --jitter.")]
SlowRank = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RANK=FACTOR", help="Slow a rank's computations down by FACTOR; repeatable."
    ),
]
SlowRankInSpells = Annotated[
    list[str] | None,
    typer.Option(
        "--slow-rank",
        metavar="RANK=FACTOR[@FIRST[-LAST]]",
        help="Slow a rank's computations down by FACTOR, in these iterations or all; repeatable.",
    ),
]
SlowKind = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND=FACTOR", help="Slow all GPUs of a kind down by FACTOR; repeatable."),
]
SlowLink = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LINK=FACTOR",
        help="Divide a link's bandwidth by FACTOR; repeatable. new/nic0:out is the outgoing side "
        "of node new's first NIC; an unknown name lists valid ones.",
    ),
]

_NAMED_LINKS = 6  # how many valid names an error lists


def link_names(comm: "CommCost", world_size: int) -> tuple[str, ...]:
    """Names of the links between any two GPUs."""
    pairs = permutations(range(world_size), 2)
    return tuple(dict.fromkeys(name for pair in pairs for name, _ in comm.shared_links(*pair)))


def perturbation_of(
    cluster: Cluster,
    *,
    jitter: float,
    seed: int,
    slow_rank: Sequence[str] | None,
    slow_kind: Sequence[str] | None,
    slow_link: Sequence[str] | None = None,
    known_links: Collection[str] = (),
    has_iterations: bool = False,
) -> "Perturbation":
    """Parse the perturbations. Raises CommandError with every invalid one.

    A link that takes n times as long has 1/n of its bandwidth. `known_links`: see `link_names`.
    `has_iterations`: whether ranks may be slow in some iterations only.
    """
    from zorse_megatron.simulate.perturb import Perturbation

    always, spells = spells_of(slow_rank or ()) if has_iterations else (slow_rank or (), ())
    texts = {
        "--slow-rank": always,
        "--slow-kind": slow_kind or (),
        "--slow-link": slow_link or (),
    }
    ranks, kinds, links = map(factors, texts.values())
    problems = [
        *(problem for option, each in texts.items() for problem in factor_problems(each, option)),
        *_unknown({**ranks, **{each.rank: 1.0 for each in spells}}, kinds, cluster),
        *_unknown_links(links, known_links),
    ]
    if not 0 <= jitter <= 10:  # NaN is neither
        problems.append(
            Problem(
                where="--jitter",
                found=f"{jitter}",
                expected="a number from 0 to 10",
                remedy="0.05 varies compute times by about 5 %.",
            )
        )
    if problems:
        raise CommandError("the command cannot be run", problems)
    return Perturbation(
        jitter=jitter,
        seed=seed,
        rank_factors={int(key): factor for key, factor in ranks.items()},
        kind_factors=kinds,
        link_factors={name: 1 / factor for name, factor in links.items()},
        spells=tuple(each.spell() for each in spells),
    )


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
