"""All checks, in the order in which they are made."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zorse_megatron.doctor.checks.against_stock import (
    CONNECTIONS,
    follows_stock,
    resumes,
    with_transformer_engine,
)
from zorse_megatron.doctor.checks.communicators import communicators
from zorse_megatron.doctor.checks.gathers import hidden_gathers
from zorse_megatron.doctor.checks.kernels import kernels
from zorse_megatron.doctor.checks.time_and_memory import offload, prediction
from zorse_megatron.doctor.finding import Finding
from zorse_megatron.doctor.plans import CASES
from zorse_megatron.doctor.workshop import Workshop


@dataclass(frozen=True, kw_only=True)
class Check:
    """A line of the report to be."""

    name: str
    """For `--check`."""
    title: str
    run: Callable[[Workshop], Finding]
    limit_s: float = 120.0


CHECKS: tuple[Check, ...] = (
    Check(
        name="communicators",
        title="NCCL connects the ranks of a plan; memory of each communicator",
        run=communicators,
    ),
    Check(name="kernels", title="Shard kernels: right, and as fast as a copy", run=kernels),
    *(
        Check(
            name="plans",
            title=f"Plan {case.name} against stock, CUDA_DEVICE_MAX_CONNECTIONS={connections}",
            run=partial(follows_stock, case=case, connections=connections),
        )
        for case in CASES
        for connections in CONNECTIONS
    ),
    Check(name="resume", title="Another plan resumes from a checkpoint", run=resumes),
    Check(
        name="engine",
        title="Transformer Engine's layers under a plan against stock",
        run=with_transformer_engine,
    ),
    Check(name="offload", title="What offload costs on one GPU", run=offload, limit_s=180.0),
    Check(
        name="gathers",
        title="Which share of all-gathers computation hides",
        run=hidden_gathers,
    ),
    Check(
        name="prediction",
        title="Simulated against measured, with a model that fills the GPU",
        run=prediction,
        limit_s=240.0,
    ),
)
NAMES = tuple(dict.fromkeys(check.name for check in CHECKS))
