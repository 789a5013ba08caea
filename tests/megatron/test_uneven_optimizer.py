"""Unequal shards against a stock replicated optimizer that sees the same gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.megatron import tiny_gpt
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.tiny_gpt import Setup
from zorse_megatron.flags.check import is_refused
from zorse_megatron.flags.table import row_of

WEIGHTS = ((3, 1, 0), (1, 1, 1), (0, 1, 0))


def _largest_difference(ours: Any, stock: Any, setup: Setup) -> float:
    mine, theirs = tiny_gpt.weights_of(ours, setup), tiny_gpt.weights_of(stock, setup)
    assert mine.keys() == theirs.keys()
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How four steps are made and compared; at `overflow_step` one rank's gradients overflow."""

    setup: Setup = field(default_factory=Setup)
    tolerance: float = 0.0
    overflow_step: int = -1
    update: str = "stock"
    """What updates shards; "some": on two of three ranks in one pass each."""
    weights_list: Sequence[Sequence[float]] = WEIGHTS[:1]


def _compare_all(cases: Mapping[str, Steps]) -> None:
    for name, case in cases.items():
        for weights in case.weights_list:
            try:
                _compare_steps(weights, case)
            except AssertionError as error:
                error.add_note(f"case {name}, shard weights {weights}")
                raise


def _compare_steps(weights: Sequence[float], case: Steps) -> None:
    """Four steps with gradients by hand."""
    from zorse_megatron.adapter.optimizer.shard_update import choose_update

    tiny_gpt.start()
    setup, tolerance, overflow_step = case.setup, case.tolerance, case.overflow_step
    collection = tiny_gpt.groups_of([[0, 1, 2]], setup)
    ours, our_optimizer = tiny_gpt.make_ours(setup, collection, weights)
    (part,) = our_optimizer.chained_optimizers
    # Ranks need not agree: GPUs of one job differ in what their kernels run in.
    mine_is = case.update if case.update != "some" else ("fused", "stock", "fused")[dist.get_rank()]
    said = choose_update(part, mine_is, torch.device("cpu"))  # type: ignore[arg-type]
    assert ("one pass each" in said) == (mine_is == "fused")
    stock, stock_optimizer = tiny_gpt.make_stock(setup)
    for step in range(4):
        rank = dist.get_rank()
        parts = [rank] if rank != 2 else [2, 3, 4]  # unequal numbers of micro-batches
        # Adam divides a factor of all steps out again; that of a single step must be clipped.
        size = 4.0 if step == 2 else 1.0
        scales = [float("inf") if step == overflow_step and r == 1 else size for r in range(3)]
        tiny_gpt.set_gradients(ours, setup, step=step, contributors=parts, scale=scales[rank])
        every = [0, 1, 2, 3, 4]
        tiny_gpt.set_gradients(stock, setup, step=step, contributors=every, scale=max(scales))
        mine = tiny_gpt.reduce_and_step(ours, our_optimizer)
        theirs = tiny_gpt.reduce_and_step(stock, stock_optimizer)
        assert mine[0] == theirs[0] == (step != overflow_step)
        if mine[0]:
            near = 1e-6 if setup.grad_reduce_in_fp32 else tolerance
            assert mine[1] == pytest.approx(theirs[1], rel=near)
            assert not setup.clip_grad or theirs[1] > setup.clip_grad, "nothing is clipped"
        assert mine[2] == theirs[2]
        assert our_optimizer.get_loss_scale() == stock_optimizer.get_loss_scale()
        assert _largest_difference(ours, stock, setup) <= tolerance
    assert part.step_count == 4 - (overflow_step >= 0)
    owned = sum(p.numel() for p in part.get_parameters())
    assert (owned == 0) == (weights[dist.get_rank()] == 0)
    rounded = setup.dtype != torch.float32 and mine_is == "stock"
    assert _num_copies(part) == (len(part.owned_shards) if rounded else 0)


