"""Times the parts of a model and its optimizer's step, with growing micro-batches.

    python -m zorse_megatron.measure.on_ranks.layer_timing PIPE REQUEST [SCRIPT.py] MEGATRON_FLAGS

A process of its own, as the only rank of a job: whatever Megatron sets up, and whatever memory its
model took, is gone when it ends. PIPE is the number of an open file; answers go there, as what
Megatron prints goes to the standard output.

Beside it: how much memory a computation holds (the allocator's word on a GPU, live tensors on a
CPU), and which core attention a layer ran, by what it kept for its backward.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from zorse_megatron.adapter.measuring_run import run_until_built
from zorse_megatron.errors import ZorseError
from zorse_megatron.gpus.gpu import Attention
from zorse_megatron.inputs.profile import Part
from zorse_megatron.log import complain
from zorse_megatron.measure.on_ranks.ranks import REPEATS, WARM_UP, median_s, timed_s
from zorse_megatron.measure.tasks import (
    ANSWERS,
    REQUESTS,
    Answer,
    LayerRequest,
    MeasuredPass,
    MeasuredStep,
)
from zorse_megatron.processes import end_with_parent

if TYPE_CHECKING:
    from zorse_megatron.adapter.model.model_passes import ModelPasses, PartPass


@dataclass(frozen=True, kw_only=True)
class HeldMemory:
    """What one forward and its backward held, beside what was there before."""

    saved_bytes: int
    """Between the two, without the output of the forward."""
    peak_bytes: int
    """At most."""


def held_memory(
    forward: Callable[[], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    device: torch.device,
) -> HeldMemory:
    """Run a forward and its backward, and return what they held."""
    if device.type != "cuda":
        with _LiveTensors() as live:
            output = forward()
            saved_bytes = live.num_bytes() - output.untyped_storage().nbytes()
            backward(output)
        return HeldMemory(saved_bytes=saved_bytes, peak_bytes=live.peak_bytes)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    output = forward()
    saved_bytes = torch.cuda.memory_allocated(device) - before_bytes
    saved_bytes -= output.untyped_storage().nbytes()
    backward(output)
    peak_bytes = torch.cuda.max_memory_allocated(device) - before_bytes
    return HeldMemory(saved_bytes=saved_bytes, peak_bytes=peak_bytes)


class _LiveTensors(TorchDispatchMode):
    """Counts the storages that operations make, for as long as anything holds them.

    What a kernel needs for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        # A weak reference keeps the address from being given to another storage.
        self._given: dict[int, StorageWeakRef] = {}

    def num_bytes(self) -> int:
        """Return what is held now."""
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        return sum(size for _, size in self._live.values())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and note the storages that it made."""
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:  # it was there before
                    self._given.setdefault(storage._cdata, StorageWeakRef(storage))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._given:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.num_bytes())
        return result


class SeenAttention:
    """What was seen of a forward."""

    def __init__(self, seq_length: int) -> None:
        self._sides = (seq_length, seq_length)
        self.kept_scores = False

    @property
    def attention(self) -> Attention:
        """As the cost models know it: whether scores are kept, whoever computed them."""
        return "unfused" if self.kept_scores else "flash"

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Within the block, look at all tensors that autograd is given to keep.

        Scores, or their softmax, are floating, of each head (and sample), and square in tokens.
        Flash and fused attention keep one number per head and token in their place.
        """

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            is_square = tensor.ndim > 2 and tuple(tensor.shape[-2:]) == self._sides
            self.kept_scores |= is_square and tensor.is_floating_point()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield


# Of the memory limit: the next size holds twice as much, and something else is there too.
_SAFE_SHARE = 0.4
_ONE = (0, 0)
"""Chunk and micro-batch of what runs."""


def answers(
    passes: "ModelPasses", step: Callable[[], object], request: LayerRequest
) -> Iterator[Answer]:
    """Measure what is asked for, and yield each result when it is there.

    `step`: runs the optimizer once. It comes last, so that who has it has everything.
    """
    for part, first_size in request.first_sizes.items():
        yield from _grown(passes, part, first_size, request)
    # What many backwards have added up may overflow in fp16, and then no step would be made.
    passes.wrapped.zero_grad_buffer()
    parts: tuple[Part, ...] = ("embedding", "layer", "head")
    yield MeasuredStep(
        num_parameters=sum(map(passes.num_parameters, parts)),
        update_s=median_s(step, passes.device),
        context_bytes=_context_bytes(passes.device, request.used_bytes),
    )


