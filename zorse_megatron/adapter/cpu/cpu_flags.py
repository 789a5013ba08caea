"""Stock flags on a CPU: those that every run needs, and those that cannot work.

Each entry was found by running megatron-core 0.19.2 without it (or with it) on a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zorse_megatron.errors import FlagError, Problem
from zorse_megatron.flags.scan import last_values
from zorse_megatron.software.needed_flags import NeededFlag, lacking


@dataclass(frozen=True, kw_only=True)
class _Refused:
    """A flag that cannot work on a CPU, except with one of `harmless`."""

    flag: str
    why: str
    harmless: tuple[str, ...] = ()


_NEEDED = (
    NeededFlag(
        flag="--transformer-impl",
        value="local",
        why="Transformer Engine has CUDA kernels only",
    ),
    NeededFlag(
        flag="--distributed-backend",
        value="gloo",
        why="NCCL moves data between GPUs only",
    ),
    NeededFlag(
        flag="--no-gradient-accumulation-fusion",
        why="the fused weight gradient is a CUDA extension of Apex or Transformer Engine",
    ),
    NeededFlag(
        flag="--no-persist-layer-norm",
        why="the persistent LayerNorm is a CUDA extension of Apex",
    ),
    NeededFlag(
        flag="--no-masked-softmax-fusion",
        why="the fused softmax of bf16 and fp16 is a CUDA extension of Megatron-LM",
    ),
    NeededFlag(
        flag="--no-rope-fusion",
        why="the fused rotary embedding is a Transformer Engine kernel",
    ),
)

_REFUSED = (
    # Stock would ignore these three without a word and train something else.
    _Refused(
        flag="--attention-backend",
        harmless=("auto", "unfused"),
        why="flash and fused attention are Transformer Engine's, and stock's check of `local` "
        "crashes (training/arguments.py indexes --spec, which is absent)",
    ),
    _Refused(flag="--fp8-format", why="FP8 is done by Transformer Engine"),
    _Refused(flag="--fp4-format", why="FP4 is done by Transformer Engine"),
    # With these it stops, later and with less to go by.
    _Refused(
        flag="--sequence-parallel",
        why="torch's LayerNorm, which the local implementation uses, does not support it",
    ),
    _Refused(
        flag="--context-parallel-size",
        harmless=("1",),
        why="only Transformer Engine's attention supports context parallelism",
    ),
    _Refused(flag="--enable-cuda-graph", why="a CUDA graph needs a GPU"),
    _Refused(flag="--external-cuda-graph", why="a CUDA graph needs a GPU"),
    _Refused(flag="--cuda-graph-impl", harmless=("none",), why="a CUDA graph needs a GPU"),
    _Refused(flag="--tp-comm-overlap", why="the overlap is done by Transformer Engine"),
    _Refused(
        flag="--use-precision-aware-optimizer",
        why="it needs the FusedAdam of Transformer Engine",
    ),
    _Refused(
        flag="--optimizer-cpu-offload",
        why="the parameters are on the CPU already and stock counts none to offload",
    ),
    _Refused(
        flag="--async-save",
        why="stock snapshots GPU tensors by copying them to the host; on the host that is no "
        "copy, and training would write into the checkpoint while it is saved",
    ),
)


def cpu_flags() -> list[str]:
    """Return the stock flags that every CPU run needs."""
    return [word for needed in _NEEDED for word in needed.words]


def with_cpu_flags(argv: Sequence[str], *, has_plan: bool = False) -> list[str]:
    """Return `argv` (without the program) followed by the CPU flags that it lacks.

    `has_plan`: torch's norms are made to support sequence parallelism then (`model.split_norms`).
    Raises FlagError with every flag in it that cannot work on a CPU.
    """
    ours = [each.flag for each in (*_NEEDED, *_REFUSED)]
    given = {flag: value or "" for flag, value in last_values(argv, ours).items()}
    if has_plan:
        given.pop("--sequence-parallel", None)
    if problems := _problems(given):
        raise FlagError("These flags cannot work without a GPU", problems)
    return [*argv, *(word for needed in lacking(_NEEDED, given) for word in needed.words)]


def _problems(given: dict[str, str]) -> list[Problem]:
    problems = []
    for needed in _NEEDED:
        if needed.value is not None and given.get(needed.flag, needed.value) != needed.value:
            problems.append(_problem(needed.flag, given, needed.value, needed.why))
    for refused in _REFUSED:
        if refused.flag in given and given[refused.flag] not in refused.harmless:
            expected = " or ".join(refused.harmless) or "no such flag"
            problems.append(_problem(refused.flag, given, expected, refused.why))
    return problems


def _problem(flag: str, given: dict[str, str], expected: str, why: str) -> Problem:
    return Problem(
        where=flag,
        found=given[flag] or "the flag",
        expected=expected,
        remedy=f"Leave it out or run on a GPU: {why}.",
    )
