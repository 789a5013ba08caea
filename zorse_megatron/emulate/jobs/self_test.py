"""Self-test of the emulation: run a schedule whose duration is known.

1. A pipeline: rank 0 starts `NUM_MESSAGES` small messages, and each rank computes for c seconds on
   each before it passes it on. It fills, and then its slowest step sets the beat: with ways of
   x_1, x_2, ... seconds between neighbours, p ranks and n messages it takes
   p * c + sum(x_i) + (n - 1) * max(c, x_1, x_2, ...).
2. All ranks sum one number, which takes what the cost model says.
3. One large message goes from rank to rank, in the sum of what the ways take.

Receives are posted ahead, so that a transfer starts when it is sent. The ranks run it on the
backend `emulated`, as training does (`self_test_main`).
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.costs.interface import CommCost
from zorse_megatron.emulate.clock.link_model import LinkModel
from zorse_megatron.emulate.clock.messages import Collective

COMPUTE_S = 0.005
NUM_MESSAGES = 4
SMALL_ELEMENTS = 1
LARGE_ELEMENTS = 65536
ELEMENT_BYTES = 4
LIMIT = 0.03
"""A run whose self-test is off by more is not valid."""


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """What came of it. Times in seconds of the emulated cluster."""

    expected_s: float
    found_s: float

    @property
    def error(self) -> float:
        """Relative error, without sign."""
        return abs(self.found_s / self.expected_s - 1)

    @property
    def is_valid(self) -> bool:
        """Whether results of the run may be believed."""
        return self.error <= LIMIT

    def __str__(self) -> str:
        return (
            f"self-test: {1e3 * self.found_s:.3f} ms for a schedule of "
            f"{1e3 * self.expected_s:.3f} ms, off by {100 * self.error:.3g} % "
            f"({'valid' if self.is_valid else 'NOT VALID'}, the limit is {100 * LIMIT:.0f} %)"
        )


def expected_s(comm: CommCost, gpus: Sequence[int]) -> float:
    """How long the ranks on these GPUs need, in closed form."""
    pairs = list(itertools.pairwise(gpus))
    small = [comm.transfer_s(*pair, SMALL_ELEMENTS * ELEMENT_BYTES) for pair in pairs]
    large = [comm.transfer_s(*pair, LARGE_ELEMENTS * ELEMENT_BYTES) for pair in pairs]
    beat_s = max([COMPUTE_S, *small])
    pipeline_s = len(gpus) * COMPUTE_S + sum(small) + (NUM_MESSAGES - 1) * beat_s
    number = Collective(
        kind="all_reduce", ranks=tuple(range(len(gpus))), part_bytes=(ELEMENT_BYTES,)
    )
    return pipeline_s + LinkModel(comm, gpus).alone_s(number) + sum(large)


def self_test_of(comm: CommCost, gpus: Sequence[int], reports: Sequence[Path]) -> SelfTest:
    """Compare what the ranks have reported with the closed form."""
    ends_s = [json.loads(report.read_text())["end_s"] for report in reports]
    return SelfTest(expected_s=expected_s(comm, gpus), found_s=max(ends_s))
