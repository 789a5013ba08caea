"""CPU mode: stock Megatron on a machine without a GPU, over gloo.

`enable()` must run before Megatron is imported, because Megatron binds names of `torch.cuda` at
import (`core/tensor_parallel/random.py`). It replaces names of torch, for this process and its
forked children, for good; Megatron itself is not touched.
"""

import ctypes
import functools
import logging
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._device
from torch.jit._builtins import _find_builtin, _register_builtin

from zorse_megatron.errors import Problem, SeamError
from zorse_megatron.flags.torch_builds import RELEASES

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
    disable_dynamo()
    for name, stand_in in CUDA_SURFACE.items():
        owner, attribute = _owner(name)
        setattr(owner, attribute, stand_in)
    install()
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
    problems += [_missing(f"torch.cuda.{n}") for n in CUDA_SURFACE if not _exists(n)]
    problems += [_missing(f"torch.{n}") for n in FACTORIES if not hasattr(torch, n)]
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


def disable_dynamo() -> None:
    """torch.compile gains nothing on the CPU, and costs 4 s of start-up."""
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


# What `torch.cuda` answers in CPU mode: the host as Megatron's one device.
#
# Megatron-LM has no CPU path: it asks `torch.cuda` for its device, streams, events, memory and
# random numbers everywhere. Each stand-in below answers for the host (it has one random
# generator, its work is done when a call returns, its memory is the process's resident set), so
# nothing that stock computes changes. `CUDA_SURFACE` lists every name that is replaced; a name that
# is not there still raises torch's own "no NVIDIA driver" error, so nothing is covered up.
#
# Source: the uses of `torch.cuda` in megatron-core 0.19 (`training/initialize.py`,
# `core/tensor_parallel/random.py`, `core/timers.py`, `core/distributed/param_and_grad_buffer.py`,
# `core/pipeline_parallel/p2p_communication.py`, `training/utils/common_utils.py`).


# An A100's: what stock checks for older GPUs than Blackwell is checked here, too.
_CAPABILITY = (8, 0)

_torch_lazy_call = torch.cuda._lazy_call


def called_by_megatron(depth: int = 2) -> bool:
    """Whether the function `depth` frames up (2: the caller's caller) is in `megatron.*`."""
    module = sys._getframe(depth).f_globals.get("__name__", "")
    return module.startswith("megatron.")


class HostStream:
    """A queue of work that is always empty: host operations are complete when they return."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cpu")
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        recorded = event or HostEvent()
        recorded.record(self)
        return recorded

    def __enter__(self) -> "HostStream":
        return self

    def __exit__(self, *_: Any) -> None: ...


class HostEvent:
    """A point in time: what `torch.cuda.Event` is when work is complete at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded_s = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "HostEvent") -> float:
        """Milliseconds from this event to `end_event`, the unit of `torch.cuda.Event`."""
        return 1e3 * (end_event._recorded_s - self._recorded_s)


@dataclass(frozen=True, kw_only=True)
class HostProperties:
    """The host, as `torch.cuda.get_device_properties` describes a device."""

    name: str
    total_memory: int  # bytes
    multi_processor_count: int
    major: int = _CAPABILITY[0]
    minor: int = _CAPABILITY[1]


_STREAM = HostStream()


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_resident_bytes() -> int:
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return max(peak_bytes, _resident_bytes())  # the kernel brings its peak up to date now and then


def _memory_stats(device: Any = None) -> dict[str, int]:
    now, peak = _resident_bytes(), _peak_resident_bytes()
    return {
        "reserved_bytes.all.current": now,
        "allocated_bytes.all.current": now,
        "reserved_bytes.all.peak": peak,
        "allocated_bytes.all.peak": peak,
        "allocation.all.current": 0,  # the host allocator does not count them
    }


def _host_properties(device: Any = None) -> HostProperties:
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return HostProperties(
        name=f"CPU ({platform.machine()})",
        total_memory=pages * page_bytes,
        multi_processor_count=os.cpu_count() or 1,
    )


