"""Simulate the runs of Sailor (SOSP 2025) on GH200 nodes from measurements of their parts.

How these runs train is known from their source, github.com/eth-easl/sailor (MIT), at tag sosp25_ae:
Megatron-DeepSpeed with `PipelineEngine` (deepspeed/pipe_engine.py), float32 with tf32 products (the
container nvcr.io/nvidia/pytorch:24.10 turns them on), AdamW, ZeRO off, nothing recomputed. Layer
times were taken between hooks of a run with four tensor-parallel ranks
(sailor/profiling/profile_utils.py), so the collectives of a layer are in them. Iterations are wall
times, means of 7 after 3 that do not count; memory is what nvidia-smi says, largest GPU.

Every constant here is of the source named beside it. None was fitted to the runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scripts.import_profile import import_tables
from scripts.validation.device_tp_groups import TpGroupComm
from scripts.validation.measured_memory import MeasuredMemory
from scripts.validation.measured_runs import MeasuredRun, read_runs
from zorse_megatron.costs.communication import GraphComm
from zorse_megatron.costs.interface import JobCosts
from zorse_megatron.costs.model_memory import Precision
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.costs.topology import MeasuredNode, Topology, measured_curves
from zorse_megatron.errors import Problem, ProfileError
from zorse_megatron.inputs.cluster import Nics, NodeLink
from zorse_megatron.inputs.profile import Profile
from zorse_megatron.simulate.assumptions import Framework
from zorse_megatron.simulate.iteration import simulate

RUNS = "gh200_runs.csv"
PARTS = ("layer_latency_tp.csv", "model_memory_tp.csv", "link_bandwidth.csv")
ORIGIN = "Sailor (SOSP 2025), MIT"

_SEQUENCE_LENGTH = 2048
_FLOAT_BYTES = 4
# Bytes of a parameter, from get_memory_footprint_on_gpu in
# sailor/Planner/simulations/runtime_simulator.py: itself 4, gradient 4, Adam's moments 8, the flat
# copy that is all-reduced 4, what DeepSpeed copies at the start and the allocator keeps 4.
_PRECISION = Precision(parameter_bytes=4, gradient_bytes=4, state_bytes=8 + 4 + 4)
# Same place: CUDA context and fused kernels 4.76 GB on this platform, and 300 MB.
_FIXED_BYTES = 4_760_000_000 + 300_000_000

# One Cassini NIC of 200 Gb/s for each GPU (Fusco et al. 2024, arXiv 2408.11556, on these nodes).
# Only contention is counted against it: times come from the measured curves.
_NIC_BYTES_PER_S = 25e9
_GPUS_PER_NODE = 4
# From Grace's memory to the GPU: 375 of NVLink-C2C's 450 GB/s, as measured by Schieffer et al. 2024
# (arXiv 2407.07850).
_HOST_LINK_BYTES_PER_S = 375e9
# What one Neoverse V2 core stores at most: two stores of 16 bytes in each cycle (Laukemann et al.
# 2024, arXiv 2409.08108) at Grace's 3.4 GHz. One, because torchrun sets OMP_NUM_THREADS=1.
_FILL_BYTES_PER_S = 2 * 16 * 3.4e9
# malloc takes more than this from the kernel each time and gives it back (mallopt(3),
# M_MMAP_THRESHOLD), so that the kernel clears the pages before they are filled.
_ALWAYS_FRESH_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A run and what the simulator says of it."""

    run: MeasuredRun
    iteration_s: float
    peak_memory_bytes: int

    @property
    def time_error(self) -> float:
        """Simulated over measured, less 1."""
        return self.iteration_s / self.run.iteration_s - 1

    @property
    def memory_error(self) -> float:
        """The same of the peak memory."""
        return self.peak_memory_bytes / self.run.max_memory_bytes - 1


def compare_runs(
    tables: Mapping[str, bytes], *, rebuild_bytes_per_s: float | None = None
) -> tuple[Comparison, ...]:
    """Simulate every run of the table `RUNS` from those of `PARTS`; `tables`: name -> content.

    `rebuild_bytes_per_s`: another rate for what `_rebuild_s` prices, to see what depends on it.
    Raises ProfileError for tables that cannot be read.
    """
    parts = {name: tables[name] for name in PARTS}
    profile = import_tables(parts, origin=ORIGIN, dtype="tf32").profile
    runs = read_runs(RUNS, tables[RUNS])
    for run in runs:
        _check(run, profile)
    return tuple(_compare(run, profile, rebuild_bytes_per_s) for run in runs)