def _num_copies(optimizer: Any) -> int:
    """How many tensors are copied after the step; fp32 parameters are stepped where they are."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten.copy_.default
            return func(*args, **(kwargs or {}))

    with Copies() as copies:
        for chunk in optimizer.model_chunks if not optimizer.copies_in_step else ():
            optimizer.copy_main_to_model(chunk)
    return copies.count


BF16, FP16 = torch.bfloat16, torch.float16
CLIPPED = 2.4e-7  # two units in the last place of 1.0


def test_steps_equal_stock() -> None:
    """fp16: an overflow on one rank skips the step on all."""
    # bf16 gradients are rounded after each addition, so the order of ranks shows there.
    in_bf16 = Setup(dtype=BF16, grad_reduce_in_fp32=False, clip_grad=0.5)
    cases = {
        "fp32": Steps(weights_list=WEIGHTS),
        "fp32-clip": Steps(setup=Setup(clip_grad=0.5), tolerance=CLIPPED),
        "bf16": Steps(setup=Setup(dtype=BF16)),
        "bf16-clip-bf16-gradients": Steps(setup=in_bf16, tolerance=1e-3),
        "fp16-overflow": Steps(
            setup=Setup(dtype=FP16, clip_grad=0.005), tolerance=1e-3, overflow_step=1
        ),
    }
    run_megatron_ranks(3, _compare_all, cases, timeout_s=120)


def test_fused_update_of_shards_equals_stock() -> None:
    cases = {
        "fp32": Steps(update="some", weights_list=WEIGHTS),
        "bf16": Steps(setup=Setup(dtype=BF16), update="some"),
        # The loss scale is a power of two, so to unscale rounds nothing.
        "fp16-overflow": Steps(setup=Setup(dtype=FP16), overflow_step=1, update="some"),
        # Norms agree to rounding, and so does what is multiplied by the clip coefficient.
        "fp32-clip": Steps(setup=Setup(clip_grad=0.5), tolerance=CLIPPED, update="fused"),
        # So a weight may be rounded the other way: one unit in the last place of 1.0 in fp16.
        "fp16-both": Steps(
            setup=Setup(dtype=FP16, clip_grad=0.005),
            tolerance=2.0**-10,
            overflow_step=1,
            update="some",
        ),
    }
    run_megatron_ranks(3, _compare_all, cases, timeout_s=120)


def _steps_with_a_copy(update: str) -> list[tuple[bool, float, float]]:
    """Steps of the last stage, whose output layer is a copy of the embedding: it is in no norm.

    Its gradient is large, then infinite, then that of another parameter is.
    """
    from zorse_megatron.adapter.optimizer.shard_update import choose_update

    tiny_gpt.start()
    setup = Setup(dtype=torch.float16, clip_grad=0.005, stage=1, num_stages=2)
    chunk, optimizer = tiny_gpt.make_ours(setup, tiny_gpt.groups_of([[0]], setup), (1,))
    (part,) = optimizer.chained_optimizers
    choose_update(part, update, torch.device("cpu"))  # type: ignore[arg-type]
    found = []
    copy, other = "output_layer.weight", "fc1.weight"
    for step, (ending, factor) in enumerate([(copy, 1e3), (copy, torch.inf), (other, torch.inf)]):
        tiny_gpt.set_gradients(chunk, setup, step=step, contributors=[0])
        for name, parameter in chunk.named_parameters():
            if name.endswith(ending):
                parameter.main_grad.mul_(factor)
        success, norm, _ = tiny_gpt.reduce_and_step(chunk, optimizer)
        found.append((success, norm if success else 0.0, optimizer.get_loss_scale().item()))
    copies = [shard for shard in part.get_parameters() if getattr(shard, "shared", False)]
    assert len(copies) == 1
    return found


def test_a_copy_of_the_embedding_overflows_but_is_in_no_norm() -> None:
    (stock,), (fused,) = (run_megatron_ranks(1, _steps_with_a_copy, u) for u in ("stock", "fused"))
    assert [step[0] for step in stock] == [True, False, False]
    for mine, theirs in zip(fused, stock, strict=True):
        assert mine == (theirs[0], pytest.approx(theirs[1], rel=1e-6), theirs[2])


def _train(chunk: Any, optimizer: Any, *, rows: Sequence[int], step: int) -> float:
    """One step of real forwards and backwards, one row per micro-batch; returns the norm."""
    for row in rows:
        dice = torch.Generator().manual_seed(100 * step + row)
        tokens = torch.randint(tiny_gpt.VOCAB, (1, tiny_gpt.SEQUENCE), generator=dice)
        positions = torch.arange(tiny_gpt.SEQUENCE)[None]

        def backward(tokens: torch.Tensor = tokens, positions: torch.Tensor = positions) -> None:
            mask = torch.triu(torch.ones(1, 1, *[tiny_gpt.SEQUENCE] * 2, dtype=torch.bool), 1)
            chunk(tokens, positions, mask, labels=tokens.roll(-1, 1)).sum().backward()

        if row == rows[-1]:
            backward()
        else:
            with chunk.no_sync():
                backward()
    return tiny_gpt.reduce_and_step(chunk, optimizer, divide_by=5.0 * tiny_gpt.SEQUENCE)[1]


def _compare_trainings() -> None:
    for weights in WEIGHTS[:2]:
        for overlap in (False, True):
            bucket_size = 2000 if overlap else None
            setup = Setup(clip_grad=1.0, overlap=overlap, bucket_size=bucket_size)
            try:
                _compare_training(weights, setup)
            except AssertionError as error:
                error.add_note(f"shard weights {weights}, overlap {overlap}")
                raise


def _compare_training(weights: Sequence[float], setup: Setup) -> None:
    tiny_gpt.start()
    collection = tiny_gpt.groups_of([[0, 1, 2]], setup)
    ours, our_optimizer = tiny_gpt.make_ours(setup, collection, weights)
    stock, stock_optimizer = tiny_gpt.make_stock(setup)
    assert (len(ours.bucket_groups) > 3) == setup.overlap
    # Each rank in turn has no micro-batch: in the first step, later, and never.
    splits = [([], [0, 1], [2, 3, 4]), ([0, 1, 2, 3], [], [4]), ([0], [1, 2], [3, 4]), ([], [0, 1, 2, 3, 4], [])]  # fmt: skip # noqa: E501
    for step, split in enumerate(splits):
        mine = _train(ours, our_optimizer, rows=split[dist.get_rank()], step=step)
        theirs = _train(stock, stock_optimizer, rows=[0, 1, 2, 3, 4], step=step)
        assert mine == pytest.approx(theirs, rel=1e-5)
    assert _largest_difference(ours, stock, setup) < 1e-5


def test_training_with_idle_ranks_equals_stock() -> None:
    run_megatron_ranks(3, _compare_trainings, timeout_s=120)


def _skip_large_norms() -> list[tuple[bool, int]]:
    tiny_gpt.start()
    setup = Setup(grad_norm_skip_threshold=5.0)
    collection = tiny_gpt.groups_of([[0, 1]], setup)
    chunk, optimizer = tiny_gpt.make_ours(setup, collection, (1, 0))
    results = []
    for step, scale in enumerate([0.1, 10.0, 0.1]):
        tiny_gpt.set_gradients(chunk, setup, step=step, contributors=[0], scale=scale)
        success, _, _ = tiny_gpt.reduce_and_step(chunk, optimizer)
        results.append((success, optimizer.chained_optimizers[0].step_count))
    return results


def test_too_large_norms_skip_the_step_on_ranks_that_own_nothing_too() -> None:
    results = run_megatron_ranks(2, _skip_large_norms)
    assert results == [[(True, 1), (False, 1), (True, 2)]] * 2


def _refuse_weights() -> None:
    tiny_gpt.start()
    setup = Setup()
    model = tiny_gpt.build_gpt(setup, collection := tiny_gpt.groups_of([[0]], setup))
    with pytest.raises(ValueError, match="one per rank"):
        tiny_gpt.wrap(model, setup, collection, (1, 2))


def test_a_weight_too_many_is_refused() -> None:
    run_megatron_ranks(1, _refuse_weights)


def test_options_that_unequal_shards_cannot_keep_are_refused_as_flags() -> None:
    options = (
        "num_distributed_optimizer_instances ddp_average_in_collective use_megatron_fsdp nccl_ub "
        "ddp_reduce_scatter_with_fp32_accumulation fp8_param_gather fp4_param_gather "
        "expert_tensor_parallel_size optimizer optimizer_cpu_offload use_layer_wise_param_layout "
        "overlap_param_gather_with_optimizer_step reuse_grad_buf_for_mxfp8_param_ag"
    )
    assert all(row_of()[name].refuses for name in options.split())
    assert is_refused("optimizer", "lion")
    assert not any(is_refused("optimizer", each) for each in ("adam", "muon", "sgd"))
