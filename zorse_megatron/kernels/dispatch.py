"""Decides, once and only here, whether kernels run in Triton or in plain torch."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

from zorse_megatron.gpus.gpu import TRITON_FROM, spell
from zorse_megatron.log import say

Kernel = Callable[..., Any]


def pick(name: str, device: torch.device, in_torch: Kernel) -> Kernel:
    """Return the Triton version of a kernel where it runs on `device`, else `in_torch`."""
    if why_not_triton(device) is not None:
        return in_torch
    from zorse_megatron.kernels.on_triton import KERNELS

    return KERNELS[name]


@cache
def why_not_triton(device: torch.device) -> str | None:
    """Why the kernels run in plain torch on `device`; None if they run in Triton.

    Says it when it is first asked, on the first rank of each node and of each kind of GPU in it.
    """
    reason = _reason(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    chosen = "in Triton" if reason is None else f"in plain torch ({reason})"
    say_by_kind(f"kernels run {chosen} on {where}", device)
    return reason


def say_by_kind(line: str, device: torch.device) -> None:
    """Print what depends on the GPU, where no other rank may have the same to say.

    That is a node's first rank, and where a node has several kinds of GPUs the first of each, as
    far as this process sees the GPUs before its own.
    """
    others = range(device.index or 0) if device.type == "cuda" else ()
    kinds = {torch.cuda.get_device_name(number) for number in others}
    is_another = bool(kinds) and torch.cuda.get_device_name(device) not in kinds
    say(line, on_each_node=True, everywhere=is_another)


def _reason(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "Triton needs a GPU"
    if torch.version.hip is not None:
        return "they have not been tried on ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < TRITON_FROM:
        return (
            f"compute capability {spell(capability)}; Triton serves {spell(TRITON_FROM)} and later"
        )
    return _broken(device)


def _broken(device: torch.device) -> str | None:
    """Whether Triton is there and can compile, start and finish a kernel on this device."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError as error:
        return f"no module {error.name}"
    except Exception as error:
        return f"Triton does not load: {_first_line(error)}"
    try:
        return _probe(device)
    except Exception as error:  # of the compiler, the driver, the linker: whatever it is
        return f"Triton does not work: {_first_line(error)}"


def _probe(device: torch.device) -> str | None:
    from zorse_megatron.kernels.on_triton import KERNELS

    # Before 8.0 there are no instructions for bf16: Triton converts it bit by bit.
    narrow = torch.full((3,), 4.0, device=device, dtype=torch.bfloat16)
    parts = (torch.full((3,), 3.0, device=device), narrow)
    total = torch.full((3,), torch.nan, device=device)
    KERNELS["sum_parts"](total, parts, (1.0, 2.0))
    found = total.tolist()
    return None if found == [11.0] * 3 else f"Triton found 3 + 2 * 4 to be {found}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


# What the kernels take, and the pieces in which plain torch works.


FLOATS = (torch.float32, torch.bfloat16, torch.float16)

CHUNK = 1 << 22
"""Elements that plain torch works on at a time: few launches, and a few temporaries of 16 MiB (in
fp64 of 32 MiB), however long the shards are and however many parts are added."""


def check_flat(
    kernel: str,
    tensors: Mapping[str, torch.Tensor],
    like: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> None:
    """Triton would read and write beyond a tensor that does not fit.

    Raises ValueError unless all are contiguous, 1-D and of one of `dtypes`, with as many elements
    as `like`, on its device.
    """
    wrong = [
        f"{name} of shape {tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
        for name, tensor in tensors.items()
        if not (tensor.is_contiguous() and tensor.shape == (like.numel(),))
        or tensor.dtype not in dtypes
        or tensor.device != like.device
    ]
    if wrong:
        raise ValueError(
            f"{kernel}: found {'; '.join(wrong)}; expected {like.numel()} contiguous elements in "
            f"{' or '.join(map(str, dtypes))} on {like.device}"
        )


def chunks(numel: int) -> Iterator[slice]:
    """Cut `numel` elements into slices of at most CHUNK."""
    return (slice(start, min(start + CHUNK, numel)) for start in range(0, numel, CHUNK))
