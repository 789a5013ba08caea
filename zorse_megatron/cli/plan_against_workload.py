"""Check that a plan matches the model and the training command.

The plugin checks the parsed arguments of a run again (all of them, also those that Megatron
derives); this is the part that needs neither torch nor Megatron.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zorse_megatron.cli.workload import Workload, workload_of
from zorse_megatron.errors import ModelError, Problem
from zorse_megatron.flags.scan import last_values
from zorse_megatron.schema.gpus.gpu import GpuKind
from zorse_megatron.schema.plan.plan import ModelFingerprint, Plan

_VOCABULARY = "--vocab-size"


def workload_problems(plan: Plan, workload: Workload, source: str = "plan") -> Iterator[Problem]:
    """Yield where the plan's model and batch are not those of the workload."""
    yield from fingerprint_problems(plan, workload.model.fingerprint(), source)
    batch = workload.global_batch_size
    if batch is not None and batch != plan.global_batch_size:
        yield Problem(
            where=f"{source}: global_batch_size",
            found=f"{plan.global_batch_size}, while the training command says {batch}",
            expected="the same in both",
            remedy="The plan splits one global batch; change the flag or make a new plan.",
        )


def fingerprint_problems(plan: Plan, model: ModelFingerprint, source: str) -> Iterator[Problem]:
    """Yield every field of the plan's model that another model has otherwise."""
    for field in dataclasses.fields(ModelFingerprint):
        planned, other = getattr(plan.model, field.name), getattr(model, field.name)
        if planned is not None and other is not None and planned != other:
            yield Problem(
                where=f"{source}: model.{field.name}",
                found=f"{planned}, while the model has {other}",
                expected="the same in both",
                remedy="Give the model that the plan was made for, or make a new plan.",
            )


def workload_in_flags(
    flags: Sequence[str],
    plan: Plan,
    kinds: Mapping[str, GpuKind] | None = None,
    **options: Any,
) -> tuple[Workload, bool]:
    """Read a training command to compare it with a plan, and whether it says the vocabulary.

    Where it does not (its tokenizer is not here), that of the plan is taken. `kinds`:
    figures of GPUs that only the cluster file has; `options`: as of `workload_of`. Raises FlagError
    for flags that the plan does not go with, ModelError for an inconsistent model.
    """
    options |= {"model": None, "plan": plan, "kinds": kinds, "is_whole": True}
    try:
        return workload_of(flags=flags, **options), True
    except ModelError as error:
        if [problem.where for problem in error.problems] != [_VOCABULARY]:
            raise
        if _VOCABULARY in last_values(flags, [_VOCABULARY]):
            raise
    with_size = [*flags, "--padded-vocab-size", str(plan.model.vocab_size or 1)]
    return workload_of(flags=with_size, **options), False