def _run_now(queued: Callable[[], Any], **kwargs: Any) -> None:
    """Megatron sets its random state through `_lazy_call`; torch's own queue stays a queue."""
    if called_by_megatron():
        queued()
    else:
        _torch_lazy_call(queued, **kwargs)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed, which calls torch.cuda.manual_seed_all in its turn.
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


CUDA_SURFACE: dict[str, Any] = {
    # Megatron sees one device; everybody else (DataLoader, torch itself) still sees none.
    "is_available": functools.partial(called_by_megatron, 1),
    "device_count": lambda: int(called_by_megatron()),
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device": lambda device: nullcontext(),
    "get_device_name": lambda device=None: _host_properties().name,
    "get_device_capability": lambda device=None: _CAPABILITY,
    "get_device_properties": _host_properties,
    # Host work is complete when the call returns.
    "Stream": HostStream,
    "Event": HostEvent,
    "stream": nullcontext,
    "set_stream": lambda stream: None,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "synchronize": lambda device=None: None,
    "is_current_stream_capturing": lambda: False,
    # One generator serves the host and "the device".
    "default_generators": (torch.default_generator,),
    "manual_seed": _manual_seed,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "random.get_rng_state": _get_rng_state,
    "random.set_rng_state": _set_rng_state,
    "_lazy_call": _run_now,
    # The device's memory is this process's.
    "memory_allocated": lambda device=None: _resident_bytes(),
    "memory_reserved": lambda device=None: _resident_bytes(),
    "device_memory_used": lambda device=None: _resident_bytes(),
    "max_memory_allocated": lambda device=None: _peak_resident_bytes(),
    "max_memory_reserved": lambda device=None: _peak_resident_bytes(),
    "memory_stats": _memory_stats,
}

# Tensors in CPU mode: a CUDA device that Megatron names means the host.
#
# Megatron writes `device="cuda"`, `device=torch.cuda.current_device()` and `.cuda()` at its call
# sites, and compares `Tensor.type()` with `"torch.cuda.FloatTensor"`. Only calls that name a CUDA
# device change; all others reach torch as they are.


_HOST = torch.device("cpu")

# Functions that create tensors and take `device=` (by keyword only, in all of them).
FACTORIES = (
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def is_cuda_device(device: Any) -> bool:
    """Whether `device` names a CUDA device; torch reads a bare integer as a CUDA index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `function(..., device=<cuda>)` mean `device="cpu"`."""

    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> Any:
        if is_cuda_device(kwargs.get("device")):
            kwargs["device"] = _HOST
        return function(*args, **kwargs)

    return create


def _make_tensor_to(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(to)
    def tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and is_cuda_device(args[0]):
            args = (_HOST, *args[1:])
        if is_cuda_device(kwargs.get("device")):
            kwargs["device"] = _HOST
        return to(self, *args, **kwargs)

    return tensor_to


def _make_tensor_type(type_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = type_(self, *args, **kwargs)
        # "torch.FloatTensor" -> "torch.cuda.FloatTensor", where Megatron compares the names.
        if isinstance(answer, str) and called_by_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return tensor_type


def install() -> None:
    """Put the wrappers in place. `cpu_mode.enable` calls this once."""
    # `with torch.device("meta")` knows the factories by identity, from the first time it is asked.
    torch.utils._device._device_constructors()
    for name in FACTORIES:
        factory = getattr(torch, name)
        wrapper = _on_host(factory)
        # torch.jit.script, too, tells by identity which function is an operator.
        _register_builtin(wrapper, _find_builtin(factory))
        setattr(torch, name, wrapper)
    tensor: Any = torch.Tensor
    for name in TENSOR_FACTORIES:
        setattr(tensor, name, _on_host(getattr(tensor, name)))
    tensor.cuda = lambda self, *_, **__: self
    tensor.to = _make_tensor_to(tensor.to)
    tensor.type = _make_tensor_type(tensor.type)
