import csv
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.measured import MEASURED, needs_measured
from zorse_megatron.costs.analytic_compute import attention_flops
from zorse_megatron.costs.model_memory import delayed_elements
from zorse_megatron.inputs.model import (
    MODELS,
    Experts,
    LatentAttention,
    ModelShape,
    canonical_model,
    padded_vocab_size,
)


def shape(**changes):
    """A small model whose counts can be done by hand."""
    small = ModelShape(
        name="small",
        num_layers=3,
        hidden_size=8,
        ffn_hidden_size=20,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=3,
        vocab_size=32,
        seq_length=16,
    )
    return dataclasses.replace(small, **changes)


# By hand: query 8 x 12, key and value 8 x 12 together, projection 12 x 8: 288.
# Feed-forward: 8 x 20 + 20 x 8 = 320. Norms: 2 x 2 x 8 = 32.
# Biases: query, key, value 24, after attention 8, first matrix 20, second 8: 60.
@pytest.mark.parametrize(
    ("changes", "layer"),
    [
        ({}, 288 + 320 + 32 + 60),
        ({"linear_bias": False}, 288 + 320 + 32),
        ({"linear_bias": False, "qkv_bias": True}, 288 + 320 + 32 + 24),
        ({"linear_bias": False, "norm": "rmsnorm"}, 288 + 320 + 16),
        ({"linear_bias": False, "activation": "swiglu"}, 288 + 480 + 32),
        ({"activation": "swiglu"}, 288 + 480 + 32 + 80),
        ({"qk_norm": True, "norm": "rmsnorm"}, 288 + 320 + 16 + 60 + 6),
    ],
)
def test_layer_by_hand(changes, layer):
    assert shape(**changes).layer_parameters() == layer


def test_whole_model_by_hand():
    whole = shape(position_embedding="learned", max_positions=16)
    assert whole.embedding_parameters() == 32 * 8 + 16 * 8
    assert whole.head_parameters() == 16 + 32 * 8
    assert whole.num_parameters == 384 + 3 * 700 + 272
    tied = dataclasses.replace(whole, tied_embeddings=True)
    assert tied.num_parameters == whole.num_parameters - 256


def test_tensor_parallel_by_hand():
    # Whole on every rank: norms 32, biases after attention and after the feed-forward block 16.
    assert shape().layer_parameters(2) == (288 + 320 + 24 + 20) // 2 + 32 + 16
    assert shape().embedding_parameters(2) == 16 * 8


