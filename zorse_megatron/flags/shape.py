"""The model from Megatron's command line, without importing Megatron.

Only flags that the shape depends on are read; all others are left to Megatron, which checks them
again. Names and defaults are those of megatron-core 0.19 (`megatron/training/arguments.py`).
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zorse_megatron.errors import ModelError, Problem
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.scan import last_values
from zorse_megatron.flags.table import by_spelling
from zorse_megatron.flags.tokenizers import NotReadable, tokens_of
from zorse_megatron.schema.gpus.gpu import Dtype
from zorse_megatron.schema.model.model_shape import (
    Activation,
    ModelShape,
    PositionEmbedding,
    default_ffn_hidden_size,
    padded_vocab_size,
    problems_of,
)

_DIGITS = 9
_USUAL_DIVISOR = 128  # Megatron's, of the rows of the embedding table
_POSITIONS: dict[str, PositionEmbedding] = {
    "learned_absolute": "learned",
    "rope": "rope",
    "yarn": "rope",
    "mrope": "rope",
    "none": "none",
}
_NORMS = ("LayerNorm", "RMSNorm")
# Models that are not a row of equal dense layers.
_UNSUPPORTED = (
    "--num-experts",
    "--multi-latent-attention",
    "--mtp-num-layers",
    "--heterogeneous-layers-config-path",
    "--hybrid-layer-pattern",
    "--hybrid-override-pattern",
    "--spec",
)


@dataclass(kw_only=True)
class _Flags:
    """The flags of a command, and what is wrong with those that were asked for."""

    values: Mapping[str, str | None]
    args: Namespace
    """The same as Megatron's parser has them, with its defaults."""
    problems: list[Problem] = field(default_factory=list)

    def has(self, flag: str) -> bool:
        return flag in self.values

    def integer(self, flag: str, default: int | None = None) -> int:
        """Return a positive integer; without one the problem is noted and 1 returned."""
        text = self.values.get(flag)
        if text is not None and text.isdecimal() and len(text) <= _DIGITS and int(text) > 0:
            return int(text)
        if flag not in self.values and default is not None:
            return default
        self.add(flag, "no value" if text is None else f'"{text}"', "a positive integer")
        return 1

    def choice(self, flag: str, default: str, known: Sequence[str]) -> str:
        """Return one of the known values."""
        text = self.values.get(flag, default)
        if text in known:
            return str(text)
        self.add(flag, "no value" if text is None else f'"{text}"', f"one of {', '.join(known)}")
        return default

    def add(self, flag: str, found: str, expected: str, remedy: str | None = None) -> None:
        """Note a problem."""
        remedy = remedy or f"Add {flag}, or give the model with --model."
        self.problems.append(Problem(where=flag, found=found, expected=expected, remedy=remedy))


def shape_from_flags(arguments: Sequence[str], *, tensor_parallel: int = 1) -> ModelShape:
    """Return the model that a Megatron command trains. Raises ModelError with every problem."""
    flags = _flags(arguments)
    shape = _shape(flags, tensor_parallel)
    for flag in _UNSUPPORTED:
        if flags.has(flag):
            remedy = "Only dense GPT models of equal layers can be planned; remove the flag."
            flags.add(flag, "the flag", "a model without it", remedy)
    if not flags.problems:
        flags.problems += problems_of(shape, has_kv_channels=flags.has("--kv-channels"))
    if flags.problems:
        raise ModelError("the model of these Megatron flags cannot be planned", flags.problems)
    return shape


