"""Why some kinds of GPU have no cost in the requested dtypes."""

from collections.abc import Collection, Iterator, Mapping

from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.costs.same_chip import equal_kinds
from zorse_megatron.errors import Problem
from zorse_megatron.schema.gpus.gpu import DTYPE_OF, Dtype, common_dtype
from zorse_megatron.schema.plan.plan import GradientCommDtype


def communication_dtype_problems(
    wanted: GradientCommDtype | None, dtypes: Collection[Dtype]
) -> Iterator[Problem]:
    """Yield where no loss scale would notice an overflow. `dtypes`: of the kinds of GPU.

    A kind whose best type is float16 is in a group that computes in it, if no kind has float32
    alone; so the job then has a loss scale, whatever its groups are.
    """
    if wanted == "fp16" and ("float16" not in dtypes or "float32" in dtypes):
        yield Problem(
            where="communication dtype",
            found=f"fp16 for a job in {' and '.join(sorted(set(dtypes)))}",
            expected="fp16 only in a job in float16, whose loss scale notices an overflow",
            remedy="Use bf16, whose range is that of float32.",
        )


def kind_problems(computes: Mapping[str, ProfiledCompute]) -> Iterator[Problem]:
    """Yield every kind without units for its type, or without costs. `computes`: by kind."""
    for kind, compute in computes.items():
        if not compute.analytic.knows(kind) and not _is_measured(kind, compute):
            yield _no_units(kind, compute)
            continue
        try:
            compute.layer(kind, 1)
            compute.embedding(kind, 1)
            compute.head(kind, 1)
            compute.step_s(kind, 1)
        except LookupError as error:
            yield Problem(
                where=f"GPU kind {kind}",
                found=f"no cost for it ({error})",
                expected="measured times in a profile, or published figures for the kind",
                remedy="Profile it, or describe it under gpu_kinds of the cluster file.",
            )


def _is_measured(kind: str, compute: ProfiledCompute) -> bool:
    """Whether this very dtype was measured on it; another one does not count."""
    same = set(equal_kinds(kind, compute.kinds))
    return any(
        times.gpu_kind in same and times.dtype == compute.dtype for times in compute.profile.times
    )


def _no_units(kind: str, compute: ProfiledCompute) -> Problem:
    own = common_dtype([compute.kinds[kind]])
    return Problem(
        where=f"GPU kind {kind}",
        found=f"no hardware support for {compute.dtype}",
        expected="a supported dtype, or measured times in this one",
        remedy="With zorse plan --dtype auto, every group computes in a dtype its GPUs support, "
        f"{own} with a {kind}. Or use --dtype {DTYPE_OF[own]} for all groups, if all kinds "
        "support it. Profile it in this dtype if it does support it.",
    )
