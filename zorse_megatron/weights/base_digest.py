"""What identifies the checkpoint that adapters were trained upon."""

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from zorse_megatron.errors import CheckpointError, Problem
from zorse_megatron.weights.names import ADAPTERS
from zorse_megatron.weights.opened import CANNOT, opened, reading
from zorse_megatron.weights.torch_dist import CheckpointTensors

_LAYER = re.compile(r"decoder\.layers\.((\d+)\.)?")
_TABLES = ("embedding.", "output_layer.")
_ELEMENTS = 4096
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
    the first elements of each layer's tensors, in fp32. Raises CheckpointError.
    """
    found = opened(folder)
    pieces = sorted(piece for key, size in found.sizes().items() if ADAPTERS not in key
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
    """Yield name, layer, shape and first elements of a tensor, of each layer where it is stacked.

    The layer is -1 outside layers, the shape of a table without its rows.
    """
    in_layer = _LAYER.match(key)
    is_stacked = in_layer is not None and in_layer[1] is None
    layer = -1 if in_layer is None else int(in_layer[2] or 0)
    shape = size[1:] if is_stacked else size
    is_table = key.startswith(_TABLES)
    rows = _TABLE_ROWS if is_table else math.ceil(_ELEMENTS / max(1, math.prod(shape[1:])))
    corner = (*(min(each, rows) for each in shape[:1]), *shape[1:])
    with reading(found.folder, key):
        values = found.read_corner(key, (*size[:1], *corner) if is_stacked else corner)
    for number, value in enumerate(values if is_stacked else [values]):
        first = value.flatten()[:_ELEMENTS].float().contiguous().numpy().tobytes()
        yield _name(key), layer + number, shape[1:] if is_table else shape, first


def _name(key: str) -> str:
    """Return the key as stacked layers of Transformer Engine have it."""
    name = _LAYER.sub("decoder.layers.", key, count=1)
    for own, fused in _FUSED.items():
        name = name.replace(own, fused)
    return name
