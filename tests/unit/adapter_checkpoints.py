"""Checkpoints of adapters, written by torch alone: not by what reads them."""

import warnings
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

COMMON = "common_state/shard_0_1"
# Outputs and inputs of the matrices of `tests.megatron.small_models.SHAPE`.
HIDDEN, QUERY, KEY, FFN, LAYERS = 64, 64, 32, 128, 4
SIZES = {
    "self_attention.lora.q": (QUERY, HIDDEN),
    "self_attention.lora.k": (KEY, HIDDEN),
    "self_attention.lora.v": (KEY, HIDDEN),
    "self_attention.lora.o": (HIDDEN, QUERY),
    "mlp.lora.gate": (FFN, HIDDEN),
    "mlp.lora.up": (FFN, HIDDEN),
    "mlp.lora.down": (HIDDEN, FFN),
}
ALL = "q", "k", "v", "o", "gate", "up", "down"


@dataclass
class Made:
    """A run's adapters; tests change what they like of them before they are written."""

    targets: tuple[str, ...] = ALL
    rank: int = 4
    alpha: float = 10.0
    base: str = "random:1"
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(2)
        for module, (outputs, inputs) in SIZES.items():
            if module.rpartition(".")[2] in self.targets:
                key = f"decoder.layers.{module}"
                self.tensors[f"{key}.a"] = 0.1 * torch.randn(LAYERS, self.rank, inputs)
                self.tensors[f"{key}.b"] = 0.1 * torch.randn(LAYERS, outputs, self.rank)
        kept = {"rank": self.rank, "alpha": self.alpha, "base": self.base}
        self.arguments["zorse_lora"] = kept | {"targets": list(self.targets)}

    def of_layer(self, layer: int, target: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B."""
        a, b = (
            next(each for key, each in self.tensors.items() if key.endswith(f".{target}.{side}"))
            for side in "ab"
        )
        return a[layer], b[layer]

    def write(self, folder: Path, *, in_layers: bool = False) -> Path:
        """`in_layers`: each layer's tensors have keys of their own."""
        tensors = in_each_layer(self.tensors) if in_layers else self.tensors
        # Optimizer state may be beside them.
        more = {"optimizer.state.exp_avg.decoder.layers.0": torch.ones(3)}
        save(folder, {**tensors, **more}, {"args": Namespace(**self.arguments), "iteration": 3})
        return folder


def in_each_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, with one key for each layer's."""
    first = "decoder.layers."
    apart: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        if key.startswith(first):
            rest = key.removeprefix(first)
            apart |= {f"{first}{layer}.{rest}": each for layer, each in enumerate(tensor)}
        else:
            apart[key] = tensor
    return apart


def save(folder: Path, tensors: dict[str, torch.Tensor], common: dict[str, Any] | None) -> None:
    """Write a checkpoint of DCP; what is no tensor as Megatron writes it."""
    import torch.distributed.checkpoint as dcp

    objects = {} if common is None else {COMMON: [common]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            {**tensors, **objects},
            storage_writer=dcp.FileSystemWriter(folder),
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )
