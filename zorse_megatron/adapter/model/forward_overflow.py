"""Names the layer whose output leaves fp16's range, as that of weights from bf16 may.

A loss scale lowers gradients and cannot lower activations: where a forward overflows, each step is
skipped and the scale falls until nothing trains, and all that stock's log has is a falling scale.
Here layers are watched from a skipped step on until one is not skipped, so a run without skipped
steps pays nothing.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from zorse_megatron.adapter.model.overlapped_layer import Halves
from zorse_megatron.adapter.rank_plan import RankPlan
from zorse_megatron.log import say

_LARGEST = int(torch.finfo(torch.float16).max)


class ForwardOverflow:
    """Of a rank that computes in fp16; its device keeps the largest output of each layer."""

    def __init__(self, at: RankPlan, models: Mapping[int, Any]) -> None:
        """`models`: chunk -> wrapped chunk, of this rank."""
        self.at = at
        self._layers = {
            chunk: unwrap_model(model).decoder.layers for chunk, model in models.items()
        }
        self._largest: dict[int, list[torch.Tensor]] = {}
        """Chunk -> of what enters it and of each layer's output, the largest absolute value."""
        self._hooks: list[Any] = []
        self._named: set[str] = set()

    def after_step(self, *, is_skipped: bool, iteration: int) -> None:
        """Name the layers whose outputs overflowed, each once; the host waits after skipped steps.

        `iteration`: of Megatron, from 1.
        """
        if not is_skipped:
            self._stop()
        elif not self._hooks:
            self._watch()
        else:
            self._tell(iteration)
            self._forget()

    def _watch(self) -> None:
        self._forget()
        for chunk, layers in self._layers.items():
            self._hooks.append(
                layers[0].register_forward_pre_hook(
                    partial(self._note_input, chunk), with_kwargs=True
                )
            )
            self._hooks += [
                layer.register_forward_hook(partial(self._note_output, chunk, place))
                for place, layer in enumerate(layers, start=1)
            ]

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _forget(self) -> None:
        # In fp32, as outputs are with --fp32-residual-connection, which may be larger.
        zero = torch.zeros((), device=self.at.device)
        self._largest = {
            chunk: [zero.clone() for _ in range(len(layers) + 1)]
            for chunk, layers in self._layers.items()
        }

    def _note_input(self, chunk: int, _layer: Any, args: Any, kwargs: Any) -> None:
        self._note(chunk, 0, args[0] if args else kwargs["hidden_states"])

    def _note_output(self, chunk: int, place: int, _layer: Any, _args: Any, output: Any) -> Any:
        """Halves of a micro-batch are noted as they arrive; returns what takes their place."""
        hidden, *others = output if isinstance(output, tuple) else (output,)
        if isinstance(hidden, Halves):
            return hidden.noticed(partial(self._note, chunk, place)), *others
        self._note(chunk, place, hidden)
        return output

    @torch.no_grad()
    def _note(self, chunk: int, place: int, values: torch.Tensor) -> None:
        if not values.numel():  # of a rank without samples
            return
        # Without memory for the absolute values; a maximum with nan is nan.
        largest = torch.linalg.vector_norm(values.detach(), float("inf"))
        known = self._largest[chunk][place]
        torch.maximum(known, largest.float(), out=known)

    def _tell(self, iteration: int) -> None:
        for chunk, largest in self._largest.items():
            is_finite = torch.stack(largest).isfinite().tolist()
            if all(is_finite):
                continue
            where = self._where(chunk, is_finite)
            if where is not None and where not in self._named:
                self._named.add(where)
                say(self._line(where, iteration), everywhere=True)

    def _where(self, chunk: int, is_finite: Sequence[bool]) -> str | None:
        """Where an overflow begins; None: in a chunk before, whose rank names it."""
        plan, place = self.at.plan, is_finite.index(False)
        layer = plan.chunks[chunk].layers[0] + place - 1
        if place > 0:
            return f"the output of layer {layer}"
        if chunk > 0 and self.at.dtypes[plan.chunks[chunk - 1].group] != "fp16":
            return (
                f"the output of layer {layer}, received from group {plan.chunks[chunk - 1].group}"
            )
        return None

    def _line(self, where: str, iteration: int) -> str:
        group = self.at.plan.group_of_rank(self.at.rank)
        return (
            f"iteration {iteration} is skipped on rank {self.at.rank}: {where} (layers count from "
            f"0) exceeds {_LARGEST:,}, the largest number of fp16. No loss scale helps. If steps "
            f'go on being skipped, give group {group} "compute_dtype": "fp32" in the plan file, or '
            '"bf16" if all of its GPUs support it'
        )
