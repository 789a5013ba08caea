"""Well-known models, and those of published measurements.

Llama 1: Touvron et al. 2023 (arXiv 2302.13971). Llama 3: Grattafiori et al. 2024 (arXiv
2407.21783). llama-3b: OpenLLaMA. llama-1b: TinyLlama, with as many key heads as query heads, as
the authors of Zorse measured it. GPT-3: Brown et al. 2020 (arXiv 2005.14165). The `sailor-` shapes
are those that the authors of Sailor (SOSP 2025) measured: GPT-2's vocabulary, learned positions,
biases throughout; their Llama has plain heads, a tied table and a feed-forward width of 4 x hidden.
"""

import dataclasses

from zorse_megatron.schema.model.model_shape import Activation, ModelShape

_GPT2_VOCAB = 50304  # 50,257 padded to a multiple of 128
_LLAMA_VOCAB = 32000


def _llama(
    name: str,
    *,
    num_layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    groups: int | None = None,
    vocab: int = _LLAMA_VOCAB,
    seq: int = 2048,
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups or heads,
        kv_channels=hidden // heads,
        vocab_size=vocab,
        seq_length=seq,
        activation="swiglu",
        norm="rmsnorm",
        linear_bias=False,
    )


def _gpt(
    name: str,
    *,
    num_layers: int,
    hidden: int,
    heads: int,
    tied: bool = False,
    activation: Activation = "gelu",
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        vocab_size=_GPT2_VOCAB,
        seq_length=2048,
        tied_embeddings=tied,
        activation=activation,
        position_embedding="learned",
        max_positions=2048,
    )


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _llama("llama-1b", num_layers=22, hidden=2048, ffn=5632, heads=32),
        _llama("llama-3b", num_layers=26, hidden=3200, ffn=8640, heads=32),
        _llama("llama-7b", num_layers=32, hidden=4096, ffn=11008, heads=32),
        _llama("llama-13b", num_layers=40, hidden=5120, ffn=13824, heads=40),
        _llama("llama-33b", num_layers=60, hidden=6656, ffn=17920, heads=52),
        _llama("llama-65b", num_layers=80, hidden=8192, ffn=22016, heads=64),
        _llama(
            "llama3-8b",
            num_layers=32,
            hidden=4096,
            ffn=14336,
            heads=32,
            groups=8,
            vocab=128256,
            seq=8192,
        ),
        _llama(
            "llama3-70b",
            num_layers=80,
            hidden=8192,
            ffn=28672,
            heads=64,
            groups=8,
            vocab=128256,
            seq=8192,
        ),
        _gpt("gpt-1.3b", num_layers=24, hidden=2048, heads=16),
        _gpt("gpt-2.7b", num_layers=32, hidden=2560, heads=32),
        _gpt("gpt-6.7b", num_layers=32, hidden=4096, heads=32),
        _gpt("sailor-opt-350m", num_layers=24, hidden=1024, heads=16, activation="relu"),
        _gpt("sailor-opt-30b", num_layers=48, hidden=7168, heads=56, activation="relu"),
        _gpt("sailor-gpt-neo-2.7b", num_layers=32, hidden=2560, heads=20, tied=True),
        dataclasses.replace(
            _llama(
                "sailor-llama3-8b",
                num_layers=32,
                hidden=4096,
                ffn=16384,
                heads=32,
                vocab=_GPT2_VOCAB,
                seq=8192,
            ),
            linear_bias=True,
            tied_embeddings=True,
        ),
    )
}

# Names in the published measurements.
_ALIASES = {
    "opt-350": "sailor-opt-350m",
    "opt-30": "sailor-opt-30b",
    "gpt-neo-2.7": "sailor-gpt-neo-2.7b",
    "llama-3-8": "sailor-llama3-8b",
}


def canonical_model(name: str) -> str:
    """Return our spelling of a well-known model; an unknown name comes back as it is.

    >>> canonical_model("OPT-350"), canonical_model("Llama-7B"), canonical_model("mine")
    ('sailor-opt-350m', 'llama-7b', 'mine')
    """
    lower = name.lower()
    known = _ALIASES.get(lower, lower)
    return known if known in MODELS else name
