"""An emulated job, written by its starter and read by its ranks, and the self-test before it."""

import itertools
import json
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.costs.interface import CommCost, DtypeCosts, MemoryCost, ModelSection
from zorse_megatron.emulate.link_clock import LinkModel
from zorse_megatron.emulate.messages import Collective
from zorse_megatron.schedule.tensor_parallel_parts import UnitKind
from zorse_megatron.simulate.assumptions import Perturbation

VARIABLE = "ZORSE_EMULATION"
"""Where a rank finds the job."""


@dataclass(frozen=True, kw_only=True)
class JobTpGroups:
    """The tensor-parallel groups of a job."""

    ranks: tuple[tuple[int, ...], ...]
    """Rank of the job -> the ranks of its TP group."""
    memories: tuple[MemoryCost, ...]
    """Rank -> the memory model of a rank that has all of each layer."""
    measured: tuple[frozenset[ModelSection], ...]
    """Rank -> parts of the model whose times were measured with the TP group's collectives in
    them."""
    cut_parameters: Mapping[ModelSection, Mapping[UnitKind, int]]
    """See `costs.interface.TpCosts`."""
    sequence_length: int
    """Of the real model."""
    adapter_share: float
    """Width of A x beside the model's, of its adapters; 0 without any."""


@dataclass(frozen=True, kw_only=True)
class EmulatedJob:
    """One job on the emulated cluster."""

    address: str
    """Address of the conductor."""
    gpus: tuple[int, ...]
    """Rank of the job -> global rank of its GPU in the cluster."""
    kinds: tuple[str, ...]
    """Rank of the job -> kind of its GPU."""
    capacities_bytes: tuple[int, ...]
    """Rank of the job -> what it may hold."""
    host_bytes_per_s: tuple[float, ...]
    """Rank of the job -> its GPU's link to the host, in each direction."""
    costs: tuple[DtypeCosts, ...]
    """Rank of the job -> what it costs to compute its part in the type of its group."""
    perturbation: Perturbation
    sequence_length: int
    """Sequence length of the tiny model."""
    hidden_size: int
    """Hidden size of the tiny model."""
    tp_groups: JobTpGroups | None
    """None: every rank is a TP group of its own."""
    dilation: float | None
    """See `rank_clock.Pace`."""
    directory: Path
    """Where ranks write their reports."""

    def save(self) -> Path:
        """Write the job for its ranks, which this process starts itself."""
        path = self.directory / "job.pickle"
        path.write_bytes(pickle.dumps(self))
        return path

    def report(self, rank: int) -> Path:
        """Where a rank writes its report."""
        return self.directory / f"rank_{rank}.json"


def current_job() -> EmulatedJob:
    """The job that this process is a rank of."""
    job = pickle.loads(Path(os.environ[VARIABLE]).read_bytes())
    assert isinstance(job, EmulatedJob)
    return job


# Self-test of the emulation: run a schedule whose duration is known.
#
# 1. A pipeline: rank 0 starts `NUM_MESSAGES` small messages, and each rank computes for c seconds
#    on each before it passes it on. It fills, and then its slowest step sets the beat: with ways of
#    x_1, x_2, ... seconds between neighbours, p ranks and n messages it takes
#    p * c + sum(x_i) + (n - 1) * max(c, x_1, x_2, ...).
# 2. All ranks sum one number, which takes what the cost model says.
# 3. One large message goes from rank to rank, in the sum of what the ways take.
#
# Receives are posted ahead, so that a transfer starts when it is sent. The ranks run it on the
# backend `emulated`, as training does (`self_test_main`).


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
