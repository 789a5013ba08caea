"""How far a predicted iteration may be off, as cost models and simulator were.

Layer times: what nine of ten public measurements were off by at most, for the GPUs' basis
(docs/simulator.md). The simulation of an iteration from measured layers: the largest error over
Sailor's runs (docs/simulator.md), 19 with a pipeline and 6 without. The two are taken to be
independent. No run of this project's own on GPUs is in it.
"""

import math
from dataclasses import dataclass

from zorse_megatron.planner.inputs.search_inputs import Inputs

_PIPELINE, _ONE_GROUP = 0.09, 0.16
_MOST_NAMED = 1


@dataclass(frozen=True, kw_only=True)
class ErrorBar:
    """Of a predicted iteration time."""

    share: float
    """The time is expected within (1 - share, 1 + share) times what is predicted."""
    basis: str
    """For people: what layer times rest on."""

    def between(self, value: float) -> tuple[float, float]:
        """Where a time may lie that is predicted to be `value`."""
        return value * (1 - self.share), value * (1 + self.share)


def error_bar(inputs: Inputs, *, num_groups: int) -> ErrorBar:
    """Return that of a plan on all GPUs, by the kind whose layer times are known worst."""
    layers = max((each.off_by for each in inputs.provenances.values()), default=0.0)
    return ErrorBar(
        share=math.hypot(layers, _PIPELINE if num_groups > 1 else _ONE_GROUP),
        basis=_basis(inputs),
    )


def _basis(inputs: Inputs) -> str:
    by_kind = inputs.provenances
    unknown = [kind for kind, each in by_kind.items() if not each.is_calibrated]
    estimated = [kind for kind, each in by_kind.items() if each.basis == "analytic"]
    if unknown:
        return f"from data sheets, {_named(unknown)} never measured"
    if len(estimated) == len(by_kind):
        return "from published figures"
    if estimated:
        return f"{_named(estimated)} from published figures, others by your profile"
    if any(each.basis == "scaled" for each in by_kind.values()):
        return "scaled from your profile"
    return "calibrated by your profile"


def _named(kinds: list[str]) -> str:
    more = f" and {len(kinds) - _MOST_NAMED} more" if len(kinds) > _MOST_NAMED else ""
    return ", ".join(kinds[:_MOST_NAMED]) + more
