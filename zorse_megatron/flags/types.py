"""Compute dtypes of a plan's groups, and flags that contradict them."""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from zorse_megatron.errors import Problem
from zorse_megatron.schema.gpus.gpu import ComputeDtype, GpuKind
from zorse_megatron.schema.gpus.gpu_presets import GPU_KINDS
from zorse_megatron.schema.plan.plan import Plan

# Each presumes one type for the whole job.
_ONE_TYPE = ("fp16_lm_cross_entropy", "fp32_residual_connection", "grad_reduce_in_bf16")


def is_mixed(plan: Plan) -> bool:
    """Whether the plan says in which type groups compute."""
    return any(group.compute_dtype is not None for group in plan.groups)


def job_dtype(args: Namespace) -> ComputeDtype:
    """What the command says; on parsed arguments that `set_compute_dtype` has not changed."""
    if args.fp16:
        return "fp16"
    return "bf16" if args.bf16 else "fp32"


def compute_dtypes(plan: Plan, job: ComputeDtype) -> tuple[ComputeDtype, ...]:
    """Group -> the type that it computes in."""
    return tuple(group.compute_dtype or job for group in plan.groups)


def dtype_problems(args: Namespace, plan: Plan) -> Iterator[Problem]:
    """Flags that presume one type for the whole job, under a plan that has several."""
    for name in _ONE_TYPE if is_mixed(plan) else ():
        if getattr(args, name, False):
            yield Problem(
                where="--" + name.replace("_", "-"),
                found="it in a job whose plan has compute_dtype",
                expected="no flag that assumes one dtype for all groups",
                remedy="Remove the flag, or compute_dtype from the plan's groups.",
            )


def device_problems(
    args: Namespace, plan: Plan, kinds: Mapping[str, GpuKind] | None = None
) -> Iterator[Problem]:
    """bf16 on GPUs without units for it, where the plan says which GPUs it is for.

    `kinds`: the figures of kinds beyond the well-known ones.
    """
    names = () if plan.cluster is None else plan.cluster.gpu_kinds or ()
    known = {**GPU_KINDS, **(kinds or {})}
    lacking = {name for name in names if name in known and not known[name].computes_in("bf16")}
    for number, dtype in enumerate(compute_dtypes(plan, job_dtype(args))):
        group = plan.groups[number]
        theirs = {names[rank] for rank in group.ranks if rank < len(names)} & lacking
        if dtype == "bf16" and theirs:
            yield Problem(
                where=f"groups[{number}].compute_dtype" if group.compute_dtype else "--bf16",
                found=f"bf16 for groups[{number}], which has {' and '.join(sorted(theirs))}",
                expected="GPUs that support bf16 (NVIDIA: Ampere or later)",
                remedy="Use --fp16; or give each group a compute_dtype, as zorse plan does with "
                "--dtype auto.",
            )


def attention_problems(
    args: Namespace, plan: Plan, kinds: Mapping[str, GpuKind] | None = None
) -> Iterator[Problem]:
    """Flash attention asked of GPUs for which Transformer Engine has none: it would stop there.

    `kinds`: the figures of the cluster's; without them nobody said what its builds can do.
    """
    backend = getattr(args, "attention_backend", None)
    backend = getattr(backend, "name", backend)
    if backend not in ("flash", "fused") or kinds is None:
        return
    names = () if plan.cluster is None else plan.cluster.gpu_kinds or ()
    lacking = {n for n in names if n in kinds and not kinds[n].runs_flash_attention}
    if lacking:
        yield Problem(
            where="--attention-backend",
            found=f"{backend} for a plan with {' and '.join(sorted(lacking))}",
            expected="auto or unfused: Transformer Engine has flash and fused attention from "
            "compute capability 8.0 on",
            remedy="Leave the flag out: each GPU then takes the best that it has. If your build "
            "has it for these, say attention: flash under gpu_kinds of the cluster file.",
        )


def communication_dtype_problems(args: Namespace, plan: Plan) -> list[Problem]:
    """16-bit messages need fp32 sums, and in fp16 a loss scale whose overflow skips the step."""
    problems, job = [], job_dtype(args)
    for number, group in enumerate(plan.groups):
        if group.gradient_wire is None:
            continue
        where = f"groups[{number}].gradient_wire"
        kept_in_fp16 = job == "fp16" and not is_mixed(plan)
        if kept_in_fp16 and not getattr(args, "accumulate_allreduce_grads_in_fp32", False):
            problems.append(
                Problem(
                    where=where,
                    found=f'"{group.gradient_wire}", while gradients are accumulated in fp16',
                    expected="gradients accumulated in fp32",
                    remedy="Add --accumulate-allreduce-grads-in-fp32, or remove gradient_wire.",
                )
            )
        if group.gradient_wire == "fp16" and "fp16" not in compute_dtypes(plan, job):
            problems.append(
                Problem(
                    where=where,
                    found='"fp16", while nothing computes in fp16',
                    expected="a job with a loss scale, which skips a step whose gradients overflow",
                    remedy='Use "bf16", whose range is that of fp32, or remove gradient_wire.',
                )
            )
    return problems
