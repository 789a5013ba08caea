"""`--slow-rank RANK=FACTOR@FIRST-LAST`: a rank that is slow in some iterations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zorse_megatron.cli.options import factors

if TYPE_CHECKING:
    from zorse_megatron.simulate.perturb import SlowSpell


@dataclass(frozen=True, kw_only=True)
class SpellText:
    """What was given, parsed; the rank may be unknown."""

    rank: str
    factor: float
    first_iteration: int
    last_iteration: int | None

    def spell(self) -> "SlowSpell":
        """The same of a rank that is known."""
        from zorse_megatron.simulate.perturb import SlowSpell

        return SlowSpell(
            rank=int(self.rank),
            factor=self.factor,
            first_iteration=self.first_iteration,
            last_iteration=self.last_iteration,
        )


def spells_of(texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[SpellText, ...]]:
    """Return the texts that are no spells, whether they are valid or not, and the spells."""
    parsed = {text: _spell(text) for text in texts}
    others = tuple(text for text in texts if parsed[text] is None)
    return others, tuple(spell for text in texts if (spell := parsed[text]) is not None)


def _spell(text: str) -> SpellText | None:
    slow, at, when = text.partition("@")
    first, dash, last = when.partition("-")
    factor = factors([slow])
    if not (at and factor and _is_iteration(first) and (not dash or _is_iteration(last))):
        return None
    if dash and int(last) < int(first):
        return None
    ((rank, times),) = factor.items()
    return SpellText(
        rank=rank,
        factor=times,
        first_iteration=int(first),
        last_iteration=int(last) if dash else None,
    )


def _is_iteration(text: str) -> bool:
    return text.isdecimal() and len(text) < 10 and int(text) > 0
