"""Agree on other counts of micro-batches, and on the iteration from which on they count.

All ranks see the same times, so all wish for the same counts at the same moment. Each makes the
lists beside the training. When all have told that they are done, they switch some iterations later:
those of which data loaders may have cut samples already. That the ranks agree is not taken for
granted: they tell a number of what they have made, and nothing changes unless it is one for all.
"""

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from zorse_megatron.log import say
from zorse_megatron.rebalance.balancer import Balancer, Counts, counts_of
from zorse_megatron.rebalance.prepare import Preparation, Prepared
from zorse_megatron.runtime.course import Course, batches_ahead
from zorse_megatron.schedules.policy import Worker


@dataclass(kw_only=True)
class _Candidate:
    """Counts that this rank makes lists for, or has."""

    counts: Counts
    made: Prepared | str | None = None
    failed: BaseException | None = None
    thread: threading.Thread | None = None

    @property
    def code(self) -> float:
        """What this rank tells of it: 0 while it is made, below 0 where it cannot be."""
        if self.failed is not None:
            raise self.failed
        if self.made is None:
            return 0.0
        number = 1 + zlib.crc32(repr(self.counts).encode())
        return float(number if isinstance(self.made, Prepared) else -number)


class Switching:
    """One rank's part in the agreement."""

    def __init__(
        self,
        *,
        balancer: Balancer,
        preparation: Preparation,
        course: Course,
        rank: int,
        num_prefetched: int,
    ) -> None:
        """`num_prefetched`: micro-batches that a data loader has ready before they are wanted."""
        self.balancer = balancer
        self.preparation = preparation
        self.course = course
        self.rank = rank
        self.num_prefetched = num_prefetched
        self.is_off = False
        self._candidate: _Candidate | None = None
        self._agreed: tuple[int, Prepared] | None = None

    @property
    def code(self) -> float:
        """What to tell the others."""
        return 0.0 if self._candidate is None or self._agreed else self._candidate.code

    def take(
        self, number: int, seconds: dict[Worker, float], codes: Sequence[float], *, done: int
    ) -> None:
        """What all ranks told: of iteration `number`, and of what they have made.

        `done`: iterations that have been run; the same on all ranks at this point.
        """
        if self.is_off:
            return
        if number > 0 and seconds:  # the first one is not like the others
            self.balancer.add(number, seconds)
        self._agree(codes, done)
        if self._candidate is None and self.balancer.wish is not None:
            self._start(self.balancer.wish)

    def from_iteration(self, number: int) -> Prepared | None:
        """What is run from this iteration on; None: as before."""
        if self._agreed is None or number < self._agreed[0]:
            return None
        (_, prepared), self._agreed, self._candidate = self._agreed, None, None
        self._say(number, prepared)
        self.balancer.change_to(prepared.plan)
        return prepared

    def _start(self, counts: Counts) -> None:
        candidate = _Candidate(counts=counts)

        def make() -> None:
            try:
                candidate.made = self.preparation.prepare(counts)
            except BaseException as error:  # for the main thread to raise
                candidate.failed = error

        self._candidate = candidate
        candidate.thread = threading.Thread(target=make, name="zorse-rebalance", daemon=True)
        candidate.thread.start()

    def _agree(self, codes: Sequence[float], done: int) -> None:
        if self._candidate is None or self._agreed is not None:
            return
        told = {code for code in codes if code}
        if len(told) > 1 or (told and self.code not in {0.0, *told}):
            say(f"ranks want different micro-batches ({sorted(told)}): they stay as they are")
            self.is_off, self._candidate = True, None
        elif told and len(codes) == sum(map(bool, codes)):
            made = self._candidate.made
            if isinstance(made, Prepared):
                self._agree_on(made, done)
            else:
                say(f"micro-batches stay as they are: {made}")
                self.balancer.refuse(self._candidate.counts)
                self._candidate = None

    def _agree_on(self, prepared: Prepared, done: int) -> None:
        plans = (self.balancer.plan, prepared.plan)
        fewest = min(count for plan in plans for row in counts_of(plan) for count in row if count)
        first = done + batches_ahead(num_prefetched=self.num_prefetched, fewest=fewest)
        if mine := prepared.micro_batches(self.rank):
            self.course.change(first, mine)
        self._agreed = first, prepared

    def _say(self, number: int, prepared: Prepared) -> None:
        before, after = counts_of(self.balancer.plan), counts_of(prepared.plan)
        for group, (old, new) in enumerate(zip(before, after, strict=True)):
            if old != new:
                say(
                    f"replicas of group {group} run {_listed(new)} micro-batches instead of "
                    f"{_listed(old)} from iteration {number + 1} of this run on"
                )


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))
