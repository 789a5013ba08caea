"""The optimizer of a session: what it steps, where its state waits, and who calls its step."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from megatron.core.utils import get_model_config
from megatron.training import get_args

from zorse_megatron.adapter.arguments.compute_dtype import with_one_loss_scale
from zorse_megatron.adapter.checkpoint.saved_optimizer import CheckpointLayout
from zorse_megatron.adapter.memory.kept_in_host import kept_bytes_by_chunk
from zorse_megatron.adapter.memory.session_memory import share_host_memory
from zorse_megatron.adapter.optimizer.build_optimizer import build_uneven_optimizer
from zorse_megatron.adapter.optimizer.shard_update import choose_update, say_update
from zorse_megatron.adapter.optimizer.streamed_gradients import count_zeros
from zorse_megatron.adapter.parameters.exact_values import take_exact
from zorse_megatron.adapter.parameters.tied_embeddings import TiedEmbedding
from zorse_megatron.adapter.session import PlanSession
from zorse_megatron.adapter.session_executor import boundary_dtype
from zorse_megatron.kernels.dispatch import why_not_triton


def build_optimizer(  # noqa: PLR0917  (stock's signature)
    session: PlanSession,
    config: Any,
    model_chunks: list[Any],
    config_overrides: Any = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
) -> Any:
    """Build the optimizer, and let the executor call its step."""
    distributed = get_args().use_distributed_optimizer
    optimizer = build_uneven_optimizer(
        with_one_loss_scale(config, session.dtypes),
        model_chunks,
        config_overrides=config_overrides,
        pg_collection=session.collection,
        checkpoint_layout=CheckpointLayout.DISTRIBUTED
        if distributed
        else CheckpointLayout.REPLICATED,
        state_waits=session.offload.optimizer_state,
    )
    session.optimizers = list(optimizer.chained_optimizers)
    for each in session.optimizers:
        each.is_mixed = session.is_mixed
        take_exact(each)
    streams = _streams_gradients(session, model_chunks)
    updates = [
        choose_update(each, session.update, session.device, streams=streams)
        for each in session.optimizers
    ]
    say_update(updates, session.device)
    if any(group.gradient_wire for group in session.plan.groups):
        # Said now on every node: its first rank may be in a group that sends none in 16 bits.
        why_not_triton(session.device)
    _check_host_memory(session, model_chunks)
    _keep_in_host(session, streams_gradients=streams)
    session.tied = _tied_embedding(session, model_chunks, optimizer)
    _leave_update_to_list(optimizer.chained_optimizers)
    if streams:
        optimizer.count_zeros = partial(count_zeros, optimizer)
    stock_step = optimizer.step
    optimizer.step = lambda: session.optimizer_step(stock_step)
    return optimizer


def _tied_embedding(session: PlanSession, model_chunks: list[Any], optimizer: Any) -> Any:
    """What sums the tied embedding's gradient, on ranks that hold a copy; a collective call."""
    ends = {0, session.num_chunks - 1}
    if not session.tied_embeddings or len(ends) == 1:
        return None
    at_an_end = bool(ends & set(session.chunks))
    first, last = (session.plan.groups[session.plan.chunks[end].group] for end in (0, -1))
    tied = TiedEmbedding(
        model_chunks=model_chunks if at_an_end else [],
        first_ranks=sorted(first.ranks),
        last_ranks=sorted(last.ranks),
        group=session.groups.world,
    )
    tied.check_update_rule(optimizer)
    return tied if at_an_end else None


def _leave_update_to_list(optimizers: Iterable[Any]) -> None:
    """Leave the steps of chunks, and the gathers after them, to the action list.

    `_defer_param_sync` is stock's own switch for it (`DistributedOptimizer.step_with_ready_grads`).
    """
    for optimizer in optimizers:
        optimizer._defer_param_sync = True
        optimizer.steps_by_chunk = True


def _check_host_memory(session: PlanSession, models: list[Any]) -> None:
    """Before the first step, once the optimizer exists; see `share_host_memory`."""
    config = get_model_config(models[0])
    by_chunk = dict(zip(session.chunks, models, strict=True))
    on_gpu = session.host_link is not None and session.host_link.is_cuda
    share_host_memory(
        session.plan,
        session.rank,
        session.host_link,
        by_chunk,
        session.optimizers,
        actions=session.training.ranks[session.rank],
        kept_bytes=partial(
            kept_bytes_by_chunk,
            by_chunk,
            samples=max((m.size for m in session.micro_batches), default=0),
            seq_length=session.sequence_length,
            element_bytes=boundary_dtype(config).itemsize,
            logits=get_args().padded_vocab_size // config.tensor_model_parallel_size,
            last_chunk=len(session.plan.chunks) - 1,
            pinned=on_gpu,
        ),
        limit_bytes=session.host_memory_limit_bytes,
    )


def _streams_gradients(session: PlanSession, model_chunks: list[Any]) -> bool:
    """Whether the step takes gradients chunk by chunk.

    It must where they come from the host. Where they are in 16 bits and the step is made in parts
    anyway, it then makes fp32 copies of a part at a time and not of all.
    """
    offload = session.offload
    if offload.gradients:
        return True
    in_parts = offload.parameters or offload.optimizer_state
    grads = (buffer.grad_dtype for chunk in model_chunks for buffer in chunk.buffers)
    return in_parts and session.update != "fused" and any(each.itemsize < 4 for each in grads)


def _keep_in_host(session: PlanSession, *, streams_gradients: bool) -> None:
    """Let the optimizers step what waits in the host from there; before there is any state."""
    offload = session.offload
    if not (offload.parameters or offload.optimizer_state or offload.gradients):
        return

    def sample_memory() -> None:
        if session.executor is not None:
            session.executor.sample_memory()

    assert session.host_link is not None
    with session.before_first_step():
        for optimizer in session.optimizers:
            optimizer.keep_in_host(
                session.host_link,
                optimizer_state=offload.optimizer_state,
                gradients=streams_gradients,
                on_change=sample_memory,
            )
