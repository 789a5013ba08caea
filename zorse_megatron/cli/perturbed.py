"""Options that perturb the simulated or emulated machines: parsed and validated."""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import permutations
from typing import TYPE_CHECKING, Annotated

import typer

from zorse_megatron.cli.console import refuse
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import Problem

if TYPE_CHECKING:
    from zorse_megatron.costs.interface import CommCost
    from zorse_megatron.simulate.assumptions import Perturbation


_NAMED_LINKS = 6  # how many valid names an error lists
_LARGEST_FACTOR = 1e6
_ITERATIONS = re.compile(r"([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?")


@dataclass(frozen=True, kw_only=True)
class SlowMachines:
    """How GPUs and links are perturbed."""

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
        """Parse the options. Raises CommandError with everything that is wrong with them.

        A link that takes n times as long has 1/n of its bandwidth.
        """
        from zorse_megatron.simulate.assumptions import Perturbation, SlowSpell

        ranks, kinds, links = told = self._told(costs)
        problems = [problem for each in told for problem in each.problems()]
        if not 0 <= self.jitter <= 10:  # NaN is neither
            problems.append(
                Problem(
                    where="--jitter",
                    found=f"{self.jitter}",
                    expected="a number from 0 to 10",
                    remedy="0.05 varies compute times by about 5 %.",
                )
            )
        refuse(problems)
        spells = [each for each in ranks.found if each.first]
        return Perturbation(
            jitter=self.jitter,
            seed=self.seed,
            rank_factors={int(each.name): each.factor for each in ranks.found if not each.first},
            kind_factors={each.name: each.factor for each in kinds.found},
            link_factors={each.name: 1 / each.factor for each in links.found},
            spells=tuple(
                SlowSpell(
                    rank=int(each.name),
                    factor=each.factor,
                    first_iteration=each.first,
                    last_iteration=each.last,
                )
                for each in spells
            ),
        )

    def _told(self, costs: WorkloadCosts) -> tuple["_Slow", "_Slow", "_Slow"]:
        """Ranks, kinds and links."""
        cluster, comm = costs.cluster, costs.inputs.comm
        ranks = _Slow(
            option="--slow-rank",
            texts=self.slow_rank or (),
            may_end=isinstance(self, SlowIterations),
            known=lambda: list(map(str, range(cluster.world_size))),
            expected=lambda _: f"a rank from 0 to {cluster.world_size - 1}",
            remedy="zorse check prints which ranks a plan has.",
        )
        kinds = _Slow(
            option="--slow-kind",
            texts=self.slow_kind or (),
            known=lambda: list(cluster.kinds),
            expected=lambda _: f"one of {', '.join(cluster.kinds)}, the kinds of this cluster",
            remedy="Use a kind of the cluster file, as the table of ranks shows it.",
        )
        links = _Slow(
            option="--slow-link",
            texts=self.slow_link or (),
            known=partial(link_names, comm, cluster.world_size),
            expected=partial(_some_links, comm, cluster.world_size),
            remedy="Link names are built from the node and switch names in the cluster file.",
        )
        return ranks, kinds, links


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


@dataclass(frozen=True, kw_only=True)
class _Factor:
    """`NAME=FACTOR[@FIRST[-LAST]]`."""

    name: str
    factor: float
    first: int = 0
    """Iteration, counted from 1; 0: slow all the time."""
    last: int | None = None
    """None: it stays slow."""

    @classmethod
    def of(cls, text: str, *, may_end: bool) -> "_Factor | None":
        """None: it is something else."""
        name, _, rest = text.rpartition("=")
        number, at, when = rest.partition("@") if may_end else (rest, "", "")
        try:
            factor = float(number)
        except ValueError:
            return None
        if not name or not 0 < factor <= _LARGEST_FACTOR:  # NaN is neither
            return None
        if not at:
            return cls(name=name, factor=factor)
        spell = _ITERATIONS.fullmatch(when)
        if spell is None or int(spell[2] or spell[1]) < int(spell[1]):
            return None
        last = int(spell[2]) if spell[2] else None
        return cls(name=name, factor=factor, first=int(spell[1]), last=last)


@dataclass(frozen=True, kw_only=True)
class _Slow:
    """What one option says."""

    option: str
    texts: Sequence[str]
    may_end: bool = False
    """Whether it may be slow in some iterations only."""
    known: Callable[[], Sequence[str]]
    """The names that there are; asked for where there are factors."""
    expected: Callable[[str], str]
    """What an unknown name might have been."""
    remedy: str

    @cached_property
    def found(self) -> list[_Factor]:
        """Those texts that are factors."""
        parsed = (_Factor.of(text, may_end=self.may_end) for text in self.texts)
        return [each for each in parsed if each is not None]

    def problems(self) -> Iterator[Problem]:
        """Yield names with two factors, texts that are no factor, and unknown names."""
        names = Counter(each.name for each in self.found if not each.first)
        for name, count in names.items():
            if count > 1:
                yield Problem(
                    where=self.option,
                    found=f'"{name}" {count} times',
                    expected="one factor for each",
                    remedy="Leave out all but one.",
                )
        for text in self.texts:
            if _Factor.of(text, may_end=self.may_end) is None:
                name = text.partition("=")[0] or "3"
                yield Problem(
                    where=self.option,
                    found=f'"{text}"',
                    expected="NAME=FACTOR with a factor above 0",
                    remedy=f"For example, {self.option} {name}=1.3 is 30 % slower.",
                )
        known = self.known() if self.found else ()
        for name in dict.fromkeys(each.name for each in self.found):
            if name not in known:
                yield Problem(
                    where=self.option,
                    found=f'"{name}"',
                    expected=self.expected(name),
                    remedy=self.remedy,
                )


def _some_links(comm: "CommCost", world_size: int, name: str) -> str:
    """List the closest valid names first."""
    known = link_names(comm, world_size)
    some = difflib.get_close_matches(name, known, n=_NAMED_LINKS, cutoff=0.0)
    return f"one of the {len(known)} links between GPUs, such as {', '.join(some)}"


def link_names(comm: "CommCost", world_size: int) -> tuple[str, ...]:
    """Names of the links between any two GPUs: slow if there are many GPUs."""
    pairs = permutations(range(world_size), 2)
    return tuple(dict.fromkeys(name for pair in pairs for name, _ in comm.shared_links(*pair)))
