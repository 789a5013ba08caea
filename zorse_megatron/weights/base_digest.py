"""What identifies the checkpoint that adapters were trained upon."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from zorse_megatron.errors import CheckpointError, Problem
from zorse_megatron.inputs.lora import is_adapter
from zorse_megatron.weights.opened import CANNOT, opened, reading
from zorse_megatron.weights.torch_dist import CheckpointTensors

_LAYER = re.compile(r"decoder\.layers\.((\d+)\.)?")
_TABLES = ("embedding.", "output_layer.")
_ROWS, _WIDTH = 64, 64
_GOLDEN, _SILVER = (5**0.5 - 1) / 2, 2**0.5 - 1
# Those of a table end in padding, of which layouts have more or less.
_TABLE_ROWS = 8
# Layers with norms of their own have other names for them, which Megatron maps to these. Source:
# `sharded_state_dict_keys_map` in its `gpt_layer_specs.py`.
_FUSED = {
    "decoder.layers.input_layernorm.": "decoder.layers.self_attention.linear_qkv.layer_norm_",
    "decoder.layers.pre_mlp_layernorm.": "decoder.layers.mlp.linear_fc1.layer_norm_",
}


def base_digest(folder: Path) -> str:
    """Return a digest of the weights in an iteration's folder.

    It is the same however files, layers and padding are laid out: SHA-256 of names, shapes and
    some elements of each layer's tensors, in fp32. Raises CheckpointError.
    """
    found = opened(folder)
    pieces = sorted(piece for key, size in found.sizes().items() if not is_adapter(key)
                    for piece in _pieces(found, key, size))  # fmt: skip
    if not pieces:
        problem = Problem(
            where=str(folder),
            found="no weights of a model",
            expected="a checkpoint that training can start from",
            remedy="Give the one that holds the whole model.",
        )
        raise CheckpointError(CANNOT, [problem])
    digest = hashlib.sha256()
    for name, layer, shape, values in pieces:
        digest.update(f"{name} {layer} {shape} {len(values)}\n".encode() + values)
    return digest.hexdigest()


def _pieces(
    found: CheckpointTensors, key: str, size: tuple[int, ...]
) -> Iterator[tuple[str, int, tuple[int, ...], bytes]]:
    """Yield name, layer, shape and some elements of a tensor, of each layer where it is stacked.

    The layer is -1 outside layers, the shape of a table without its rows.
    """
    in_layer = _LAYER.match(key)
    is_stacked = in_layer is not None and in_layer[1] is None
    layer = -1 if in_layer is None else int(in_layer[2] or 0)
    shape = size[1:] if is_stacked else size
    is_table = key.startswith(_TABLES)
    blocks = [((0, 0), (min(_TABLE_ROWS, shape[0]), shape[1]))] if is_table else _blocks(shape)
    for number in range(size[0]) if is_stacked else (0,):
        lead = (number,) if is_stacked else ()
        with reading(found.folder, key):
            values = [
                found.read_box(key, (*lead, *offsets), (*(1 for _ in lead), *sizes)).float()
                for offsets, sizes in blocks
            ]
        yield (
            _name(key),
            layer + number,
            shape[1:] if is_table else shape,
            torch.cat([each.flatten() for each in values]).numpy().tobytes(),
        )


def _blocks(shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of what is looked at: all of a vector, pieces of rows of a matrix.

    Rows by the golden section: of a fused matrix some are of each part, and of all groups together.
    """
    if len(shape) != 2:
        return [((0,) * len(shape), shape)]
    rows, columns = shape
    width, others = min(_WIDTH, columns), columns - min(_WIDTH, columns)
    return [
        ((int(rows * (n * _GOLDEN % 1)), int(others * (n * _SILVER % 1))), (1, width))
        for n in range(_ROWS)
    ]


def _name(key: str) -> str:
    """Return the key as stacked layers of Transformer Engine have it."""
    name = _LAYER.sub("decoder.layers.", key, count=1)
    for own, fused in _FUSED.items():
        name = name.replace(own, fused)
    return name