def flags_of_shape(shape: ModelShape) -> tuple[str, ...]:
    """Return Megatron's flags of a model, the inverse; empty where it has none, as for ReLU."""
    activations = {"gelu": (), "swiglu": ("--swiglu",), "squared_relu": ("--squared-relu",)}
    if shape.activation not in activations:
        return ()
    positions = {"learned": "learned_absolute", "rope": "rope", "none": "none"}
    valued = {
        "--num-layers": shape.num_layers,
        "--hidden-size": shape.hidden_size,
        "--ffn-hidden-size": shape.ffn_hidden_size,
        "--num-attention-heads": shape.num_attention_heads,
        "--seq-length": shape.seq_length,
        "--max-position-embeddings": shape.max_positions or shape.seq_length,
        "--position-embedding-type": positions[shape.position_embedding],
        "--normalization": "RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm",
        "--vocab-size": shape.vocab_size,
    }
    if shape.kv_channels != max(1, shape.hidden_size // shape.num_attention_heads):
        valued["--kv-channels"] = shape.kv_channels
    if shape.vocab_size % _USUAL_DIVISOR:
        valued["--make-vocab-size-divisible-by"] = 1
    switches = [*activations[shape.activation]]
    if shape.num_query_groups != shape.num_attention_heads:
        switches.append("--group-query-attention")
        valued["--num-query-groups"] = shape.num_query_groups
    switches += ["--disable-bias-linear"] * (not shape.linear_bias)
    switches += ["--add-qkv-bias"] * shape.qkv_bias + ["--qk-layernorm"] * shape.qk_norm
    switches += ["--untie-embeddings-and-output-weights"] * (not shape.tied_embeddings)
    return (*(str(word) for pair in valued.items() for word in pair), *switches)


def dtype_from_flags(arguments: Sequence[str]) -> Dtype:
    """Return the type of number that a Megatron command computes in."""
    given = last_values(arguments, ["--bf16", "--fp16"])
    if "--bf16" in given:
        return "bfloat16"
    return "float16" if "--fp16" in given else "float32"


def batch_size_from_flags(arguments: Sequence[str]) -> int | None:
    """Return the global batch size of a Megatron command; None where it is not given.

    Raises ModelError where it is no positive integer.
    """
    flags = _flags(arguments)
    if not flags.has("--global-batch-size"):
        return None
    size = flags.integer("--global-batch-size")
    if flags.problems:
        raise ModelError("the batch of these Megatron flags cannot be planned", flags.problems)
    return size


def _flags(arguments: Sequence[str]) -> _Flags:
    args = read_command(arguments).args
    return _Flags(values=last_values(arguments, by_spelling()), args=args)


def _shape(flags: _Flags, tensor_parallel: int) -> ModelShape:
    hidden = flags.integer("--hidden-size")
    heads = flags.integer("--num-attention-heads")
    sequence = flags.integer("--seq-length")
    activation, position = _activation(flags), _position(flags)
    has_groups = flags.has("--group-query-attention")
    is_learned = position == "learned"
    bias = not flags.has("--disable-bias-linear")
    return ModelShape(
        name="megatron flags",
        num_layers=flags.integer("--num-layers"),
        hidden_size=hidden,
        ffn_hidden_size=flags.integer(
            "--ffn-hidden-size", default_ffn_hidden_size(hidden, activation)
        ),
        num_attention_heads=heads,
        num_query_groups=flags.integer("--num-query-groups", 1) if has_groups else heads,
        kv_channels=flags.integer("--kv-channels", max(1, hidden // heads)),
        vocab_size=_vocab_size(flags, tensor_parallel),
        seq_length=sequence,
        tied_embeddings=not flags.has("--untie-embeddings-and-output-weights"),
        activation=activation,
        norm="rmsnorm"
        if flags.choice("--normalization", "LayerNorm", _NORMS) == "RMSNorm"
        else "layernorm",
        position_embedding=position,
        max_positions=flags.integer("--max-position-embeddings") if is_learned else 0,
        linear_bias=bias,
        qkv_bias=flags.has("--add-qkv-bias") and not bias,
        qk_norm=flags.has("--qk-layernorm"),
    )


def _activation(flags: _Flags) -> Activation:
    if flags.has("--swiglu"):
        return "swiglu"
    if flags.has("--squared-relu"):
        return "squared_relu"
    return "geglu" if flags.has("--quick-geglu") else "gelu"


def _position(flags: _Flags) -> PositionEmbedding:
    if flags.has("--use-rotary-position-embeddings"):
        return "rope"
    chosen = flags.choice("--position-embedding-type", "learned_absolute", list(_POSITIONS))
    return _POSITIONS[chosen]


def _vocab_size(flags: _Flags, tensor_parallel: int) -> int:
    if flags.has("--padded-vocab-size"):
        return flags.integer("--padded-vocab-size")
    try:
        size, reason = tokens_of(flags.args), "no tokenizer"
    except NotReadable as error:
        size, reason = None, str(error)
    if size is None and not flags.has("--vocab-size"):
        found = f"no such flag, and {reason}"
        remedy = "Add it, or --padded-vocab-size, or a tokenizer whose files are here."
        flags.add("--vocab-size", found, "the number of tokens", remedy)
        return 1
    return padded_vocab_size(
        size or flags.integer("--vocab-size"),
        divisible_by=flags.integer("--make-vocab-size-divisible-by", _USUAL_DIVISOR),
        tensor_parallel=tensor_parallel,
    )
