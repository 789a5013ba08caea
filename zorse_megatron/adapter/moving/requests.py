"""Requests for another plan: rank 0 finds them, and tells all ranks after an iteration."""

from pathlib import Path

from zorse_megatron.log import say
from zorse_megatron.migration.request import drop_request, take_request


class PlanRequests:
    """One rank's view. All ranks hear of a request after the same iteration."""

    def __init__(self, directory: Path | None) -> None:
        """`directory`: where rank 0 looks; None: another rank."""
        self._directory = directory
        self._number = 0
        """Of the request that rank 0 has found last."""
        self._heard = 0
        self._answered = 0
        self.data: bytes | None = None
        """On rank 0: what is asked for."""

    @classmethod
    def of(cls, directory: Path | None, *, rank: int, is_first: bool) -> "PlanRequests":
        """Those that a rank knows of; `is_first`: no plan was left for this one.

        Then what lies there was asked of an earlier run, and is dropped.
        """
        if is_first and rank == 0 and directory is not None and drop_request(directory):
            say(
                f"a request for another plan in {directory} is older than this run and is dropped: "
                "ask again with zorse move"
            )
        return cls(directory if rank == 0 else None)

    def code(self) -> float:
        """What to tell the others: a number that grows with each request."""
        if self._directory is not None and self._number == self._answered:
            found = take_request(self._directory)
            if found is not None:
                self._number, self.data = self._number + 1, found
        return float(self._number)

    def hear(self, code: float) -> None:
        """What rank 0 has told."""
        self._heard = int(code)

    @property
    def is_open(self) -> bool:
        """Whether all ranks know of a request that has not been answered."""
        return self._heard > self._answered

    def answer(self) -> None:
        """It is done with, granted or not."""
        self._answered, self.data = self._heard, None
