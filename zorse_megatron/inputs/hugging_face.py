"""Reading a model from a `config.json` of Hugging Face's transformers.

Any decoder whose shape is that of Megatron's GPT layers, or nearly: `hugging_face_types.yaml` says
what its `model_type` implies. Keys and defaults are those of transformers' configuration classes.
What Megatron's flags cannot build of it is planned as if they could, and said. Whatever is no row
of such layers (images, windows) is refused by its key.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zorse_megatron.errors import ModelError, Problem
from zorse_megatron.files.json_text import read_json
from zorse_megatron.files.strict import FileKind
from zorse_megatron.files.yaml_text import read_table
from zorse_megatron.inputs.model import (
    Activation,
    Experts,
    LatentAttention,
    ModelShape,
    Norm,
    OtherShape,
    PositionEmbedding,
    padded_vocab_size,
)
from zorse_megatron.inputs.model_rules import problems_of

CONFIG_FILE = FileKind(
    name="model", syntax="JSON", document="docs/cli.md", error=ModelError, root=None
)
_LARGEST = 100_000_000
# What a model is made of -> the keys that families have for it.
_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd", "n_embed"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head"),
    "groups": ("num_key_value_heads", "num_kv_heads"),
    "head": ("head_dim",),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions", "seq_length"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "per token": ("num_experts_per_tok",),
    "expert": ("moe_intermediate_size",),
    "shared expert": ("shared_expert_intermediate_size",),
    "shared experts": ("n_shared_experts",),
    **{key: (key,) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
    **{key: (key,) for key in ("q_lora_rank", "v_head_dim", "n_group", "topk_group")},
}
_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")
_PLAIN: Mapping[str, Activation] = {
    **dict.fromkeys(_GELU, "gelu"),
    "relu": "relu",
    "relu2": "squared_relu",
}
_GATED: Mapping[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), "swiglu"),
    **dict.fromkeys(_GELU, "geglu"),
}


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
# Keys of variants whose parameters are not counted here -> what counts, where they are given.
_UNCOUNTED = {
    "qk_layernorm": False,
    "use_qk_norm": False,
    "add_cross_attention": False,
    "do_layer_norm_before": True,
}
_DENSE = ("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "moe_layer_freq")
"""Keys that say which layers have no experts."""
# Megatron has no flags for these of a yarn scaling (`MLATransformerConfig`).
_YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a `model_type` implies beside its keys; defaults are Llama's."""

    activation: str = "silu"
    """Where the file names none."""
    is_gated: bool = True
    norm: Norm = "rmsnorm"
    norms: int = 2
    """In a layer."""
    position: PositionEmbedding = "rope"
    biases: Literal["none", "qkv", "qkv if attention_bias", "mlp", "all"] = "none"
    bias_key: str | None = None
    """Says whether linear layers have biases."""
    qk_norm: bool = False
    qk_norm_key: str | None = None
    """Says whether it has norms of query and key heads."""
    tied: bool = False
    """Where the file does not say."""
    head_dim: int | None = None
    """Where the file does not say; None: hidden size by heads."""
    positions: int | None = None
    """The longest sample where the file does not say."""
    more_positions: int = 0
    """Rows of the table that no position of a sample takes."""
    rotary: float = 1.0
    """Share of a head that is rotated, where the file does not say."""
    is_multi_query: bool = False
    """Whether all heads share key and value, where the file does not say."""
    parallel_key: str | None = None
    """Says whether attention and feed-forward run side by side."""
    is_parallel: bool = False
    """Where the file does not say."""
    experts: Experts | None = None
    """Those of each layer where the file does not say; None: it has none."""
    first_dense: int = 0
    """Layers without experts at the start, where the file does not say."""
    has_wide_experts: bool = False
    """Whether the width of an expert has the key of dense blocks, and not one of its own."""
    is_latent: bool = False
    """Whether keys and values come from one narrow vector."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What gives a router's scores; with sigmoid, experts have biases."""
    norms_all_heads: bool = False
    """Whether query and key are normalized over all heads together."""
    has_head_bias: bool = False
    has_embedding_norm: bool = False
    lacks: Sequence[str] = ()
    """What Megatron's flags cannot build of it."""


def _family(*, experts: dict[str, Any] | None = None, **entry: Any) -> Family:
    return Family(experts=None if experts is None else Experts(**experts), **entry)


