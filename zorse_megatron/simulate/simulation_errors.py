"""Errors of a simulation."""

from collections.abc import Sequence


class SimulationError(Exception):
    """Action lists that cannot be executed, or inputs that do not fit the plan."""


class UnknownLinkError(SimulationError):
    """Links to be slowed down that are on no route. `known`: those that the plan uses."""

    def __init__(self, unknown: Sequence[str], known: Sequence[str]) -> None:
        self.unknown, self.known = tuple(unknown), tuple(known)
        super().__init__(
            f"found links {list(unknown)} to be slowed down; expected links that the plan uses: "
            f"{list(known)}"
        )
