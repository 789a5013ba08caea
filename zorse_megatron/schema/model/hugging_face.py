"""Reading a model from a `config.json` of Hugging Face's transformers.

Llama, Mistral, Qwen2 (2.5 too), Qwen3 and Gemma, dense: what Megatron's GPT layers are, or nearly.
Keys and defaults are those of transformers' `LlamaConfig` and its siblings. Whatever those layers
have not (experts, norms after the blocks, capped logits) is refused by its key.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zorse_megatron.errors import ModelError, Problem
from zorse_megatron.schema.model.model_shape import Activation, ModelShape, padded_vocab_size
from zorse_megatron.schema.model.model_yaml import problems_of
from zorse_megatron.schema.text.file_kind import FileKind
from zorse_megatron.schema.text.json_text import read_json
from zorse_megatron.schema.text.strict import read_file

CONFIG_FILE = FileKind(
    name="config.json", syntax="JSON", document="docs/model-file.md", error=ModelError, root=None
)
_LARGEST = 100_000_000
_GATED: Mapping[str, Activation] = {"silu": "swiglu", "swish": "swiglu"}
_GEMMA_GATED: Mapping[str, Activation] = {"gelu_pytorch_tanh": "geglu", "gelu": "geglu"}


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What a `model_type` implies beside its keys."""

    activations: Mapping[str, Activation]
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    """Where the file does not say."""
    head_dim: int | None = None
    """Where the file does not say; None: hidden size by heads."""
    not_in_megatron: str | None = None
    """What Megatron's flags cannot build of it."""


