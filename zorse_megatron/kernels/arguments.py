"""Argument checks of the kernels, and the pieces in which plain torch works."""

from collections.abc import Iterator, Mapping
from itertools import combinations

import torch

NARROW = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *NARROW)

CHUNK = 1 << 22
"""Elements that plain torch works on at a time: few launches, and a few temporaries of 16 MiB (in
fp64 of 32 MiB), however long the shards are and however many parts are added."""


class Problems:
    """Collects what is wrong with a call, to raise it all at once."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.found: list[str] = []

    def need(self, fits: bool, problem: str) -> None:
        """Note a problem where something does not fit."""
        if not fits:
            self.found.append(problem)

    def need_flat(
        self,
        name: str,
        tensor: torch.Tensor,
        dtypes: tuple[torch.dtype, ...],
        like: torch.Tensor | None = None,
    ) -> None:
        """A contiguous 1-D tensor of one of `dtypes`, as long as `like` and on its device."""
        self.need(
            tensor.ndim == 1 and tensor.is_contiguous(),
            f"found {name} of shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            "expected it 1-D and contiguous",
        )
        self.need_dtype(name, tensor, dtypes)
        if like is not None:
            self.need(
                tensor.numel() == like.numel() and tensor.device == like.device,
                f"found {name} with {tensor.numel()} elements on {tensor.device}; expected "
                f"{like.numel()} on {like.device}",
            )

    def need_dtype(self, name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        """A tensor of one of `dtypes`."""
        expected = " or ".join(map(str, dtypes))
        self.need(tensor.dtype in dtypes, f"found {name} in {tensor.dtype}; expected {expected}")

    def need_apart(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Contiguous tensors; no two share memory, as one is written while another is read."""
        for (name, one), (other, two) in combinations(tensors.items(), 2):
            self.need(
                not _overlap(one, two),
                f"found {name} and {other} in the same memory; expected them apart",
            )

    def stop(self) -> None:
        """Raise ValueError if there is any problem."""
        if self.found:
            raise ValueError(f"{self.kernel}: " + "; ".join(self.found))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    start, stop = one.data_ptr(), one.data_ptr() + one.nbytes
    return max(start, other.data_ptr()) < min(stop, other.data_ptr() + other.nbytes)


def chunks(numel: int) -> Iterator[slice]:
    """Cut `numel` elements into slices of at most CHUNK."""
    return (slice(start, min(start + CHUNK, numel)) for start in range(0, numel, CHUNK))
