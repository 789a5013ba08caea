"""What `torch.cuda` answers in CPU mode: the host as Megatron's one device.

Megatron-LM has no CPU path: it asks `torch.cuda` for its device, streams, events, memory and
random numbers everywhere. Each stand-in below answers for the host (it has one random
generator, its work is done when a call returns, its memory is the process's resident set), so
nothing that stock computes changes. `CUDA_SURFACE` lists every name that is replaced; a name that
is not there still raises torch's own "no NVIDIA driver" error, so nothing is covered up.

Source: the uses of `torch.cuda` in megatron-core 0.19 (`training/initialize.py`,
`core/tensor_parallel/random.py`, `core/timers.py`, `core/distributed/param_and_grad_buffer.py`,
`core/pipeline_parallel/p2p_communication.py`, `training/utils/common_utils.py`).
"""

import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# Megatron asserts `CUDA_DEVICE_MAX_CONNECTIONS=1` for devices older than this (Blackwell), a rule
# about CUDA work queues that means nothing on a CPU (`training/arguments.py`).
_CAPABILITY = (10, 0)

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


def _is_available() -> bool:
    return called_by_megatron()


def _device_count() -> int:
    return int(called_by_megatron())


@contextmanager
def _stream(stream: HostStream | None) -> Iterator[HostStream | None]:
    yield stream


@contextmanager
def _device(device: Any) -> Iterator[None]:
    yield


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
    "is_available": _is_available,
    "device_count": _device_count,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device": _device,
    "get_device_name": lambda device=None: _host_properties().name,
    "get_device_capability": lambda device=None: _CAPABILITY,
    "get_device_properties": _host_properties,
    # Host work is complete when the call returns.
    "Stream": HostStream,
    "Event": HostEvent,
    "stream": _stream,
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
