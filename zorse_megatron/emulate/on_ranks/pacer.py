"""Gives every layer's forward and backward, and the optimizer step, the emulated GPU's time.

The tiny model computes as always; only the rank's clock moves on by what the cost models say for
the real one. A layer's time passes when its forward returns, and when its backward begins, so that
what follows (a send, the reduction of its gradients) starts after it. A forward within a backward
is a recomputation. Nothing else takes time: like the planner's costs, it has no gaps on the host.

In a tensor-parallel group attention and MLP of a layer have a time each, which forward passes
before the product that ends in a sum over the TP group. The sums are Megatron's own collectives, so
a rank waits there for the slowest of its TP group. Ranks that share experts compute what is done
with their own samples before tokens leave, and rows of their experts between exchanges; while
gradients of tokens go back last, they compute those of experts' weights.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zorse_megatron.adapter.data_parallel.ddp import UnevenDistributedDataParallel
from zorse_megatron.adapter.model.chunk_view import ChunkView, number_of_layer
from zorse_megatron.adapter.model.overlapped_layer import Halves
from zorse_megatron.costs.interface import (
    ComputeCost,
    DtypeCosts,
    LayerTimes,
    ModelSection,
    PassTimes,
    RecomputeMode,
)
from zorse_megatron.emulate.conductor import RankClock
from zorse_megatron.emulate.emulated_job import EmulatedJob
from zorse_megatron.emulate.on_ranks.host_copies import EmulatedHostLink
from zorse_megatron.emulate.on_ranks.memory_cap import MemoryCap
from zorse_megatron.emulate.on_ranks.model_sizes import ModelSizes


class Pacer:
    """The computations of one rank."""

    def __init__(
        self,
        clock: RankClock,
        job: EmulatedJob,
        rank: int,
        *,
        sizes: ModelSizes,
        cap: MemoryCap,
    ) -> None:
        """`rank`: of the job; what has happened is written to its report after each step."""
        self.clock = clock
        self.compute = job.costs[rank].compute
        self.sizes = sizes
        self.cap = cap
        self.kind = job.kinds[rank]
        self.report = job.report(rank)
        self.chunks: list[ChunkView] = []
        bytes_per_s = job.host_bytes_per_s[rank]
        self.host = EmulatedHostLink(clock, sizes, self.chunks, bytes_per_s=bytes_per_s)
        cap.chunks, cap.host = self.chunks, self.host
        sizes.on_operation = cap.look  # a replica without micro-batches does nothing else
        sizes.on_exchange = cap.check
        self.norms_s: list[float] = []
        """When the norm of each training step was known."""
        self._norm_is_noted = False
        self.spans: list[tuple[str, float, float]] = []
        """What the GPU did in the last iteration, from norm to norm, and when."""
        self._spans: list[tuple[str, float, float]] = []
        """And since then."""
        perturbation, gpu = job.perturbation, job.gpus[rank]
        self._slowed = partial(perturbation.factor_in, rank=gpu, kind=self.kind)
        self._iteration = 1
        self._jitter = perturbation.jitter_of(gpu)
        self._factor = self._slowed(self._iteration)
        self._splits = False
        """Whether gradients of weights are computed apart from backwards."""
        self._left: dict[Any, deque[int]] = {}
        """Layer -> samples of its backwards whose weight gradients are to be computed."""
        self._costs: dict[Any, DtypeCosts] = {}
        """Layer -> its costs."""
        self._stepped: Any = None
        self._num_stepped = 0
        """Elements, or chunks, of an update that is made in parts."""
        register_optimizer_step_pre_hook(self._step)

    def watch(self, chunk: ChunkView) -> None:
        """Pace a chunk of the model."""
        self.chunks.append(chunk)
        self.sizes.add(chunk)
        chunk.model.register_forward_pre_hook(self._begin_forward)
        chunk.model.register_forward_hook(self._end_forward)
        for number, layer in enumerate(chunk.layers):
            recomputed = number < chunk.num_recomputed
            how: RecomputeMode = "full" if recomputed else chunk.recompute
            self._costs[layer] = self.sizes.of_layer(number_of_layer(layer))
            if self.sizes.in_tp_group:
                self._watch_layer_of_tp_group(layer, how)
            elif self.sizes.sharing is not None:
                self._watch_shared_experts(layer, how)
            else:
                layer.register_forward_hook(partial(self._layer, how))
        for layer, weight in zip(chunk.layers, chunk.delayed_weights, strict=False):
            self._splits = True
            if self.sizes.sharing is None or not _has_experts(layer):
                self._left[layer] = left = deque[int]()
                weight.register_hook(partial(self._weight_gradients, layer, left))
        if chunk.embedding is not None:
            self._watch_embedding(chunk.embedding)
        if chunk.output_layer is not None:
            chunk.output_layer.register_forward_pre_hook(self._entering("head"))
            chunk.output_layer.register_forward_hook(self._head)

    def _watch_layer_of_tp_group(self, layer: Any, how: RecomputeMode) -> None:
        layer.register_forward_pre_hook(self._entering("layer"))
        attention, mlp, half = layer.self_attention, layer.mlp, partial(self._half, layer, how)
        attention.linear_proj.register_forward_pre_hook(partial(half, "attention"))
        attention.register_forward_hook(partial(self._after_attention, layer, how))
        mlp.linear_fc2.register_forward_pre_hook(partial(half, "mlp"))
        layer.register_forward_hook(partial(self._layer_of_tp_group, how))

    def _watch_shared_experts(self, layer: Any, how: RecomputeMode) -> None:
        mlp, half = layer.mlp, partial(self._half, layer, how)

        def enter(module: Any, inputs: Any) -> None:
            half("attention", module, inputs)
            self._after_attention(layer, how, module, inputs, inputs)

        mlp.register_forward_pre_hook(enter)
        if _has_experts(layer):  # else all is done with the rank's own samples
            mlp.experts.register_forward_pre_hook(partial(half, "mlp"))
            mlp.experts.register_forward_hook(partial(self._experts, layer))
        layer.register_forward_hook(partial(self._layer_of_tp_group, how))

    def _experts(self, layer: Any, module: Any, _inputs: Any, output: Any) -> None:
        """Gradients of tokens go back when those of rows are there."""
        size = self.sizes.at_once(_first(output))
        compute: Any = self._costs[layer].compute  # a `SharedExpertsCompute`
        later_s = 0.0 if self._splits else compute.row_gradients_s(self.kind, size)
        backward_s = self._halves(layer, size).mlp.backward_s - later_s

        def accumulate(_gathered: object = None) -> None:
            if self._splits:
                self._take_apart(layer, size)
            else:
                self._take("B", later_s)

        def begin() -> None:
            self._take("B", backward_s)
            # Beside what experts' weight gradients are made of.
            module.together.linear_fc1.leave(
                SimpleNamespace(accumulate=accumulate, start=lambda: None, tensors=())
            )

        on_backward(output, begin)

    def _watch_embedding(self, embedding: Any) -> None:
        embedding.register_forward_pre_hook(self._entering("embedding"))
        if self.sizes.in_tp_group:  # it ends in a sum
            table = embedding.word_embeddings
            table.register_forward_pre_hook(lambda _, inputs: self._embed(inputs[0].shape[0]))
        else:
            embedding.register_forward_hook(
                lambda *args: self._embed(self.sizes.micro_batch_size(args[-1]))
            )
        embedding.register_forward_hook(self._embedding)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Note when a training step ends; the first one starts the clock."""
        is_first = not self.clock.is_running
        if is_first:
            self.clock.start()
        self._norm_is_noted = False
        try:
            if is_first:
                self.cap.check_start()
            yield
            self.cap.check()
            self._note_norm()  # of a rank that steps nothing
            self._iteration += 1
        finally:
            self._write()

    def _write(self) -> None:
        record = {
            "norms_s": self.norms_s,
            "spans": self.spans,
            "peak_bytes": self.cap.peak_bytes,
            "out_of_memory": self.cap.overflow,
        }
        whole = self.report.with_suffix(".new")
        whole.write_text(json.dumps(record))
        whole.replace(self.report)  # a rank may be ended here, as another has run out of memory

    def _take(self, what: str, seconds_s: float) -> None:
        start_s = self.clock.now_s
        self.clock.compute(seconds_s * self._factor)
        if self._spans and self._spans[-1][0] == what and self._spans[-1][2] == start_s:
            start_s = self._spans.pop()[1]
        self._spans.append((what, start_s, self.clock.now_s))

    def _begin_pass(self) -> None:
        """Draw how much a whole forward or backward of a chunk, or a step, is off."""
        self._factor = self._slowed(self._iteration) * self._jitter.draw()

    def _begin_forward(self, *_: Any) -> None:
        self._begin_pass()
        self.host.forward_bytes = 0
        self.cap.check()

    def _end_forward(self, _module: Any, _inputs: Any, output: Any) -> None:
        on_backward(output, self._begin_pass)

    def _layer(self, how: RecomputeMode, layer: Any, _inputs: Any, output: Any) -> None:
        hidden, costs = _first(output), self._costs[layer]
        size, compute = hidden.shape[1], costs.compute
        times = compute.layer(self.kind, size)
        if torch._C._current_graph_task_id() != -1:  # a forward within a backward
            self._take("B", compute.recompute_s(self.kind, size, "full"))
        else:
            self._take("F", times.forward_s)
            if layer.training:
                self.host.forward_bytes += self.cap.keep_layer(costs.memory, size, how)
        backward_s = times.backward_s - self._apart_s(compute, size)
        if how == "selective":
            backward_s += compute.recompute_s(self.kind, size, how)
        # Of a layer that is recomputed, one of its two outputs gets a gradient.
        on_backward(hidden, self._pass(backward_s), partial(self._drop, layer, size, how))

    @property
    def _parts(self) -> int:
        """In how many the rank's micro-batches run."""
        return 1 if self.sizes.sharing is None else self.sizes.sharing.parts

    def _apart_s(self, compute: ComputeCost, size: int) -> float:
        """What a layer's backward leaves to its weight gradients."""
        return compute.weight_gradients_s(self.kind, size) if self._splits else 0.0

    def _drop(self, layer: Any, size: int, how: RecomputeMode) -> None:
        """A layer's activations go; what its weight gradients are made of stays."""
        memory = self._costs[layer].memory
        if not self._splits:
            self.cap.drop_layer(memory, size, how)
            return
        arriving = memory.arriving_bytes(size) // self._parts
        self.cap.keep(arriving)
        self.cap.drop_layer(memory, size, how)
        if layer in self._left:
            at_once = self.sizes.at_once_of(size)
            self._left[layer] += [at_once] * (size // at_once)
        self.cap.keep(memory.delayed_bytes(size))
        self.cap.drop(arriving)

    def _weight_gradients(
        self, layer: Any, left: deque[int], gradient: torch.Tensor | None
    ) -> None:
        """Those of one layer: they are there all at once, in the order of its backwards."""
        if gradient is not None:
            self._take_apart(layer, left.popleft())

    def _take_apart(self, layer: Any, size: int) -> None:
        costs = self._costs[layer]
        self._take("W", self._apart_s(costs.compute, size))
        self.cap.drop(costs.memory.delayed_bytes(size))

    def _entering(self, section: ModelSection) -> Callable[..., None]:
        """What notes which section of the model the rank computes."""

        def note(*_: Any) -> None:
            self.sizes.computed = section

        return note

    def _halves(self, layer: Any, size: int) -> LayerTimes:
        compute: Any = self._costs[layer].compute  # of a rank of a TP group: a `TpComputeCost`
        times: LayerTimes = compute.layer_in_two(self.kind, size)
        whole_s = times.attention.backward_s + times.mlp.backward_s
        left = 1 - self._apart_s(compute, size) / whole_s if self._splits and whole_s else 1.0
        return LayerTimes(attention=_shorter(times.attention, left), mlp=_shorter(times.mlp, left))

    def _half(self, layer: Any, how: RecomputeMode, half: str, _module: Any, inputs: Any) -> None:
        """Before the product that ends attention or MLP in a sum over the TP group."""
        size = self.sizes.at_once(inputs[0])
        halves = self._halves(layer, size)
        forward_s = (halves.attention if half == "attention" else halves.mlp).forward_s
        if torch._C._current_graph_task_id() != -1:  # a forward within a backward
            whole_s = halves.attention.forward_s + halves.mlp.forward_s
            if how == "full" and whole_s:
                again_s = self._costs[layer].compute.recompute_s(self.kind, size, "full")
                self._take("B", again_s * forward_s / whole_s)
        else:
            self._take("F", forward_s)

    def _after_attention(
        self, layer: Any, how: RecomputeMode, _module: Any, _inputs: Any, output: Any
    ) -> None:
        size = self.sizes.at_once(_first(output))
        backward_s = self._halves(layer, size).attention.backward_s
        if how == "selective":
            backward_s += self._costs[layer].compute.recompute_s(self.kind, size, how)
        on_backward(output, self._pass(backward_s))

    def _layer_of_tp_group(self, how: RecomputeMode, layer: Any, _inputs: Any, output: Any) -> None:
        """The layer's memory, and when the backward of its MLP begins."""
        hidden = _last_half(output)
        size = self.sizes.micro_batch_size(hidden)
        if torch._C._current_graph_task_id() == -1 and layer.training:
            memory = self._costs[layer].memory
            self.host.forward_bytes += self.cap.keep_layer(memory, size, how)
        backward_s = self._halves(layer, size).mlp.backward_s
        if self.sizes.sharing is not None:  # it takes its time within
            backward_s = 0.0
        drop = partial(self._drop, layer, size, how)
        on_backward(hidden, self._entering("layer"), self._pass(backward_s), drop)

    def _pass(self, backward_s: float) -> Callable[[], None]:
        """What lets a backward take its time."""
        return partial(self._take, "B", backward_s)

    def _embed(self, size: int) -> None:
        self._take("F", self.compute.embedding(self.kind, size).forward_s)

    def _embedding(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        times = self.compute.embedding(self.kind, self.sizes.micro_batch_size(output))
        on_backward(output, self._entering("embedding"), self._pass(times.backward_s))

    def _head(self, _module: Any, _inputs: Any, output: Any) -> None:
        logits = _first(output)
        size = self.sizes.micro_batch_size(logits)
        times = self.compute.head(self.kind, size)
        self._take("F", times.forward_s)
        if logits.requires_grad:
            kept = self.cap.memory.head_bytes(size)
            self.cap.keep(kept)
            drop, enter = partial(self.cap.drop, kept), self._entering("head")
            on_backward(logits, enter, self._pass(times.backward_s), drop)

    def _step(self, optimizer: Any, *_: Any) -> None:
        """The whole step passes with the first of a rank's optimizers, by chunk or by piece."""
        self._note_norm()
        if self.host.step_elements is not None:
            self._step_piece(optimizer)
            return
        if self._stepped is None:
            self._stepped = optimizer
        if optimizer is self._stepped and self.chunks:
            if not self._num_stepped:
                self._begin_pass()
            owned = list(map(self.sizes.owned_parameters, self.chunks))
            whole_s = self.compute.step_s(self.kind, sum(owned))
            if isinstance(self.chunks[0].wrapped, UnevenDistributedDataParallel):  # by chunk
                whole_s *= owned[self._num_stepped] / max(1, sum(owned))
                self._num_stepped = (self._num_stepped + 1) % len(self.chunks)
            self._take("STEP", whole_s)

    def _note_norm(self) -> None:
        """The first part of an update comes when the norm is known, which all ranks wait for."""
        if not self._norm_is_noted:
            self._norm_is_noted = True
            self.norms_s.append(self.clock.now_s)
            self.spans, self._spans = self._spans, []

    def _step_piece(self, optimizer: Any) -> None:
        """A piece takes its share of the step."""
        total = max(1, self.host.step_elements or 0)
        count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        if not self._num_stepped:
            self._begin_pass()
        self._num_stepped = (self._num_stepped + count) % total
        self.cap.check()
        owned = sum(map(self.sizes.owned_parameters, self.chunks))
        self._take("STEP", self.compute.step_s(self.kind, owned) * count / total)


def _has_experts(layer: Any) -> bool:
    return hasattr(layer.mlp, "experts")


def _shorter(times: PassTimes, share: float) -> PassTimes:
    """With this share of the backward."""
    return PassTimes(forward_s=times.forward_s, backward_s=share * times.backward_s)


def on_backward(output: Any, *then: Callable[[], None]) -> None:
    """Call all of `then` when the backward of what made `output` begins, if there will be one."""
    tensor = _first(output)

    def begin(_gradient: torch.Tensor) -> None:
        for each in then:
            each()

    if tensor.requires_grad:
        tensor.register_hook(begin)


def _last_half(output: Any) -> torch.Tensor:
    """The part of a layer's output whose gradient a backward has first."""
    hidden = _first(output)
    return hidden.last if isinstance(hidden, Halves) else hidden


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple | list) else output