_FAMILIES = {
    "llama": _Family(activations=_GATED),
    "mistral": _Family(activations=_GATED),
    "qwen2": _Family(activations=_GATED, qkv_bias=True),
    "qwen3": _Family(activations=_GATED, qk_norm=True, head_dim=128),
    "gemma": _Family(
        activations=_GEMMA_GATED,
        tied=True,
        head_dim=256,
        not_in_megatron="its GELU by tanh with a gate, its embeddings times the root of the width, "
        "and its norms' weights around 1",
    ),
}
# Other types that people have -> what their layers have that Megatron's dense GPT layers have not.
_REFUSED = {
    "gemma2": "norms after attention and feed-forward, capped logits, windows",
    "gemma3_text": "norms after attention and feed-forward, windows",
    "gemma3": "images, norms after attention and feed-forward, windows",
    "mixtral": "experts",
    "qwen2_moe": "experts",
    "qwen3_moe": "experts",
    "deepseek_v2": "experts and latent attention",
    "deepseek_v3": "experts and latent attention",
    "llama4": "experts and images",
    "gpt_oss": "experts",
    "phi3": "query, key and value in an order of their own",
    "mllama": "images",
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model, and how Megatron is told of it."""

    shape: ModelShape
    """At the longest sequence that the file allows."""
    flags: tuple[str, ...]
    """Megatron's flags that build it, but for the sequence length; () where none can."""
    notes: tuple[str, ...]
    """For people: what the shape leaves out."""


def config_path(name: str) -> Path | None:
    """Return the path of a `config.json` that `name` is or has in it; None for anything else."""
    path = Path(name)
    if path.is_dir() and (path / "config.json").is_file():
        return path / "config.json"
    return path if path.name.endswith("config.json") else None


def load_config(path: str | Path) -> HuggingFaceModel:
    """Read the model of a `config.json`. Raises ModelError with every problem."""
    return parse_config(read_file(path, CONFIG_FILE), source=str(path))


def parse_config(data: bytes, *, source: str = "config.json") -> HuggingFaceModel:
    """Read the model of the text of a `config.json`. Raises ModelError with every problem."""
    value, problems = read_json(data, source, CONFIG_FILE)
    config = _Config(value=value if isinstance(value, dict) else {}, source=source)
    family = config.family()
    if family is not None:
        model = config.model(family)
        if not (problems or config.problems):
            config.problems += [config.at(each) for each in problems_of(model.shape)]
    if problems or config.problems:
        raise ModelError(f"{source} cannot be planned", [*problems, *config.problems])
    assert family is not None
    return model


class _Config:
    """The keys of a file, and what is wrong with those that were asked for."""

    def __init__(self, *, value: Mapping[str, Any], source: str) -> None:
        self.value, self.source = value, source
        self.problems: list[Problem] = []

    def family(self) -> _Family | None:
        """Return what is known of its type; None, with problems, for a type that cannot be."""
        kind = self.value.get("model_type")
        experts = [key for key in _EXPERTS if self.value.get(key)]
        lacks = _REFUSED.get(kind) if isinstance(kind, str) else None
        if "text_config" in self.value and lacks is None:
            lacks = "more than text"
        if experts:
            lacks = lacks or f"experts ({experts[0]})"
        known = _FAMILIES.get(kind) if isinstance(kind, str) else None
        if known is not None and lacks is None:
            return known
        self.add(
            "model_type",
            "no such key" if kind is None else f"{kind!r}" + (f", which has {lacks}" * bool(lacks)),
            f"a dense model of {', '.join(_FAMILIES)}",
            "Describe a model of another kind with Megatron's flags, or in a model file.",
        )
        return None

    def model(self, family: _Family) -> HuggingFaceModel:
        """Return the model; without sense where there are problems."""
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        usual = family.head_dim or max(1, hidden // heads)
        shape = ModelShape(
            name=self._name(),
            num_layers=self.size("num_hidden_layers", largest=100_000),
            hidden_size=hidden,
            ffn_hidden_size=self.size("intermediate_size"),
            num_attention_heads=heads,
            num_query_groups=self.size("num_key_value_heads", heads),
            kv_channels=self.size("head_dim", usual),
            vocab_size=padded_vocab_size(self.size("vocab_size")),
            seq_length=self.size("max_position_embeddings"),
            tied_embeddings=self.flag("tie_word_embeddings", family.tied),
            activation=self._activation(family),
            norm="rmsnorm",
            position_embedding="rope",
            linear_bias=False,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
        )
        for key in ("attention_bias", "mlp_bias"):
            if self.flag(key, False):
                self.add(key, "true", "false", "Megatron has biases in all linear layers or none.")
        notes = tuple(self._notes(family))
        return HuggingFaceModel(shape=shape, flags=self._flags(shape, family), notes=notes)

    def size(self, key: str, default: int | None = None, *, largest: int = _LARGEST) -> int:
        """Return a positive integer; without one the problem is noted and 1 returned."""
        value = self.value.get(key)
        if value is None and default is not None:
            return default
        if type(value) is int and 1 <= value <= largest:
            return value
        found = "no such key" if value is None else repr(value)[:40]
        self.add(key, found, f"an integer from 1 to {largest}", "Take the file that is published.")
        return 1

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean; another value is a problem."""
        value = self.value.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.add(key, repr(value)[:40], "true or false", "Take the file that is published.")
        return default

    def add(self, key: str, found: str, expected: str, remedy: str) -> None:
        """Note a problem."""
        where = f"{self.source}: {key}"
        self.problems.append(Problem(where=where, found=found, expected=expected, remedy=remedy))

    def at(self, problem: Problem) -> Problem:
        """Put the file in front of a problem of the shape."""
        return Problem(
            where=f"{self.source}: {problem.where}",
            found=problem.found,
            expected=problem.expected,
            remedy=problem.remedy,
        )

    def _name(self) -> str:
        name = self.value.get("_name_or_path") or Path(self.source).parent.name
        return str(name)[:80] if isinstance(name, str) and name.isprintable() and name else "model"

    def _activation(self, family: _Family) -> Activation:
        key = next((k for k in ("hidden_activation", "hidden_act") if self.value.get(k)), None)
        name = self.value[key] if key else next(iter(family.activations))
        if isinstance(name, str) and name in family.activations:
            return family.activations[name]
        known = " or ".join(family.activations)
        self.add(key or "hidden_act", repr(name)[:40], known, "No other is known for this type.")
        return next(iter(family.activations.values()))

    def _rope(self) -> tuple[float, Mapping[str, Any]]:
        """Return base and scaling of the rotary positions; newer files have both in one key."""
        both = self.value.get("rope_parameters") or {}
        scaling = self.value.get("rope_scaling") or both
        base = self.value.get("rope_theta", both.get("rope_theta", 10_000.0) if both else 10_000.0)
        return base, scaling if isinstance(scaling, dict) else {}

    def _notes(self, family: _Family) -> Iterator[str]:
        if family.not_in_megatron:
            lacking = family.not_in_megatron
            yield f"Megatron's flags cannot build {lacking}; times are as if they could"
        window = self.value.get("sliding_window")
        if window and self.value.get("use_sliding_window", True):
            yield f"attention is costed over whole samples, not over a window of {window} tokens"
        kind = self._rope_kind()
        if kind not in ("default", "llama3"):
            yield f"of rope_scaling {kind} Megatron's flags above say nothing"

    def _rope_kind(self) -> str:
        _, scaling = self._rope()
        return str(scaling.get("rope_type", scaling.get("type", "default")))

    def _flags(self, shape: ModelShape, family: _Family) -> tuple[str, ...]:
        if family.not_in_megatron:
            return ()
        base, scaling = self._rope()
        epsilon = self.value.get("rms_norm_eps", 1e-6)
        numbers = isinstance(base, int | float) and isinstance(epsilon, int | float)
        if not (numbers and math.isfinite(base) and math.isfinite(epsilon)):
            self.add(
                "rope_theta, rms_norm_eps", f"{base!r}, {epsilon!r}"[:60], "numbers", "Fix it."
            )
            return ()
        flags = {
            "--num-layers": shape.num_layers,
            "--hidden-size": shape.hidden_size,
            "--ffn-hidden-size": shape.ffn_hidden_size,
            "--num-attention-heads": shape.num_attention_heads,
            "--kv-channels": shape.kv_channels,
            "--max-position-embeddings": shape.seq_length,
            "--vocab-size": self.value.get("vocab_size", 1),
            "--normalization": "RMSNorm",
            "--norm-epsilon": f"{epsilon:g}",
            "--position-embedding-type": "rope",
            "--rotary-base": f"{int(base)}",
        }
        switches = ["--swiglu", "--disable-bias-linear"]
        if shape.num_query_groups != shape.num_attention_heads:
            switches.append("--group-query-attention")
            flags["--num-query-groups"] = shape.num_query_groups
        switches += ["--add-qkv-bias"] * shape.qkv_bias + ["--qk-layernorm"] * shape.qk_norm
        if not shape.tied_embeddings:
            switches.append("--untie-embeddings-and-output-weights")
        if self._rope_kind() == "llama3":
            switches.append("--use-rope-scaling")
            flags["--rope-scaling-factor"] = f"{scaling.get('factor', 8.0):g}"
        valued = (word for pair in flags.items() for word in map(str, pair))
        return (*valued, *switches)
