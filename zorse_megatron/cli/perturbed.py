"""Options that make the machines other than the prices say, read and checked."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from zorse_megatron.cli.console import CommandError
from zorse_megatron.cli.options import factors
from zorse_megatron.errors import Problem
from zorse_megatron.schema.cluster import Cluster

if TYPE_CHECKING:
    from zorse_megatron.simulate.perturb import Perturbation


def perturbation_of(
    cluster: Cluster,
    *,
    jitter: float,
    seed: int,
    slow_rank: Sequence[str],
    slow_kind: Sequence[str],
    slow_link: Sequence[str] = (),
) -> "Perturbation":
    """Read what is to differ from the prices. Raises CommandError for what cannot be.

    A link that takes n times as long has 1/n of its bandwidth.
    """
    from zorse_megatron.simulate.perturb import Perturbation

    ranks, kinds = factors(slow_rank, "--slow-rank"), factors(slow_kind, "--slow-kind")
    links = factors(slow_link, "--slow-link")
    problems = [*_unknown(ranks, kinds, cluster)]
    if not 0 <= jitter <= 10:  # NaN is neither
        problems.append(
            Problem(
                where="--jitter",
                found=f"{jitter}",
                expected="a number from 0 to 10",
                remedy="0.05 spreads computations by about 5 %.",
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
    )


def _unknown(ranks: Iterable[str], kinds: Iterable[str], cluster: Cluster) -> Iterator[Problem]:
    """Yield the ranks and kinds that the cluster does not have."""
    highest = cluster.world_size - 1
    for key in ranks:
        if not (key.isdecimal() and len(key) < 10 and int(key) <= highest):
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
                remedy="Spell it as the table of ranks does.",
            )
