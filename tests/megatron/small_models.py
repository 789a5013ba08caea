"""Small models of each type that are converted, made by transformers, and what it computes."""

from pathlib import Path
from typing import Any

import torch

from tests.shared import directory_of

VOCABULARY, SAMPLES, LENGTH = 250, 2, 40
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 4, "n_shared_experts": 1},
    **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 48},
    "routed_scaling_factor": 1.5,
}
LATENT = {
    **{"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 12, "num_key_value_heads": 4, "rms_norm_eps": 1e-6},
}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1},
    **{"mscale": 0.7, "mscale_all_dim": 0.8, "original_max_position_embeddings": 4096},
}
# With experts, probabilities of the last that is chosen and the first that is not are at least
# 2.6e-5 apart, for the tokens below: rounding, of 1e-7, chooses no others.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-biased": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {"head_dim": 32, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {"num_experts": 6, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 56},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            **{"head_dim": 32, "num_experts": 12, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 48, "norm_topk_prob": True},
        },
    ),
    "qwen3-moe-dense": (
        "Qwen3MoeConfig",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            **{"decoder_sparse_step": 2, "norm_topk_prob": True},
        },
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        {
            **DEEPSEEK,
            **{"head_dim": 32, "attention_bias": True, "use_qk_norm": True},
            **{"n_group": 1, "topk_group": 1},
        },
    ),
    "deepseek-v3": ("DeepseekV3Config", {**DEEPSEEK, **LATENT, "rope_parameters": YARN}),
}


def made_models() -> Path:
    """Return a folder with each model, and its logits of some tokens."""
    return directory_of("hugging-face-models", make_models)


def make_models(folder: Path) -> None:
    """Fill a folder."""
    import transformers

    for name, (config_class, more) in MODELS.items():
        config = getattr(transformers, config_class)(**(SHAPE | more))
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    buffer.add_(0.1 * torch.randn_like(buffer))
            tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH))
            logits = model(tokens).logits
        model.save_pretrained(folder / name, max_shard_size="200KB")
        torch.save((tokens, logits), folder / f"{name}.pt")