_TYPES = read_table(__package__, "hugging_face_types.yaml")
FAMILIES = {kind: _family(**entry) for kind, entry in _TYPES["families"].items()}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model, and how Megatron is told of it."""

    shape: ModelShape
    """At the longest sequence that the file allows."""
    flags: tuple[str, ...]
    """Megatron's flags that build it, but for the sequence length; () where none can."""
    notes: tuple[str, ...]
    """For people: what the shape leaves out."""


def config_path(name: str | Path) -> Path:
    """Return the path of the `config.json` that a folder has; of anything else its own."""
    inside = Path(name) / "config.json"
    return inside if inside.is_file() else Path(name)


def parse_config(data: bytes, *, source: str = "config.json") -> HuggingFaceModel:
    """Read the model of the text of a `config.json`. Raises ModelError with every problem."""
    value, problems = read_json(data, source, CONFIG_FILE)
    config = ConfigKeys(value=value if isinstance(value, dict) else {}, source=source)
    family = config.family()
    if family is not None:
        model = config.model(family)
        if not (problems or config.problems):
            config.problems += [config.at(each) for each in problems_of(model.shape)]
    if problems or config.problems:
        raise ModelError(f"{source} cannot be planned", [*problems, *config.problems])
    assert family is not None
    return model


def is_finite(value: Any) -> bool:
    """Whether it is a number that a float holds."""
    try:
        return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)
    except OverflowError:
        return False


