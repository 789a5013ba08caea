"""A REDUCE_GRAD only starts the sum; and inf and nan are looked for once per step."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.megatron import tiny_gpt
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.tiny_gpt import Setup


class HostWaits(TorchDispatchMode):
    """Counts how often the host asks for a number that the device computes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._tolist = torch.Tensor.tolist

    def __enter__(self) -> "HostWaits":
        def tolist(tensor: torch.Tensor) -> Any:
            self.found["tolist"] += 1
            return self._tolist(tensor)

        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self._tolist  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function.overloadpacket.__name__
        self.found[name] += name == "_local_scalar_dense"
        return function(*args, **(kwargs or {}))


def _chunk(setup: Setup) -> Any:
    tiny_gpt.start()
    collection = tiny_gpt.groups_of([[0, 1]], setup)
    model = tiny_gpt.build_gpt(setup, collection)
    return tiny_gpt.wrap(model, setup, collection, (3, 1))


def _begin_one_after_the_other(setup: Setup) -> list[float]:
    """Rank 1 starts only when rank 0 has told it that it goes on; returns the shard's gradients."""
    chunk = _chunk(setup)
    rank, told = dist.get_rank(), torch.zeros(1)
    tiny_gpt.set_gradients(chunk, setup, step=0, contributors=[rank])
    if rank == 1:
        dist.recv(told, 0)
    chunk.begin_grad_sync()
    if rank == 0:
        dist.send(told, 1)
    chunk.finish_grad_sync()
    assert not chunk.reduction_bytes
    mine = [p for p in chunk.parameters() if chunk.owned_part(p) != (0, 0)]
    return [chunk.gradient_piece(p, *chunk.owned_part(p)).sum().item() for p in mine]


def _reduce_at_once(setup: Setup) -> list[float]:
    chunk = _chunk(setup)
    tiny_gpt.set_gradients(chunk, setup, step=0, contributors=[dist.get_rank()])
    chunk.finish_grad_sync()
    mine = [p for p in chunk.parameters() if chunk.owned_part(p) != (0, 0)]
    return [chunk.gradient_piece(p, *chunk.owned_part(p)).sum().item() for p in mine]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_reduction_that_has_begun_lets_the_rank_go_on(overlap: bool) -> None:
    setup = Setup(overlap=overlap, bucket_size=5000 if overlap else None)
    expected = run_megatron_ranks(2, _reduce_at_once, setup)
    assert run_megatron_ranks(2, _begin_one_after_the_other, setup) == expected


def _check(setup: Setup) -> tuple[list[int], list[str]]:
    """How often the host waits with so many buckets, and what is raised for which gradients."""
    from zorse_megatron.adapter.data_parallel.ddp import NotedNorms

    chunk = _chunk(setup)
    assert len(chunk.bucket_groups) > 2
    waits, said = [], []
    for scale in (1.0, float("nan"), float("inf")):
        chunk.zero_grad_buffer()
        rank = dist.get_rank()
        tiny_gpt.set_gradients(chunk, setup, step=0, contributors=[rank], scale=scale**rank)
        with HostWaits() as host:
            chunk.begin_grad_sync()
            begun = host.found.total()
            try:
                NotedNorms(chunk.bucket_groups).look()
            except RuntimeError as error:
                said.append(str(error))
            else:
                waits += [begun, host.found.total()]
        NotedNorms(chunk.bucket_groups).look()  # what has been told is not told again
        chunk.finish_grad_sync()
    return waits, said


def test_inf_and_nan_are_told_by_the_rank_that_has_them_after_one_wait() -> None:
    (waits, said), (other_waits, told) = run_megatron_ranks(
        2, _check, Setup(overlap=True, bucket_size=3000)
    )
    assert waits == [0, 1] * 3 and not said, "rank 0's own gradients are numbers"
    assert other_waits == [0, 1]
    assert "found NaN in local grad norm for bucket #0" in told[0]
    assert "Inf in local grad norm" in told[1] or "NaN" in told[1]


