"""What kernels are timed with: each of them, and ways to do the same in plain torch.

A case moves a given number of bytes, read and written together, as the kernel needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from zorse_megatron.kernels.kernels import (
    AdamW,
    adamw_shard,
    norm_and_flag,
    step_torch,
    sum_parts,
)

Work = Callable[[], object]
PARTS = 4
WEIGHTS = (0.4, 0.3, 0.2, 0.1)
NUMBERS = AdamW(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)
INV_SCALE, CLIP = 2.0**-16, 0.9


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one size."""

    name: str
    num_bytes: int
    """Read and written by the kernel."""
    kernel: Work
    plain: dict[str, Work]
    """Sequences of torch's operations with the same result, compiled too."""
    not_compiled: dict[str, Work] = field(default_factory=dict)
    """More of them, which torch.compile has nothing to add to."""
    written: tuple[torch.Tensor, ...] = ()
    """What the kernel and `plain` write, unless they return it."""


def sum_parts_case(num_bytes: int, device: torch.device) -> Case:
    """Four bf16 parts into an fp32 shard."""
    numel = _elements(num_bytes, bytes_each=2 * PARTS + 4)
    received = torch.randn(PARTS, numel, device=device).bfloat16()
    parts, out = list(received.unbind()), torch.empty(numel, device=device)
    weights = torch.tensor(WEIGHTS, device=device)

    def in_turn() -> None:
        out.copy_(parts[0]).mul_(WEIGHTS[0])  # `mul(out=)` would round to bf16
        for part, weight in zip(parts[1:], WEIGHTS[1:], strict=True):
            out.add_(part, alpha=weight)

    def at_once() -> None:
        torch.sum(received.float() * weights[:, None], 0, out=out)

    return Case(
        name="sum_parts",
        num_bytes=received.nbytes + out.nbytes,
        kernel=lambda: sum_parts(out, parts, WEIGHTS),
        plain={"part by part": in_turn, "all at once": at_once},
        written=(out,),
    )


def adamw_shard_case(num_bytes: int, device: torch.device) -> Case:
    """A shard with an fp32 gradient and a bf16 copy."""
    numel = _elements(num_bytes, bytes_each=4 * 7 + 2)
    main, grad = torch.randn(numel, device=device), torch.randn(numel, device=device)
    exp_avg, exp_avg_sq = torch.zeros_like(main), torch.zeros_like(main)
    copy = torch.empty(numel, dtype=torch.bfloat16, device=device)
    scales = (torch.tensor(INV_SCALE, device=device), torch.tensor(CLIP, device=device))
    parameter = torch.nn.Parameter(main.clone())
    fused = torch.optim.AdamW([parameter], fused=True)

    def step_of_torch() -> None:
        parameter.grad = grad.mul(scales[0]).mul_(scales[1])
        fused.step()
        copy.copy_(parameter.detach())

    def operations() -> None:
        step_torch(main, exp_avg, exp_avg_sq, grad * scales[0] * scales[1], NUMBERS)
        copy.copy_(main)

    return Case(
        name="adamw_shard",
        num_bytes=7 * main.nbytes + copy.nbytes,
        kernel=lambda: adamw_shard(
            main,
            exp_avg,
            exp_avg_sq,
            grad,
            NUMBERS,
            inv_scale=scales[0],
            clip=scales[1],
            copy=copy,
        ),
        plain={"operations": operations},
        not_compiled={"torch.optim.AdamW(fused=True)": step_of_torch},
        written=(main, exp_avg, exp_avg_sq, copy),
    )


def norm_and_flag_case(num_bytes: int, device: torch.device) -> Case:
    """Three unequal fp32 shards."""
    numel = _elements(num_bytes, bytes_each=4)
    shards = torch.randn(numel, device=device).split([numel // 2, numel // 8, numel * 3 // 8])

    def two_passes() -> torch.Tensor:
        norms = [torch.linalg.vector_norm(shard).square() for shard in shards]
        return torch.stack([sum(norms), *(shard.isfinite().all() for shard in shards)])

    def in_fp64() -> torch.Tensor:
        norms = [shard.double().square().sum() for shard in shards]
        return torch.stack([sum(norms), *(shard.isfinite().all() for shard in shards)])

    return Case(
        name="norm_and_flag",
        num_bytes=sum(shard.nbytes for shard in shards),
        kernel=lambda: norm_and_flag(shards, device),
        plain={"fp32 norm, then isfinite": two_passes, "fp64 squares, then isfinite": in_fp64},
    )


CASES = (sum_parts_case, adamw_shard_case, norm_and_flag_case)


def copy_case(num_bytes: int, device: torch.device) -> Case:
    """The device's own copy, the yardstick."""
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    source.zero_()
    return Case(
        name="copy", num_bytes=2 * source.nbytes, kernel=lambda: target.copy_(source), plain={}
    )


def _elements(num_bytes: int, *, bytes_each: int) -> int:
    """A multiple of 64, as the shards of a plan are."""
    return max(num_bytes // bytes_each // 64, 1) * 64
