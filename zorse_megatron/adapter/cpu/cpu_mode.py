"""CPU mode: stock Megatron on a machine without a GPU, over gloo.

`enable()` must run before Megatron is imported, because Megatron binds names of `torch.cuda` at
import (`core/tensor_parallel/random.py`). It replaces names of torch, for this process and its
forked children, for good; Megatron itself is not touched.
"""

import ctypes
import logging
import os
import sys
from typing import Any

import torch

from zorse_megatron.adapter.cpu import cpu_device, cpu_tensors
from zorse_megatron.errors import Problem, SeamError
from zorse_megatron.software.machine_flags import with_cpu_flags
from zorse_megatron.software.torch_builds import RELEASES

__all__ = ["enable", "enabled", "needed", "with_cpu_flags"]

_torch_is_available = torch.cuda.is_available
_enabled = False
# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def needed() -> bool:
    """Whether no CUDA GPU is visible, so that Megatron needs CPU mode."""
    return not _torch_is_available()


def enabled() -> bool:
    """Whether `enable()` has been called in this process or in the one it was forked from."""
    return _enabled


def enable() -> None:
    """Make stock Megatron run on the CPU. Idempotent; call it before Megatron is imported.

    Raises SeamError when Megatron is imported already, when a GPU is visible, or when a name that
    is to be replaced is not in this torch.
    """
    global _enabled  # noqa: PLW0603  (once per process, never back)
    if _enabled:
        return
    problems = _obstacles()
    if problems:
        raise SeamError("CPU mode cannot be enabled", problems)
    _disable_dynamo()
    for name, stand_in in cpu_device.CUDA_SURFACE.items():
        owner, attribute = _owner(name)
        setattr(owner, attribute, stand_in)
    cpu_tensors.install()
    _keep_freed_memory()
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_no_rng_alarm)
    _enabled = True
    if os.environ.get("RANK", "0") == "0":
        print("zorse: no GPU found: Megatron runs on CPU over gloo", flush=True)


def _owner(name: str) -> tuple[Any, str]:
    *parents, attribute = name.split(".")
    owner: Any = torch.cuda
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute


def _obstacles() -> list[Problem]:
    problems = []
    imported = sorted(m for m in sys.modules if m in ("megatron.core", "megatron.training"))
    if imported:
        problems.append(
            Problem(
                where="cpu_mode.enable()",
                found=f"{' and '.join(imported)} imported already",
                expected="to be called before any import of Megatron",
                remedy="Call it at the top of the program, or start the program with "
                "`python -m zorse_megatron.pretrain`, which does.",
            )
        )
    if not needed():
        problems.append(
            Problem(
                where="cpu_mode.enable()",
                found=f"{torch.cuda.device_count()} visible CUDA GPU(s)",
                expected="none",
                remedy="Run on the GPU, or hide it with CUDA_VISIBLE_DEVICES= (empty).",
            )
        )
    problems += [_missing(f"torch.cuda.{n}") for n in cpu_device.CUDA_SURFACE if not _exists(n)]
    problems += [_missing(f"torch.{n}") for n in cpu_tensors.FACTORIES if not hasattr(torch, n)]
    return problems


def _exists(name: str) -> bool:
    try:
        owner, attribute = _owner(name)
    except AttributeError:
        return False
    return hasattr(owner, attribute)


def _missing(name: str) -> Problem:
    return Problem(
        where=name,
        found=f"no such name in torch {torch.__version__}",
        expected="a name that CPU mode replaces",
        remedy=f"Install torch {RELEASES[-1]} to {RELEASES[0]}, or run on a GPU.",
    )


def _keep_freed_memory() -> None:
    """Let the C library keep what is freed, as torch's caching allocator does on a GPU.

    By default it gives activations back to the kernel and faults them in again in the next
    micro-batch: 5,000 to 25,000 page faults in each iteration of a small GPT, up to a fifth of
    its time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _disable_dynamo() -> None:
    """torch.compile gains nothing here and costs 4 s of start-up."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    dynamo_config = sys.modules.get("torch._dynamo.config")
    if dynamo_config is not None:  # it has read the variable already
        dynamo_config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"  # type: ignore[attr-defined]


def _is_no_rng_alarm(record: logging.LogRecord) -> bool:
    """Drop stock's warning that the host's random state moved while the device's was in use.

    On a GPU that is a mistake; here both are one generator, so it is bound to move
    (`CudaRNGStatesTracker.fork`).
    """
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
