"""Which Hugging Face models have weights that Megatron computes with as transformers does.

Of a type that is converted, a `config.json` may still ask for what Megatron's flags cannot say.
"""

from collections.abc import Mapping
from typing import Any

from zorse_megatron.errors import Problem
from zorse_megatron.inputs.hugging_face import FAMILIES, ConfigKeys, HuggingFaceModel, is_finite

CONVERTED = (
    *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"),
    *("deepseek_v3", "glm4_moe"),
)
"""The types whose weights `zorse import-hf` converts."""
# Megatron's `--use-rope-scaling` has these alone (`RotaryEmbedding._apply_scaling`).
_LLAMA3_SCALING = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN_KEYS = {
    *("rope_type", "type", "rope_theta", "factor", "mscale", "mscale_all_dim"),
    *("beta_fast", "beta_slow", "original_max_position_embeddings"),
}
_MOST_PREDICTED = 100
_EPSILON = 1e-6  # of transformers' norms in latent attention, whatever `rms_norm_eps` says


def conversion_problems(
    value: Mapping[str, Any], model: HuggingFaceModel, *, source: str
) -> list[Problem]:
    """Say what keeps the weights of a model that `parse_config` has read from being converted."""
    config = ConfigKeys(value=value, source=source)
    if (kind := value.get("model_type")) not in CONVERTED:
        listed = ", ".join(CONVERTED)
        found = repr(kind) if model.flags else f"{kind!r} ({'; '.join(model.notes)})"
        config.add("model_type", found, listed, "The weights of no other type are converted.")
    if quantization := value.get("quantization_config"):
        is_object = isinstance(quantization, Mapping)
        method = quantization.get("quant_method", "some") if is_object else quantization
        config.add(
            "quantization_config", str(method)[:40], "none", "Take weights in bf16, fp16 or fp32."
        )
    predicted = value.get("num_nextn_predict_layers")
    if predicted is not None and not (type(predicted) is int and 0 <= predicted <= _MOST_PREDICTED):
        expected = f"an integer from 0 to {_MOST_PREDICTED}"
        config.add("num_nextn_predict_layers", repr(predicted)[:40], expected, "Fix it.")
    _add_other_scaling(config)
    if model.shape.experts is not None:
        _add_other_routing(config, model.shape.experts.per_token)
    if model.shape.latent is not None:
        _add_other_norms(config)
    if not model.flags and not config.problems:
        lacks = "; ".join(model.notes)
        config.add("model_type", lacks, "what Megatron's flags build", "Take another model.")
    return config.problems


def _add_other_scaling(config: ConfigKeys) -> None:
    """Note a scaling of positions that Megatron's flags have not."""
    base, scaling = config.rope()
    kind = config.rope_kind()
    if not isinstance(config.value.get("rope_scaling") or {}, Mapping):
        kind = repr(config.value["rope_scaling"])[:40]
    factor = scaling.get("factor", 8)
    if kind == "llama3" and not (is_finite(factor) and factor >= 1):
        config.add("rope_scaling.factor", repr(factor)[:40], "a number from 1 on", "Fix it.")
    if config.is_latent_yarn():
        _add_other_yarn(config, scaling)
    elif kind not in ("default", "llama3"):
        config.add("rope_scaling", kind, "none, or llama3", "Megatron has no other.")
    for key, usual in (_LLAMA3_SCALING if kind == "llama3" else {}).items():
        if scaling.get(key, usual) != usual:
            config.add(f"rope_scaling.{key}", repr(scaling[key]), repr(usual), "Megatron's own.")
    if is_finite(base) and (base != int(base) or base < 1):
        expected = "an integer from 1 on"
        config.add("rope_theta", repr(base), expected, "--rotary-base takes no other.")


def _add_other_yarn(config: ConfigKeys, scaling: Mapping[str, Any]) -> None:
    """Note what Megatron's latent attention does not take, or has another default for.

    Transformers takes both factors or neither; Megatron 1 for the first and 0 for the second.
    """
    if unknown := sorted(set(scaling) - _YARN_KEYS):
        config.add("rope_scaling", ", ".join(unknown)[:60], "no such key", "Megatron has none.")
    one, other = (scaling.get(key) for key in ("mscale", "mscale_all_dim"))
    if bool(one) != bool(other) and (one, other) not in ((1, None), (1, 0)):
        found = f"mscale {one}, mscale_all_dim {other}"
        config.add("rope_scaling", found, "both, or neither", "Megatron's scores would differ.")


def _add_other_routing(config: ConfigKeys, per_token: int) -> None:
    """Note experts that Megatron would choose or weight otherwise.

    The score of a group of experts is the sum of its best `per_token // topk_group` there
    (`group_limited_topk`).
    """
    family = FAMILIES[config.value["model_type"]]
    if family.scores == "sigmoid" and not config.flag("norm_topk_prob", True):
        expected = "true: Megatron divides the chosen experts' scores by their sum"
        config.add("norm_topk_prob", "false", expected, "Take another model.")
    if "--moe-router-group-topk" not in config.routing(family):
        return
    groups = config.size("topk_group")
    if per_token // groups != 2:
        expected = f"{per_token // 2}: as in transformers, the best 2 experts of a group count then"
        config.add("topk_group", str(groups), expected, "Take another model.")


def _add_other_norms(config: ConfigKeys) -> None:
    """Note norms within latent attention that are not those of transformers."""
    if not config.value.get("q_lora_rank"):
        found, expected = "no rank", "one: without it Megatron normalizes the input of queries, too"
        config.add("q_lora_rank", found, expected, "Take another model.")
    epsilon = config.value.get("rms_norm_eps", _EPSILON)
    if epsilon != _EPSILON:
        expected = f"{_EPSILON:g}, as transformers has in latent attention"
        config.add("rms_norm_eps", repr(epsilon)[:40], expected, "Take another model.")
