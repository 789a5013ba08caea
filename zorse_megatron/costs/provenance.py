"""Where a cost comes from."""

from dataclasses import dataclass
from typing import Literal

Basis = Literal["measured", "scaled", "analytic"]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """measured: on this kind with this model; scaled: from others; analytic: from data sheets."""

    basis: Basis
    detail: str

    def __str__(self) -> str:
        return f"{self.basis} ({self.detail})"
