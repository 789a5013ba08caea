"""An emulated job, written by its starter and read by its ranks."""

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.costs.interface import DtypeCosts, MemoryCost, ModelSection
from zorse_megatron.costs.shared_experts import TokenMessages
from zorse_megatron.schedule.tensor_parallel_parts import UnitKind
from zorse_megatron.simulate.assumptions import Perturbation

VARIABLE = "ZORSE_EMULATION"
"""Where a rank finds the job."""


@dataclass(frozen=True, kw_only=True)
class JobSharing:
    """Ranks of a job that share experts alone."""

    ranks: tuple[int, ...]
    size: int
    """Samples of a micro-batch on all of them."""
    parts: int
    """In how many it runs, interleaved."""
    messages: TokenMessages
    """Of one part in one layer of the real model."""


@dataclass(frozen=True, kw_only=True)
class JobTpGroups:
    """The tensor-parallel groups of a job, and its ranks that share experts."""

    ranks: tuple[tuple[int, ...], ...]
    """Rank of the job -> the ranks of its TP group."""
    memories: tuple[MemoryCost, ...]
    """Rank -> the memory model of a rank that has all of each layer."""
    measured: tuple[frozenset[ModelSection], ...]
    """Rank -> parts of the model whose times were measured with the TP group's collectives in
    them."""
    cut_parameters: Mapping[ModelSection | int, Mapping[UnitKind, int]]
    """See `costs.interface.TpCosts`; layers by their numbers."""
    layer_parameters: tuple[int, ...]
    """Layer -> parameters of all of it that are trained."""
    sequence_length: int
    """Of the real model."""
    adapter_share: float
    """Width of A x beside the model's, of its adapters; 0 without any."""
    sharing: tuple[JobSharing | None, ...]
    """Rank -> those with which it shares experts."""


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
    layer_costs: tuple[tuple[DtypeCosts, ...], ...]
    """The same of each layer of the model, where these are not alike; empty where they are."""
    perturbation: Perturbation
    sequence_length: int
    """Sequence length of the tiny model."""
    hidden_size: int
    """Hidden size of the tiny model."""
    tp_groups: JobTpGroups | None
    """None: every rank has all of each layer."""
    directory: Path
    """Where ranks write their reports."""

    def costs_of_layer(self, rank: int, layer: int) -> DtypeCosts:
        """What a layer of the model costs on a rank."""
        return self.layer_costs[rank][layer] if self.layer_costs else self.costs[rank]

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