class ConfigKeys:
    """The keys of a file, and what is wrong with those that were asked for."""

    def __init__(self, *, value: Mapping[str, Any], source: str) -> None:
        self.value, self.source = value, source
        self.problems: list[Problem] = []

    def family(self) -> Family | None:
        """Return what is known of its type; None, with problems, for a type that cannot be."""
        kind = self.value.get("model_type")
        experts = [key for key in _EXPERTS if self.value.get(key)]
        lacks = _TYPES["refused"].get(kind) if isinstance(kind, str) else None
        if "text_config" in self.value and lacks is None:
            lacks = "more than text"
        known = FAMILIES.get(kind) if isinstance(kind, str) else None
        if experts and not (known and known.experts):
            lacks = lacks or f"experts ({experts[0]})"
        if known is not None and lacks is None:
            return known
        self.add(
            "model_type",
            "no such key" if kind is None else f"{kind!r}" + (f", which has {lacks}" * bool(lacks)),
            f"a model of {', '.join(FAMILIES)}",
            "Describe a model of another kind with Megatron's flags.",
        )
        return None

    def model(self, family: Family) -> HuggingFaceModel:
        """Return the model; without sense where there are problems."""
        shape, lacks = self._shape(family)
        told = [f"planning only: training refuses {', '.join(lacks)}"] if lacks else []
        flags = () if lacks else self._flags(shape, family)
        return HuggingFaceModel(shape=shape, flags=flags, notes=(*told, *self._notes()))

    def _shape(self, family: Family) -> tuple[ModelShape, list[str]]:
        """Return the shape, and what Megatron's flags cannot build of it."""
        hidden, heads = self.size("hidden"), self.size("heads")
        is_parallel, norms = self._side_by_side(family)
        attention, mlp = self._biases(family)
        positions = self.size("positions", family.positions)
        fields: dict[str, Any] = {
            "name": self._name(),
            "num_layers": self.size("layers", largest=100_000),
            "hidden_size": hidden,
            "ffn_hidden_size": self.size("ffn", None if family.is_gated else 4 * hidden),
            "num_attention_heads": heads,
            "num_query_groups": self._groups(family, heads),
            "kv_channels": self.size("head", family.head_dim or max(1, hidden // heads)),
            "vocab_size": padded_vocab_size(self.size("vocabulary")),
            "seq_length": positions,
            "tied_embeddings": self.flag("tie_word_embeddings", family.tied),
            "activation": self._activation(family),
            "norm": family.norm,
            "position_embedding": "none" if self.flag("alibi", False) else family.position,
            "max_positions": (positions + family.more_positions) * (family.position == "learned"),
            "linear_bias": attention and mlp,
            "qkv_bias": not mlp and (attention or self._has_qkv_bias(family)),
            "qk_norm": self.flag(family.qk_norm_key, family.qk_norm),
        }
        fields["experts"] = self._experts(family, fields["ffn_hidden_size"])
        fields["dense_layers"] = self._dense_layers(family, fields["num_layers"])
        if len(fields["dense_layers"]) == fields["num_layers"]:
            fields |= {"experts": None, "dense_layers": ()}
        if family.is_latent:
            fields["latent"] = self._latent()
            fields["kv_channels"] = max(1, hidden // heads)  # nothing has this width
        self._refuse_uncounted(family, hidden)
        shape = ModelShape(**fields)
        has_some = attention != mlp
        lacks = [
            *["biases of attention or feed-forward alone"] * has_some,
            *["attention and feed-forward side by side"] * is_parallel,
            *self._lacks(family, shape),
        ]
        more = {
            "more_in_layer": (norms - 2) * shape.norm_parameters
            + self._norms_beyond_heads(shape) * family.norms_all_heads
            + hidden * (attention and has_some)
            + (shape.ffn_input_width + hidden) * (mlp and has_some),
            "more_in_embedding": shape.norm_parameters * family.has_embedding_norm,
            "more_in_head": shape.vocab_size * family.has_head_bias,
        }
        return (OtherShape(**(fields | more)) if any(more.values()) else shape), lacks

    def _lacks(self, family: Family, shape: ModelShape) -> list[str]:
        """What Megatron's flags cannot build of it, but for how its blocks are put together."""
        return [
            *family.lacks,
            *["ALiBi"] * (shape.position_embedding == "none" != family.position),
            *["a bias of the output layer"] * family.has_head_bias,
            *["clipped queries, keys and values"] * bool(self.value.get("clip_qkv")),
            *["jitter of the routers' inputs"] * bool(self.value.get("router_jitter_noise")),
            *["GELU with a gate"] * (shape.activation == "geglu"),
            *["ReLU"] * (shape.activation == "relu"),
        ]

    def _experts(self, family: Family, ffn_hidden_size: int) -> Experts | None:
        """Those of layers that have some."""
        usual = family.experts
        if usual is None:
            return None
        shared = usual.shared_ffn_hidden_size
        width = ffn_hidden_size
        if not family.has_wide_experts:
            width = self.size("expert", usual.ffn_hidden_size)
        shared = self.size("shared expert", shared) if shared else 0
        if "n_routed_experts" in self.value:
            count = self.value.get("n_shared_experts") or 0
            shared = width * self.size("shared experts") if count else 0
        return Experts(
            num_experts=self.size("experts", usual.num_experts),
            per_token=self.size("per token", usual.per_token),
            ffn_hidden_size=width,
            shared_ffn_hidden_size=shared,
            has_shared_gate=usual.has_shared_gate,
            scores_all=family.scores == "sigmoid"
            or not self.flag("norm_topk_prob", not usual.scores_all),
        )

    def _dense_layers(self, family: Family, num_layers: int) -> tuple[int, ...]:
        """Those that have no experts, in a model whose other layers have some."""
        if family.experts is None:
            return ()
        step, listed, first, every = (self.value.get(key) for key in _DENSE)
        step, every = (1 if each is None else each for each in (step, every))
        listed, first = listed or [], family.first_dense if first is None else first
        for key, number, least in zip(_DENSE, (step, 1, first, every), (1, 1, 0, 1), strict=True):
            if type(number) is not int or number < least:
                self.add(key, repr(number)[:40], f"an integer from {least} on", "Fix it.")
                return ()
        if not isinstance(listed, list) or not set(map(type, listed)) <= {int}:
            self.add(_DENSE[1], repr(listed)[:40], "numbers of layers", "Fix it.")
            return ()
        return tuple(
            n for n in range(num_layers) if n in listed or (n + 1) % step or n < first or n % every
        )

    def _latent(self) -> LatentAttention:
        has_rank = self.value.get("q_lora_rank") is not None
        return LatentAttention(
            kv_lora_rank=self.size("kv_lora_rank"),
            q_lora_rank=self.size("q_lora_rank") if has_rank else 0,
            qk_head_dim=self.size("qk_nope_head_dim"),
            qk_pos_emb_head_dim=self.size("qk_rope_head_dim"),
            v_head_dim=self.size("v_head_dim"),
        )

    @staticmethod
    def _norms_beyond_heads(shape: ModelShape) -> int:
        """Parameters of norms over all heads beyond those of norms over one."""
        return shape.query_width + shape.key_value_width // 2 - 2 * shape.kv_channels

    def size(self, what: str, default: int | None = None, *, largest: int = _LARGEST) -> int:
        """Return a positive integer; without one the problem is noted and 1 returned."""
        key = next((key for key in _KEYS[what] if self.value.get(key) is not None), None)
        if key is None and default is not None:
            return default
        value = None if key is None else self.value[key]
        if type(value) is int and 1 <= value <= largest:
            return value
        found = "no such key" if value is None else repr(value)[:40]
        expected = f"an integer from 1 to {largest}"
        self.add(key or _KEYS[what][0], found, expected, "Take the file that is published.")
        return 1

    def flag(self, key: str | None, default: bool) -> bool:
        """Return a boolean; another value is a problem."""
        value = None if key is None else self.value.get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.add(str(key), repr(value)[:40], "true or false", "Take the file that is published.")
        return default

    def add(self, key: str, found: str, expected: str, remedy: str) -> None:
        """Note a problem."""
        where = f"{self.source}: {key}"
        self.problems.append(Problem(where=where, found=found, expected=expected, remedy=remedy))

    def at(self, problem: Problem) -> Problem:
        """Put the file in front of a problem of the shape."""
        return replace(problem, where=f"{self.source}: {problem.where}")

    def _name(self) -> str:
        name = self.value.get("_name_or_path") or Path(self.source).parent.name
        return str(name)[:80] if isinstance(name, str) and name.isprintable() and name else "model"

    def _groups(self, family: Family, heads: int) -> int:
        """Key and value heads. Falcon's have a key for its newer layers alone."""
        is_multi_query = self.flag("multi_query", family.is_multi_query)
        if is_multi_query and not self.flag("new_decoder_architecture", False):
            return 1
        return self.size("groups", heads)

    def _side_by_side(self, family: Family) -> tuple[bool, int]:
        """Whether attention and feed-forward run side by side, and the norms of a layer."""
        is_parallel = self.flag(family.parallel_key, family.is_parallel)
        if family.parallel_key != "parallel_attn" or not is_parallel:
            return is_parallel, family.norms
        usual = 2 if self.flag("new_decoder_architecture", False) else 1
        return True, usual if self.value.get("num_ln_in_parallel_attn") in (None, usual) else 1

    def _biases(self, family: Family) -> tuple[bool, bool]:
        """Whether all linear layers of attention, and of the feed-forward block, have biases."""
        attention, mlp = family.biases == "all", family.biases in ("all", "mlp")
        if family.bias_key is not None:
            both = self.flag(family.bias_key, attention)
            return both, both
        if family.biases == "qkv if attention_bias":
            return False, False
        return self.flag("attention_bias", attention), self.flag("mlp_bias", mlp)

    def _has_qkv_bias(self, family: Family) -> bool:
        """Whether those of attention that others have not are there."""
        if family.biases == "qkv if attention_bias":
            return self.flag("attention_bias", False)
        return family.biases == "qkv" and self.flag("qkv_bias", True)

    def _refuse_uncounted(self, family: Family, hidden: int) -> None:
        for key, usual in _UNCOUNTED.items():
            if key != family.qk_norm_key and self.flag(key, usual) != usual:
                found, expected = (str(each).lower() for each in (not usual, usual))
                self.add(key, found, expected, "Describe the model with Megatron's flags.")
        narrow = self.value.get("word_embed_proj_dim")
        if narrow not in (None, hidden):
            expected = f"{hidden}, the hidden size"
            remedy = "Describe the model with Megatron's flags."
            self.add("word_embed_proj_dim", repr(narrow)[:40], expected, remedy)

    def _activation(self, family: Family) -> Activation:
        keys = ("hidden_activation", "hidden_act", "activation_function", "activation")
        key = next((k for k in keys if self.value.get(k)), None)
        name = self.value[key] if key else family.activation
        known = _GATED if family.is_gated else _PLAIN
        if isinstance(name, str) and name in known:
            return known[name]
        listed = " or ".join(known)
        self.add(key or keys[1], repr(name)[:40], listed, "No other is known for this type.")
        return known[family.activation]

    def _in_one(self) -> dict[str, Any]:
        found = self.value.get("rope_parameters") or {}
        if isinstance(found, dict):
            return found
        self.add("rope_parameters", repr(found)[:40], "an object", "As transformers writes it.")
        return {}

    def rope(self) -> tuple[float, Mapping[str, Any]]:
        """Return base and scaling of the rotary positions; newer files have both in one key."""
        both = self._in_one()
        scaling = self.value.get("rope_scaling") or both
        usual = self.value.get("rotary_emb_base", 10_000.0)
        base = self.value.get("rope_theta", both.get("rope_theta", usual) if both else usual)
        return base, scaling if isinstance(scaling, dict) else {}

    def _rotary_share(self, family: Family) -> Any:
        """Share of a head that is rotated."""
        both = self._in_one()
        usual = self.value.get("rotary_pct", both.get("partial_rotary_factor", family.rotary))
        return self.value.get("partial_rotary_factor", usual)

    def _notes(self) -> Iterator[str]:
        window = self.value.get("sliding_window")
        if window and self.value.get("use_sliding_window", True):
            yield (
                "attention is over whole samples, in costs and with Megatron's flags above, "
                f"not over a window of {window} tokens: longer samples differ"
            )
        if self.value.get("dual_chunk_attention_config"):
            yield "dual_chunk_attention_config is left out: samples longer than a chunk differ"
        if self.value.get("num_nextn_predict_layers"):
            yield "multi-token prediction is left out"
        kind = self.rope_kind()
        if kind not in ("default", "llama3") and not self.is_latent_yarn():
            yield f"of rope_scaling {kind} Megatron's flags above say nothing"
        if "kv_lora_rank" in self.value and not self.value.get("q_lora_rank"):
            yield "Megatron normalizes the input of queries, too: its weights are of another model"

    def rope_kind(self) -> str:
        """Return how rotary positions are scaled: `default` where they are not."""
        _, scaling = self.rope()
        return str(scaling.get("rope_type", scaling.get("type", "default")))

    def _flags(self, shape: ModelShape, family: Family) -> tuple[str, ...]:
        base, scaling = self.rope()
        epsilon = next((self.value[key] for key in _EPSILONS if key in self.value), 1e-6)
        numbers = (base, epsilon, share := self._rotary_share(family))
        if not all(map(is_finite, numbers)):
            found = ", ".join(map(repr, numbers))[:60]
            self.add("rope_theta, rms_norm_eps, partial_rotary_factor", found, "numbers", "Fix it.")
            return ()
        built = shape.flags()
        assert built is not None  # what has none lacks something
        valued, switches = built
        del valued["--seq-length"]
        valued["--vocab-size"] = self.value.get("vocab_size", 1)
        valued["--norm-epsilon"] = f"{epsilon:g}"
        if shape.position_embedding != "learned":
            valued["--rotary-base"] = f"{int(base)}"
            valued |= {} if share == 1 else {"--rotary-percent": f"{share:g}"}
        if self.rope_kind() == "llama3":
            switches.append("--use-rope-scaling")
            valued["--rope-scaling-factor"] = scaling.get("factor", 8)
        if shape.latent is not None:
            valued |= self._latent_positions(scaling)
        if shape.experts is not None:
            valued |= self._balance() | self.routing(family)
            switches += ["--moe-router-enable-expert-bias"] * (family.scores == "sigmoid")
        return (*(str(word) for pair in valued.items() for word in pair), *switches)

    def is_latent_yarn(self) -> bool:
        """Whether positions are scaled as those of Megatron's latent attention are."""
        _, scaling = self.rope()
        is_usual = all(scaling.get(key, usual) == usual for key, usual in _YARN.items())
        return self.rope_kind() == "yarn" and "kv_lora_rank" in self.value and is_usual

    def _latent_positions(self, scaling: Mapping[str, Any]) -> dict[str, str]:
        if not self.is_latent_yarn():
            return {"--rope-type": "rope"}
        keys = {"factor": "rotary-scaling-factor", "mscale": "mscale"}
        keys |= {"mscale_all_dim": "mscale-all-dim"}
        given = {flag: scaling[key] for key, flag in keys.items() if key in scaling}
        for flag, value in given.items():
            if not is_finite(value):
                self.add(f"rope_scaling: {flag}", repr(value)[:40], "a number", "Fix it.")
        return {"--rope-type": "yarn"} | {f"--{flag}": str(value) for flag, value in given.items()}

    def routing(self, family: Family) -> dict[str, str]:
        """Flags of how experts are chosen: groups of them, and factors of their scores."""
        valued: dict[str, str] = {}
        if family.scores == "sigmoid":
            valued["--moe-router-score-function"] = family.scores
        factor = self.value.get("routed_scaling_factor", 1)
        if not is_finite(factor):
            self.add("routed_scaling_factor", repr(factor)[:40], "a number", "Fix it.")
        elif factor != 1:
            valued["--moe-router-topk-scaling-factor"] = f"{factor:g}"
        if self.value.get("topk_method") != "greedy" and self.size("n_group", 1) > 1:
            valued["--moe-router-num-groups"] = str(self.size("n_group"))
            valued["--moe-router-group-topk"] = str(self.size("topk_group"))
        return valued

    def _balance(self) -> dict[str, str]:
        """Flags of the loss that balances experts. Megatron adds one for each layer, transformers
        one of all layers together."""
        weight = self.value.get("router_aux_loss_coef")
        if weight and not is_finite(weight):
            self.add("router_aux_loss_coef", repr(weight)[:40], "a number", "Fix it.")
        elif weight:
            kind, coefficient = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"
            return {kind: "aux_loss", coefficient: f"{weight:g}"}
        return {}
