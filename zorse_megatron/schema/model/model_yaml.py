"""Reading a model from a small YAML file: all of it, or a well-known model and what differs."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from zorse_megatron.errors import ModelError, Problem
from zorse_megatron.schema.model.model_presets import MODELS, canonical_model
from zorse_megatron.schema.model.model_shape import (
    Activation,
    ModelShape,
    Norm,
    PositionEmbedding,
    default_ffn_hidden_size,
)
from zorse_megatron.schema.text.file_kind import FileKind
from zorse_megatron.schema.text.strict import built, read_file
from zorse_megatron.schema.text.suggest import did_you_mean
from zorse_megatron.schema.text.yaml_text import read_yaml

_CONFIG = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)
# Above any model there is: a size with digits too many is reported, not computed with.
Size = Annotated[int, Field(ge=1, le=100_000_000)]
Layers = Annotated[int, Field(ge=1, le=100_000)]
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length")


@dataclass(frozen=True, kw_only=True, config=_CONFIG)
class ModelFile:
    """A model as it is written; what is left out comes from the preset or from Megatron."""

    preset: str | None = None
    """A well-known model that gives what is left out."""
    name: str | None = None
    """A name for people."""
    num_layers: Layers | None = None
    """Transformer layers."""
    hidden_size: Size | None = None
    """Width of the residual stream."""
    ffn_hidden_size: Size | None = None
    """Width of the feed-forward block; left out: as Megatron chooses it."""
    num_attention_heads: Size | None = None
    """Query heads."""
    num_query_groups: Size | None = None
    """Key and value heads; left out: as many as query heads."""
    kv_channels: Size | None = None
    """Width of one head; left out: hidden_size divided by the number of heads."""
    vocab_size: Size | None = None
    """Rows of the embedding table, padding included."""
    seq_length: Size | None = None
    """Tokens per sample."""
    tied_embeddings: bool | None = None
    """Whether embedding and output layer share one table; left out: no."""
    activation: Activation | None = None
    """Left out: gelu."""
    norm: Norm | None = None
    """Left out: layernorm."""
    position_embedding: PositionEmbedding | None = None
    """Left out: rope."""
    max_positions: Size | None = None
    """Rows of a learned position table; left out: seq_length."""
    linear_bias: bool | None = None
    """Biases in all linear layers; left out: yes, as Megatron."""
    qkv_bias: bool | None = None
    """Biases of query, key and value only; left out: no."""
    qk_norm: bool | None = None
    """Norms of query and key heads; left out: no."""


MODEL_FILE = FileKind(
    name="model", syntax="YAML", document="docs/model-file.md", error=ModelError, root=ModelFile
)


def load_model(path: str | Path) -> ModelShape:
    """Read, check and return the model in a file. Raises ModelError with every problem."""
    return parse_model(read_file(path, MODEL_FILE), source=str(path))


def parse_model(data: bytes, *, source: str = "model") -> ModelShape:
    """Check and return the model in `data`; Problems call it `source`. Raises ModelError."""
    value, lines, problems = read_yaml(data, source, MODEL_FILE)
    file: ModelFile = built(value, problems, MODEL_FILE, source, rules=_file_problems, lines=lines)
    return shape_of(file)


def shape_of(file: ModelFile) -> ModelShape:
    """Fill in what is left out. The file has no problems."""
    given = {
        field.name: getattr(file, field.name)
        for field in dataclasses.fields(file)
        if field.name != "preset" and getattr(file, field.name) is not None
    }
    if file.preset is not None:
        return _over_preset(MODELS[canonical_model(file.preset)], given)
    heads, activation = given["num_attention_heads"], given.get("activation", "gelu")
    defaults = {
        "name": "model",
        "ffn_hidden_size": default_ffn_hidden_size(given["hidden_size"], activation),
        "num_query_groups": heads,
        "kv_channels": max(1, given["hidden_size"] // heads),
    }
    if given.get("position_embedding") == "learned":
        defaults["max_positions"] = given["seq_length"]
    return ModelShape(**defaults | given)


def _over_preset(preset: ModelShape, given: dict[str, object]) -> ModelShape:
    """Put values over those of a preset; what it derives from them follows."""
    shape = dataclasses.replace(preset, **given)  # type: ignore[arg-type]
    follows: dict[str, int] = {}
    if "num_attention_heads" in given and "num_query_groups" not in given:
        follows["num_query_groups"] = shape.num_attention_heads
    if {"num_attention_heads", "hidden_size"} & set(given) and "kv_channels" not in given:
        follows["kv_channels"] = max(1, shape.hidden_size // shape.num_attention_heads)
    if shape.position_embedding == "learned" and "max_positions" not in given:
        follows["max_positions"] = max(preset.max_positions, shape.seq_length)
    return dataclasses.replace(shape, **follows)  # type: ignore[arg-type]


def _file_problems(file: ModelFile) -> Iterator[Problem]:
    if file.preset is not None and canonical_model(file.preset) not in MODELS:
        yield Problem(
            where="preset",
            found=f'"{file.preset}", which is not a well-known model',
            expected="one of the models of docs/model-file.md",
            remedy=did_you_mean(file.preset, MODELS),
        )
        return
    absent = [key for key in _REQUIRED if getattr(file, key) is None]
    if file.preset is None and absent:
        yield Problem(
            where="top level",
            found=f"no {', '.join(absent)}",
            expected=f"a preset, or all of {', '.join(_REQUIRED)}",
            remedy="Add what is missing.",
        )
        return
    yield from problems_of(shape_of(file), has_kv_channels=file.kv_channels is not None)


def problems_of(shape: ModelShape, *, has_kv_channels: bool = True) -> Iterator[Problem]:
    """Yield what does not fit together in a shape."""
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if not has_kv_channels and shape.hidden_size % heads:
        yield Problem(
            where="num_attention_heads",
            found=f"{heads} heads with hidden_size {shape.hidden_size}",
            expected="a number of heads that divides hidden_size",
            remedy="Correct one of them, or give kv_channels.",
        )
    if heads % groups:
        yield Problem(
            where="num_query_groups",
            found=f"{groups} with {heads} query heads",
            expected="a divisor of num_attention_heads",
            remedy="Every key head serves the same number of query heads.",
        )
    if shape.position_embedding == "learned" and shape.max_positions < shape.seq_length:
        yield Problem(
            where="max_positions",
            found=f"{shape.max_positions} with seq_length {shape.seq_length}",
            expected="at least seq_length",
            remedy="Learned positions must reach to the end of a sample.",
        )
    if shape.position_embedding != "learned" and shape.max_positions:
        yield Problem(
            where="max_positions",
            found=f'{shape.max_positions} with position_embedding "{shape.position_embedding}"',
            expected='it only with position_embedding "learned"',
            remedy="Remove it.",
        )
