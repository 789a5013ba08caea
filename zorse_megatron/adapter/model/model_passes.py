"""Forward and backward of one part of a Megatron model alone: embedding, layer, head.

The parts are run as the model itself runs them: a layer gets what the model's own forward hands to
it, and the head is that forward without layers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args

from zorse_megatron.adapter.groups.global_groups import presented
from zorse_megatron.adapter.model.weight_gradients import WeightGradients, delaying_weights
from zorse_megatron.adapter.patches.rebind import REGISTRY
from zorse_megatron.errors import FlagError
from zorse_megatron.flags.conditions import fuses_weight_gradients
from zorse_megatron.inputs.profile import Part


@dataclass(frozen=True, kw_only=True)
class PartPass:
    """One micro-batch through one part."""

    forward: Callable[[], torch.Tensor]
    """Run it and return its output."""
    given: tuple[torch.Tensor, ...]
    """What it is given; a backward leaves gradients in those that have any."""

    def backward(self, output: torch.Tensor) -> None:
        """Run the backward; gradients of parameters go where the wrapped model has them."""
        for tensor in self.given:
            tensor.grad = None
        torch.autograd.backward(output, torch.ones_like(output))


class _Reached(Exception):
    """A layer has been reached: its arguments."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.keywords = arguments, keywords


class ModelPasses:
    """Makes passes for a whole GPT of one layer at least, wrapped as for training."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.model = get_attr_wrapped_model(wrapped, "decoder", return_model_obj=True)
        self.args = get_args()
        self.device = next(self.model.parameters()).device
        self.seq_length: int = self.args.seq_length

    def num_parameters(self, part: Part) -> int:
        """Parameters of a part; a table that both ends share counts for the embedding."""
        return sum(p.numel() for module in self._modules(part) for p in module.parameters())

    def make(self, part: Part, micro_batch_size: int) -> PartPass:
        """Return the pass of a micro-batch, with made-up tokens."""
        maker = {"embedding": self._embedding, "layer": self._layer, "head": self._head}[part]
        return maker(self._batch(micro_batch_size))

    @contextmanager
    def weight_gradients_apart(self) -> Iterator[WeightGradients | None]:
        """Let the layer's backwards leave weight gradients to an action of their own, as in a group
        with `split_backward`; None where its software cannot.
        """
        waiting = WeightGradients()
        stores = {m: m.wgrad_store for m in self.model.modules() if hasattr(m, "wgrad_store")}
        if not self._leaves_to(waiting):
            yield None
            return
        try:
            with REGISTRY.applied({"linear_backward": partial(delaying_weights, waiting)}):
                yield waiting
        finally:
            for module, store in stores.items():
                module.wgrad_store = store

    def _leaves_to(self, waiting: WeightGradients) -> bool:
        if fuses_weight_gradients(self.args):
            return False
        try:
            waiting.watch(self.wrapped)
        except FlagError:
            return False
        return True

    def _modules(self, part: Part) -> list[Any]:
        model = self.model
        if part == "embedding":
            return [model.embedding]
        if part == "layer":
            return [model.decoder.layers[0]]
        return [module for module in (model.decoder.final_layernorm, model.output_layer) if module]

    def _batch(self, size: int) -> dict[str, Any]:
        """Tokens, positions, labels [b, s] and the mask that stock's data set would make."""
        length = self.args.seq_length
        device = self.device
        tokens = torch.randint(self.args.padded_vocab_size, (size, length), device=device)
        mask = None
        if self.args.create_attention_mask_in_dataloader:
            mask = torch.ones(size, 1, length, length, device=device).tril() < 0.5
        positions = torch.arange(length, device=device).expand(size, length)
        return {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}

    def _embedding(self, batch: dict[str, Any]) -> PartPass:
        given = {name: batch[name] for name in ("input_ids", "position_ids")}
        return PartPass(forward=partial(self.model.embedding, **given), given=())

    def _layer(self, batch: dict[str, Any]) -> PartPass:
        layer = self.model.decoder.layers[0]
        reached = self._arguments_of(layer, batch)
        keywords = dict(reached.keywords)
        hidden = keywords["hidden_states"].detach().requires_grad_()
        keywords["hidden_states"] = hidden
        return PartPass(forward=lambda: layer(*reached.arguments, **keywords)[0], given=(hidden,))

    def _head(self, batch: dict[str, Any]) -> PartPass:
        shape = (self.args.seq_length, len(batch["input_ids"]), self.args.hidden_size)
        dtype = next(self.model.decoder.parameters()).dtype
        hidden = torch.randn(shape, device=self.device).to(dtype).requires_grad_()

        def forward() -> torch.Tensor:
            with presented(self.model.decoder, layers=torch.nn.ModuleList()):
                loss: torch.Tensor = self.model(
                    **batch, labels=batch["input_ids"], decoder_input=hidden
                )
            return loss

        return PartPass(forward=forward, given=(hidden,))

    def _arguments_of(self, layer: torch.nn.Module, batch: dict[str, Any]) -> _Reached:
        """Return what the model hands to a layer, without running the layer."""

        def stop(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            raise _Reached(arguments, keywords)

        hook = layer.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad():
                self.model(**batch)
        except _Reached as reached:
            return reached
        finally:
            hook.remove()
        raise AssertionError("the model did not call its layer")
