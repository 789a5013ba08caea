"""Tensors in CPU mode: a CUDA device that Megatron names means the host.

Megatron writes `device="cuda"`, `device=torch.cuda.current_device()` and `.cuda()` at its call
sites, and compares `Tensor.type()` with `"torch.cuda.FloatTensor"`. Only calls that name a CUDA
device change; all others reach torch as they are.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device
from torch.jit._builtins import _find_builtin, _register_builtin

from zorse_megatron.adapter.cpu.cpu_device import called_by_megatron

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


def _tensor_cuda(self: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
    return self


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
    tensor.cuda = _tensor_cuda
    tensor.to = _make_tensor_to(tensor.to)
    tensor.type = _make_tensor_type(tensor.type)