def mean_absolute(errors: Sequence[float]) -> float:
    """Mean of what errors are without their signs."""
    return sum(map(abs, errors)) / len(errors)


def _check(run: MeasuredRun, profile: Profile) -> None:
    """Raise ProfileError for a run that the tables of parts cannot price."""
    inside, outside = measured_curves(profile, run.gpu_kind)
    timed = {(times.model, times.gpu_kind) for times in profile.times}
    fills_nodes = run.world_size == run.num_nodes * run.tensor_parallel
    rules = [
        ((run.model, run.gpu_kind) in timed, f"no times of {run.model} on {run.gpu_kind}"),
        (inside and outside, f"no links of {run.gpu_kind}"),
        (
            fills_nodes and run.tensor_parallel == _GPUS_PER_NODE,
            f"{run.world_size} GPUs on {run.num_nodes} nodes, {run.tensor_parallel} in each TP "
            "group",
        ),
    ]
    problems = [
        Problem(
            where=f"{RUNS}: {run.model}, {run.layout}",
            found=found,
            expected=f"measured parts of every run, and a TP group of {_GPUS_PER_NODE} on each "
            "node",
            remedy="Sailor's tables go together; take all of them from one place.",
        )
        for holds, found in rules
        if not holds
    ]
    if problems:
        raise ProfileError(f"{RUNS} cannot be simulated", problems)


def _compare(run: MeasuredRun, profile: Profile, rate: float | None) -> Comparison:
    model = profile.model_named(run.model)
    size = run.tensor_parallel
    memory = MeasuredMemory.of(
        profile,
        run.model,
        precision=_PRECISION,
        element_bytes=_FLOAT_BYTES,
        tensor_parallel=size,
    )
    spec = _cluster(run, profile)
    activation_bytes = memory.boundary_bytes(run.micro_batch_size)
    plan = run.plan()
    costs = JobCosts(
        compute=ProfiledCompute(profile, model, dtype="tf32", tensor_parallel=size),
        memory=memory,
        comm=TpGroupComm(spec, size),
        kinds=(run.gpu_kind,) * plan.world_size,
        sequence_length=_SEQUENCE_LENGTH,
    )
    result = simulate(
        plan,
        costs,
        fixed_bytes=(_FIXED_BYTES,) * plan.world_size,
        framework=Framework(
            sums_at_norm=1,
            state="replicated",
            blocking_transfers=True,
            rebuild_bytes_per_s=rate or activation_bytes / _rebuild_s(spec, size, activation_bytes),
        ),
    )
    return Comparison(
        run=run,
        iteration_s=result.iteration_s,
        peak_memory_bytes=max(result.peak_memory_bytes),
    )


def _rebuild_s(spec: Topology, tensor_parallel: int, num_bytes: int) -> float:
    """Time of `reconstruct_tensor` (deepspeed/utils.py), which each receive ends with.

    It waits for what arrived, makes a tensor of zeros in host memory, copies it to the GPU, puts
    the received part into it, and gathers the other parts from the ranks of the TP group. The fill
    is priced at the peak of the core, so the real time is longer.
    """
    passes = 2 if num_bytes > _ALWAYS_FRESH_BYTES else 1
    parts = (num_bytes // tensor_parallel,) * tensor_parallel
    gather_s = GraphComm(spec).all_gather_s(tuple(range(tensor_parallel)), parts)
    fill_s = passes * num_bytes / _FILL_BYTES_PER_S
    return fill_s + num_bytes / _HOST_LINK_BYTES_PER_S + gather_s


def _cluster(run: MeasuredRun, profile: Profile) -> Topology:
    inside, outside = measured_curves(profile, run.gpu_kind)
    return Topology.of(
        [
            MeasuredNode(
                name=f"node{index}",
                gpu_kinds=(run.gpu_kind,) * _GPUS_PER_NODE,
                first_rank=index * _GPUS_PER_NODE,
                link=NodeLink(
                    type="nvlink",
                    bandwidth_bytes_per_s=max(curve.max_bytes_per_s for _, curve in inside),
                    latency_s=0.0,
                ),
                nics=Nics(
                    count=_GPUS_PER_NODE, bandwidth_bytes_per_s=_NIC_BYTES_PER_S, latency_s=0.0
                ),
                host_link_bytes_per_s=_HOST_LINK_BYTES_PER_S,
                host_memory_bytes=None,
                region="region",
                intra_curves=inside,
                nic_curves=outside,
            )
            for index in range(run.num_nodes)
        ]
    )