def _check_with_reruns(setup: Setup) -> list[tuple[int, bool]]:
    """For finite gradients and for NaN of rank 1: waits of the host before all reductions have
    begun, and whether stock has been asked to run the step again."""
    from megatron.core import rerun_state_machine as stock

    from zorse_megatron.adapter.data_parallel.ddp import NotedNorms

    chunk = _chunk(setup)
    found = []
    for scale in (1.0, float("nan")):
        stock.destroy_rerun_state_machine()
        stock.initialize_rerun_state_machine(mode=stock.RerunMode.VALIDATE_RESULTS)
        machine = stock.get_rerun_state_machine()
        machine.state, machine.first_iteration_complete = stock.RerunState.INITIAL_RUN, True
        chunk.zero_grad_buffer()
        rank = dist.get_rank()
        tiny_gpt.set_gradients(chunk, setup, step=0, contributors=[rank], scale=scale**rank)
        with HostWaits() as host:
            chunk.begin_grad_sync()
        NotedNorms(chunk.bucket_groups).look()
        # As often as stock looks, so that a second run finds the call that failed.
        assert sum(machine.validation_counts.values()) == 2 * len(chunk.bucket_groups)
        found.append((host.found.total(), machine.rerun_requested))
        chunk.finish_grad_sync()
    stock.destroy_rerun_state_machine()
    return found


def test_stock_may_run_a_step_again_and_the_host_need_not_wait_for_each_bucket() -> None:
    first, second = run_megatron_ranks(2, _check_with_reruns, Setup(overlap=True, bucket_size=3000))
    assert first == [(0, False), (0, False)]
    assert second == [(0, False), (0, True)]


def _reduce_two_chunks(low_precision: bool) -> list[str]:
    """What a runner does with reductions that take long, and whether ranks would wait for all."""
    from zorse_megatron.adapter.model.chunk_runner import MegatronChunkRunner, StepInputs

    tiny_gpt.start()
    done: list[str] = []
    config: Any = SimpleNamespace(
        barrier_with_L1_time=True, moe_router_enable_expert_bias=False, sequence_parallel=False
    )

    def finalize(models: Any, *_: Any, pg_collection: Any, **__: Any) -> None:
        assert pg_collection.tp == "itself alone", "stock would sum over the set once more"
        done.append(f"{models[0].name} ends, barriers {config.barrier_with_L1_time}")

    config.finalize_model_grads_func = finalize
    models = {
        chunk: SimpleNamespace(
            name=str(chunk),
            shards=None,
            config=config,
            reduces_beside=low_precision,
            begin_grad_sync=lambda chunk=chunk: done.append(f"{chunk} begins"),
        )
        for chunk in (0, 1)
    }
    inputs: Any = StepInputs(
        forward_step_func=print, data_iterators={}, models=models, config=config,
        forward_only=False, collect_non_loss_data=False, first_val_step=None,
    )  # fmt: skip
    stages: Any = SimpleNamespace(at_chunk=lambda _: nullcontext(), num_chunks=2)
    collection: Any = SimpleNamespace(cp="itself alone")
    runner = MegatronChunkRunner(
        inputs=inputs, collection=collection, num_micro_batches=1, stages=stages, tied=None
    )
    for chunk in models:
        runner.reduce(chunk)
    runner._finish_reductions()
    assert config.barrier_with_L1_time
    return done


@pytest.mark.parametrize("low_precision", [False, True])
def test_copies_of_one_chunk_s_gradients_are_exchanged_at_a_time(low_precision: bool) -> None:
    """And what stock does after a reduction is not done by all ranks together."""
    (done,) = run_megatron_ranks(1, _reduce_two_chunks, low_precision)
    first, second = (f"{chunk} ends, barriers False" for chunk in (0, 1))
    if low_precision:
        assert done == ["0 begins", first, "1 begins", second]
    else:
        assert done == ["0 begins", "1 begins", first, second]