def _context_bytes(device: torch.device, used_bytes: int | None) -> int | None:
    """What this process has of its GPU beside torch's allocator.

    `used_bytes`: before it started, as by the rank that waits for it.
    """
    if device.type != "cuda" or used_bytes is None:
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    own_bytes = total_bytes - free_bytes - used_bytes
    return max(0, own_bytes - torch.cuda.memory_reserved(device))


def _grown(
    passes: "ModelPasses", part: Part, first_size: int, request: LayerRequest
) -> Iterator[MeasuredPass]:
    """Double the micro-batch until memory, time or the largest size is reached."""
    size = first_size
    while size <= request.largest_size:
        try:
            found = measured_pass(passes, part, size)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            return
        finally:
            torch.cuda.empty_cache()
        yield found
        if found.forward_s + found.backward_s > request.time_limit_s:
            return
        limit_bytes = request.memory_limit_bytes
        if limit_bytes is not None and found.peak_bytes > _SAFE_SHARE * limit_bytes:
            return
        size *= 2


def measured_pass(passes: "ModelPasses", part: Part, size: int) -> MeasuredPass:
    """Measure one micro-batch through one part. Raises what torch raises without memory."""
    one = passes.make(part, size)
    seen = SeenAttention(passes.seq_length)
    with seen.looking():
        # Megatron's buffers that all layers share come with the first run and stay.
        output = one.forward()
    one.backward(output)
    del output
    memory = held_memory(one.forward, one.backward, passes.device)
    forward_s, backward_s = [], []
    outputs: list[torch.Tensor] = []  # one at a time
    for _ in range(WARM_UP + REPEATS):
        forward_s.append(timed_s(lambda: outputs.append(one.forward()), passes.device))
        backward_s.append(timed_s(lambda: one.backward(outputs.pop()), passes.device))
    backward_median_s = median(backward_s[WARM_UP:])
    share = _weight_gradients_share(passes, one) if part == "layer" else None
    return MeasuredPass(
        part=part,
        micro_batch_size=size,
        forward_s=median(forward_s[WARM_UP:]),
        backward_s=backward_median_s,
        parameters=passes.num_parameters(part),
        saved_bytes=max(0, memory.saved_bytes),
        peak_bytes=memory.peak_bytes,
        attention=seen.attention if part == "layer" else None,
        weight_gradients_s=None if share is None else share * backward_median_s,
    )


def _weight_gradients_share(passes: "ModelPasses", one: "PartPass") -> float | None:
    """What the action of their own takes of a backward; None where no layer has them apart.

    Of a backward in both parts: a whole one, timed at another moment, may take less than its part.
    """
    outputs: list[torch.Tensor] = []  # one at a time
    inputs_s, weights_s = [], []
    with passes.weight_gradients_apart() as waiting:
        if waiting is None:
            return None
        for _ in range(WARM_UP + REPEATS):
            with waiting.delaying(_ONE):
                outputs.append(one.forward())
                inputs_s.append(timed_s(lambda: one.backward(outputs.pop()), passes.device))
            weights_s.append(timed_s(lambda: waiting.compute(_ONE), passes.device))
    weights_median_s = median(weights_s[WARM_UP:])
    return weights_median_s / (weights_median_s + median(inputs_s[WARM_UP:]))


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether GPU or host memory ran out (c10's CPU allocator raises a plain RuntimeError)."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def main() -> None:
    """Entry point; exits with status 2 and all problems on flags that cannot be used."""
    # A rank that is ended must not leave this process behind with its GPU.
    end_with_parent()
    pipe, request, *command = sys.argv[1:]
    has_script = bool(command) and command[0].endswith(".py")
    script = Path(command[0]) if has_script else None

    def measure(model: Any, optimizer: Any) -> None:
        from zorse_megatron.adapter.model.model_passes import ModelPasses

        with os.fdopen(int(pipe), "w") as out:
            wanted = REQUESTS.validate_json(request)
            for answer in answers(ModelPasses(model), optimizer.step, wanted):
                print(ANSWERS.dump_json(answer).decode(), file=out, flush=True)

    try:
        run_until_built(script, command[has_script:], measure)
    except ZorseError as error:
        complain(str(error), everywhere=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