@given(
    st.sampled_from([name for name in sorted(MODELS) if MODELS[name].experts is None]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_split_layers_add_up(name, ranks):
    model = MODELS[name]
    own = model.layer_parameters(ranks)
    assert model.layer_parameters() <= ranks * own
    assert ranks * (own - model.layer_matrix_parameters(ranks)) < 0.01 * model.layer_parameters()


# As above without the feed-forward block: 320 and two norms of 8 with RMSNorm and no biases.
# A router has 8 x 5, an expert 8 x 6 twice or, with a gate, three times, and biases of 6 and 8.
@pytest.mark.parametrize(
    ("changes", "experts", "layer"),
    [
        ({"linear_bias": False}, {}, 288 + 32 + 40 + 5 * 96),
        ({}, {}, 288 + 32 + 24 + 8 + (40 + 5) + 5 * (96 + 14)),
        ({"activation": "swiglu"}, {}, 288 + 32 + 24 + 8 + (40 + 5) + 5 * (144 + 20)),
        (
            {"linear_bias": False, "activation": "swiglu"},
            {"shared_ffn_hidden_size": 7, "has_shared_gate": True},
            288 + 32 + 40 + 5 * 144 + 3 * 56 + 8,
        ),
    ],
)
def test_experts_by_hand(changes, experts, layer):
    of_layer = Experts(num_experts=5, per_token=2, ffn_hidden_size=6, **experts)
    model = shape(experts=of_layer, **changes)
    assert model.layer_parameters() == layer
    # What a token passes: matrices alone, of two experts and the shared one.
    own = 3 if changes.get("activation") else 2
    active = 288 + 40 + 8 * of_layer.has_shared_gate + own * 8 * of_layer.active_width
    assert model.layer_matrix_parameters() == active


# 2 heads of 3 + 2 for queries and keys and of 4 for values; width 8. Latent keys and values are 7
# wide: down to 7 + 2, up to 2 x (3 + 4), and 2 x 4 back. Queries are 2 x 5, from 6 or from 8.
@pytest.mark.parametrize(
    ("rank", "matrices", "norms"), [(0, 8 * 10, 7), (6, 8 * 6 + 6 * 10, 7 + 6)]
)
def test_latent_attention_by_hand(rank, matrices, norms):
    latent = LatentAttention(
        kv_lora_rank=7, q_lora_rank=rank, qk_head_dim=3, qk_pos_emb_head_dim=2, v_head_dim=4
    )
    usual = {"linear_bias": False, "num_attention_heads": 2, "num_query_groups": 2}
    model = shape(latent=latent, qk_norm=True, norm="rmsnorm", **usual)
    attention = matrices + 8 * 9 + 7 * 14 + 8 * 8
    assert model.layer_matrix_parameters() == attention + 320
    assert model.layer_parameters() == attention + 320 + 2 * 8 + norms
    pairs = model.seq_length**2 / 2
    assert attention_flops(model) == 2 * pairs * (2 * 5 + 2 * 4)
    inputs, outputs = 2 * 8 + 8 + latent.ranks, 2 * 8 + 10 + 14 + 9 + rank
    feed_forward = model.ffn_width + model.ffn_input_width
    assert delayed_elements(model) == model.seq_length * (inputs + outputs + feed_forward)


# Published: Llama 6.7B, 13.0B, 32.5B, 65.2B (arXiv 2302.13971); Llama 3 8.03B, 70.6B (model
# cards); OLMoE, Qwen3, Mixtral, DeepSeek (weights of the model cards); GPT-3 2.7B and 6.7B (arXiv
# 2005.14165, table 2.1).
@pytest.mark.parametrize(
    ("name", "billions", "tolerance"),
    [
        ("llama-7b", 6.738, 1e-3),
        ("llama-13b", 13.016, 1e-3),
        ("llama-33b", 32.529, 1e-3),
        ("llama-65b", 65.286, 1e-3),
        ("llama3-8b", 8.030, 1e-3),
        ("llama3-70b", 70.554, 1e-3),
        ("olmoe-1b-7b", 6.919, 1e-4),
        ("qwen3-30b-a3b", 30.532, 1e-4),
        ("mixtral-8x7b", 46.703, 1e-4),
        ("deepseek-v2-lite", 15.706, 1e-4),
        ("gpt-2.7b", 2.65, 0.06),
        ("gpt-6.7b", 6.66, 0.04),
    ],
)
def test_published_sizes(name, billions, tolerance):
    assert MODELS[name].num_parameters == pytest.approx(billions * 1e9, rel=tolerance)


@needs_measured
def test_published_shapes():
    """The authors of Zorse count 49,152 rows in every table."""
    with (MEASURED / "model_shapes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    for row in rows:
        model = dataclasses.replace(MODELS[row["model"]], vocab_size=49152)
        assert (model.hidden_size, model.num_layers) == (
            int(row["hidden_size"]),
            int(row["num_layers"]),
        )
        assert model.layer_parameters() == int(row["params_per_layer"])
        assert model.num_parameters == int(row["total_params"])


@needs_measured
def test_published_parameters_by_tensor_parallel_size():
    """Embedding and layers of Sailor's models, exactly, for every split."""
    with (MEASURED / "model_memory_tp.csv").open() as file:
        rows = list(csv.DictReader(file))
    first = [row for row in rows if row["layer_index"] in ("0", "1")]
    assert len(first) == 26
    for row in first:
        ranks = int(row["tensor_parallel"])
        vocab = padded_vocab_size(50257, tensor_parallel=ranks)
        model = dataclasses.replace(MODELS[canonical_model(row["model"])], vocab_size=vocab)
        count = model.embedding_parameters if row["layer_index"] == "0" else model.layer_parameters
        assert count(ranks) == int(float(row["params_floats"]))


def test_fingerprint():
    found = MODELS["llama3-8b"].fingerprint()
    assert (found.num_layers, found.num_query_groups, found.vocab_size) == (32, 8, 128256)
    assert found.tied_embeddings is False
