"""Measured layers against other ways to know the same: the whole model, and closed forms."""

import json
from typing import Any

import pytest

from tests.megatron.launch import run_ranks
from zorse_megatron.costs.model_memory import LayerActivations
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import computing_from_flags, shape_from_flags
from zorse_megatron.flags.table import WITHOUT_DROPOUT
from zorse_megatron.inputs.lora import LORA_FLAG, parse_lora
from zorse_megatron.inputs.model import Computing, ModelShape
from zorse_megatron.measure.tasks import single_layer_flags

SIZE, SEQUENCE = 2, 64
BASE = (
    *("--hidden-size", "128", "--num-attention-heads", "4", "--seq-length", str(SEQUENCE)),
    *("--max-position-embeddings", str(SEQUENCE), "--vocab-size", "512", "--num-layers", "24"),
    *WITHOUT_DROPOUT,
    "--no-create-attention-mask-in-dataloader",
)
GPT = (*BASE, "--ffn-hidden-size", "320")
LLAMA = (
    *(*BASE, "--ffn-hidden-size", "192", "--swiglu", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--position-embedding-type", "rope"),
    *("--untie-embeddings-and-output-weights", "--group-query-attention"),
    *("--num-query-groups", "4"),
)

EXPERTS = (
    *(*BASE, "--ffn-hidden-size", "320", "--disable-bias-linear", "--num-experts", "8"),
    *("--moe-router-topk", "3", "--moe-ffn-hidden-size", "96"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
LATENT = (
    *(*BASE, "--ffn-hidden-size", "320", "--position-embedding-type", "rope"),
    *("--multi-latent-attention", "--kv-lora-rank", "48", "--qk-head-dim", "24"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "20", "--no-rope-fusion"),
    *("--rope-type", "rope", "--disable-bias-linear"),
)
SHARED = ("--moe-shared-expert-intermediate-size", "40", "--moe-shared-expert-gate")


def measured(flags: tuple[str, ...], *more: str) -> tuple[ModelShape, dict[str, Any]]:
    shape = shape_from_flags(flags)
    words = [str(SIZE), *single_layer_flags(flags, shape), *more]
    entry = "tests.megatron.measure_layers_entry"
    result = run_ranks(words, 1, entry=entry, timeout_s=120).check()
    (line,) = [line for line in result.outputs[0].splitlines() if line.startswith("FOUND ")]
    return shape, json.loads(line.removeprefix("FOUND "))


@pytest.fixture(scope="module", params=[GPT, LLAMA], ids=["gpt", "llama"])
def found(request: pytest.FixtureRequest) -> tuple[ModelShape, dict[str, Any]]:
    return measured(request.param)


def test_parameters_are_those_of_the_shape(found: tuple[ModelShape, dict[str, Any]]) -> None:
    shape, facts = found
    assert facts["parameters"] == {
        "embedding": shape.embedding_parameters(),
        "layer": shape.layer_parameters(),
        "head": shape.head_parameters(),
    }


def test_a_layer_keeps_what_autograd_saves(found: tuple[ModelShape, dict[str, Any]]) -> None:
    """Live tensors between forward and backward, and saved tensors: two ways to the same bytes.

    What autograd saves has the layer's input in it, which is the output of another layer.
    """
    _, facts = found
    assert facts["saved_bytes"] == facts["counted_bytes"] - facts["input_bytes"]
    assert facts["attention"] == "unfused", "these are Megatron's own layers"


@pytest.mark.parametrize("found", [GPT], indirect=True, ids=["gpt"])
def test_a_layer_keeps_the_closed_form(found: tuple[ModelShape, dict[str, Any]]) -> None:
    """`costs/model_memory.py` counts large tensors; beside them there are the statistics of the
    norms, mean and deviation of each token, and one causal mask of one byte each for all samples.
    Of Llama-like layers torch's RMSNorm and rotary embedding keep copies that fused ones do not.
    """
    shape, facts = found
    form = LayerActivations(model=shape, element_bytes=4, attention="unfused")
    statistics = 2 * 2 * 4 * SEQUENCE
    boundary = SEQUENCE * shape.hidden_size * 4
    expected = form.bytes_per_sample("none") - boundary + statistics
    assert facts["saved_bytes"] == SIZE * expected + SEQUENCE**2


@pytest.mark.parametrize(
    ("more", "beside"),
    [
        # Tokens of each expert.
        ((), 8 * 8),
        (("--swiglu", "--moe-router-pre-softmax", *SHARED), 8 * 8),
        # Of each sample, too, and the loss.
        (("--swiglu", "--moe-aux-loss-coeff", "0.01"), 8 * 8 + 2 * 8 * 8 + 4),
    ],
    ids=["gelu", "shared", "auxiliary loss"],
)
def test_experts(more: tuple[str, ...], beside: int) -> None:
    """To the parameter, and what autograd saves to the byte: with what the test above adds."""
    flags = (*EXPERTS, *more)
    shape, facts = measured(flags)
    assert facts["parameters"]["layer"] == shape.layer_parameters()
    computing = computing_from_flags(read_command(flags).args)
    form = LayerActivations(
        model=shape,
        element_bytes=4,
        attention="unfused",
        computing=Computing(has_auxiliary_loss=computing.has_auxiliary_loss),
    )
    expected = form.bytes_per_sample("none") + 2 * 2 * 4 * SEQUENCE
    assert facts["counted_bytes"] == SIZE * expected + SEQUENCE**2 + beside


@pytest.mark.parametrize("more", [(), ("--swiglu", *SHARED)], ids=["gelu", "shared"])
def test_adapters_beside_experts(more: tuple[str, ...]) -> None:
    """Experts that stay as they are keep no inputs of their matrices; routers still do."""
    flags = (*EXPERTS, *more)
    shape, facts = measured(flags, LORA_FLAG, "rank=4,alpha=8,targets=q,k,v,o")
    lora = parse_lora("rank=4,alpha=8,targets=q,k,v,o", [])
    form = LayerActivations(
        model=shape, element_bytes=4, attention="unfused", computing=Computing(lora=lora)
    )
    expected = form.bytes_per_sample("none") + 2 * 2 * 4 * SEQUENCE
    assert facts["counted_bytes"] == SIZE * expected + SEQUENCE**2 + 8 * 8


@pytest.mark.parametrize("more", [(), ("--q-lora-rank", "40")], ids=["keys", "queries"])
def test_latent_attention(more: tuple[str, ...]) -> None:
    """The same; Megatron's own rotation keeps sines and cosines of 8 elements, of queries and keys.

    Norms of what heads come from are in Transformer Engine's layers alone.
    """
    shape, facts = measured((*LATENT, *more))
    assert facts["parameters"]["layer"] == shape.layer_parameters()
    form = LayerActivations(model=shape, element_bytes=4, attention="unfused")
    expected = form.bytes_per_sample("none") + 2 * 2 * 4 * SEQUENCE
    assert facts["counted_bytes"] == SIZE * expected + SEQUENCE**2 + 4 * SEQUENCE * 8 * 4


def test_weight_gradients_are_a_part_of_a_layer_s_backward(
    found: tuple[ModelShape, dict[str, Any]],
) -> None:
    """A third of the operations of all matrices, of which the backward has two thirds."""
    _, facts = found
    weights_s = facts["weight_gradients_s"]
    _, backward_s = facts["measured_s"]["layer"]
    assert weights_s["embedding"] is None and weights_s["head"] is None
    assert 0.05 * backward_s < weights_s["layer"] < 0.8 * backward_s


def test_parts_add_up_to_the_model(found: tuple[ModelShape, dict[str, Any]]) -> None:
    """Their sum against the fastest run of the whole model of one layer, timed as a whole.

    In CPU seconds. A factor of 2 is for caches that others use as well; a forward that was left
    out, a time in milliseconds or a pass that ran twice is further off than that.
    """
    _, facts = found
    parts_s = sum(sum(times) for times in facts["measured_s"].values())
    assert facts["whole_s"] / 2 < parts_s < 2 * facts["whole_s"]
