import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.profile_samples import good, spoil
from zorse_megatron.costs.analytic_compute import (
    AnalyticCompute,
    attention_flops,
    elementwise_bytes,
    layer_flops,
    shares_of,
)
from zorse_megatron.costs.interface import ComputeCost, PassTimes
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.model import MODELS, ModelShape
from zorse_megatron.inputs.profile import parse_profile

LLAMA = MODELS["llama-7b"]


def profile(value=None):
    return parse_profile(json.dumps(value or good()).encode())


TINY = profile().models[0].shape()


def profiled(model=TINY, value=None, dtype="float16", **options):
    return ProfiledCompute(profile(value), model, dtype=dtype, **options)


def test_flops_by_hand():
    model = dataclasses.replace(LLAMA, seq_length=2048)
    # 4 x 4096^2 + 3 x 4096 x 11008 parameters, two operations each; half of 2048^2 scores.
    assert layer_flops(model) == 2048 * 2 * (4 * 4096**2 + 3 * 4096 * 11008) + 2048**2 * 2 * 4096
    assert attention_flops(model) == 2048**2 * 2 * 4096
    assert layer_flops(model, 2) == layer_flops(model) / 2
    # 10 widths of norms and residuals, 2 x (4096 + 4096) rotary, 3 x 11008 of the activation.
    assert elementwise_bytes(model, 2) == 2048 * 2 * (10 * 4096 + 16384 + 3 * 11008)


def test_measured():
    compute: ComputeCost = profiled()
    assert compute.layer("T4", 2) == PassTimes(forward_s=0.002, backward_s=0.005)
    assert compute.layer("T4", 3).backward_s == pytest.approx(0.007)
    assert compute.layer("T4", 8).forward_s == pytest.approx(0.008)
    assert compute.layer("T4", 8).backward_s == pytest.approx(0.017)
    assert profiled().provenance("T4").basis == "measured"
    assert "tiny on T4 at sequence length 32 in float16" in str(profiled().provenance("T4"))


def test_analytic_entries_are_not_called_measured():
    value = spoil(["sources", 0, "kind"], "analytic")
    assert profiled(value=value).provenance("T4").basis == "analytic"


def test_recompute():
    compute = profiled()
    assert compute.recompute_s("T4", 2, "none") == 0.0
    assert compute.recompute_s("T4", 2, "full") == 0.002
    share = attention_flops(TINY) / layer_flops(TINY)
    assert compute.recompute_s("T4", 2, "selective") == pytest.approx(0.002 * share)


def test_step_is_measured_per_parameter():
    assert profiled().step_s("T4", 3_000_000) == pytest.approx(0.003)
    in_float32 = profiled(dtype="float32").step_s("T4", 3_000_000)
    assert in_float32 == pytest.approx(0.003 * 28 / 34)
    assert profiled().step_s("L4", 1_000_000) == pytest.approx(1e6 * 34 / (0.8 * 300e9))


def test_float16_answers_for_bfloat16():
    value = spoil(["times", 0, "gpu_kind"], "A10G")
    compute = profiled(value=value, dtype="bfloat16")
    assert compute.layer("A10G", 2).forward_s == pytest.approx(0.002)
    assert compute.provenance("A10G").basis == "scaled"


def test_the_same_chip_answers():
    value = spoil(["times", 0, "gpu_kind"], "V100-16")
    compute = profiled(value=value)
    assert compute.layer("V100-32", 2).forward_s == pytest.approx(0.002)
    assert compute.provenance("V100-32").basis == "scaled"
    assert compute.provenance("V100-PCIE-16").basis == "analytic"


def test_a_kind_of_the_cluster_file_computes_like_the_one_it_is_like():
    half = dataclasses.replace(GPU_KINDS["T4"], name="half", memory_bytes=8 * 10**9)
    compute = profiled(kinds={"half": half})
    assert compute.layer("half", 2) == profiled().layer("T4", 2)
    assert compute.provenance("half").basis == "scaled"
    analytic = AnalyticCompute(LLAMA, dtype="float16", kinds={"half": half})
    assert analytic.layer("half", 2) == AnalyticCompute(LLAMA, dtype="float16").layer("T4", 2)
    assert "calibrated on this GPU" in str(analytic.provenance("half"))


def test_another_dtype_does_not_answer():
    assert profiled(dtype="float32").provenance("T4").basis == "analytic"


def test_scaling_by_sequence_length_keeps_tokens_together():
    """Twice the sequence with half the samples: as many tokens, a little more attention."""
    longer = dataclasses.replace(TINY, seq_length=64)
    scaled, own = profiled(longer), profiled()
    assert scaled.provenance("T4").basis == "scaled"
    ratio = scaled.layer("T4", 2).forward_s / own.layer("T4", 4).forward_s
    assert 1.0 <= ratio < 1.1


def test_scaling_follows_the_analytic_ratio():
    wider = dataclasses.replace(LLAMA, seq_length=512)
    value = good()
    value["models"].append({**vars(wider), "name": "llama"})
    value["times"][0] |= {"model": "llama", "seq_length": 512}
    target = dataclasses.replace(MODELS["llama-13b"], seq_length=512)
    found = profiled(target, value).layer("T4", 4)
    ratio = [
        AnalyticCompute(model, dtype="float16").layer("T4", 4).forward_s
        for model in (target, wider)
    ]
    assert found.forward_s == pytest.approx(0.004 * ratio[0] / ratio[1])


def test_the_closest_series_is_taken():
    value = good()
    far = {**value["times"][0], "seq_length": 256, "forward_s": [1.0, 2.0, 3.0]}
    value["times"].insert(0, far)
    assert profiled(value=value).layer("T4", 1).forward_s == 0.001
    near = profiled(dataclasses.replace(TINY, seq_length=40), value)
    assert "sequence length 32" in near.provenance("T4").detail


def test_unknown_kind_is_named():
    for call in (
        lambda: profiled().layer("Z9", 1),
        lambda: profiled().head("Z9", 1),
        lambda: profiled().step_s("Z9", 1),
        lambda: profiled().provenance("Z9"),
        lambda: AnalyticCompute(TINY, dtype="float16").layer("Z9", 1),
    ):
        with pytest.raises(LookupError, match="no figures for GPU kind Z9"):
            call()


def test_dtype_that_a_gpu_does_not_compute_in():
    with pytest.raises(LookupError, match="GPU kind T4 has no hardware support for bfloat16"):
        AnalyticCompute(TINY, dtype="bfloat16").layer("T4", 1)


@pytest.mark.parametrize("size", [0, -1])
def test_no_samples(size):
    with pytest.raises(ValueError, match="expected 1 or more"):
        profiled().layer("T4", size)


def test_measured_head_and_embedding():
    value = good()
    for part, seconds in (("head", 0.01), ("embedding", 0.02)):
        entry = {**value["times"][0], "part": part, "forward_s": [seconds, 1.0, 2.0]}
        value["times"].append(entry)
    compute = profiled(value=value)
    assert compute.head("T4", 1).forward_s == 0.01
    assert compute.embedding("T4", 1).forward_s == 0.02
    # Of another table they do not answer.
    other = profiled(dataclasses.replace(TINY, vocab_size=256), value)
    assert other.head("T4", 1).forward_s != 0.01
    assert other.layer("T4", 1).forward_s == 0.001


def test_head_is_priced_by_its_operations():
    """A head with the parameters of k layers costs about k layers."""
    compute = AnalyticCompute(LLAMA, dtype="float16")
    layers = LLAMA.table_parameters() / LLAMA.layer_parameters()
    for kind in ("A100-40", "T4"):
        head, layer = compute.head(kind, 8), compute.layer(kind, 8)
        assert 0.6 < head.forward_s / (layers * layer.forward_s) < 1.2
        assert 0.6 < head.backward_s / (layers * layer.backward_s) < 1.2


def test_head_follows_the_measured_layers():
    slower = good()
    slower["times"][0]["forward_s"] = [0.002, 0.004, 0.008]
    own, other = profiled().head("T4", 2), profiled(value=slower).head("T4", 2)
    assert other.forward_s == pytest.approx(2 * own.forward_s)
    assert other.backward_s == pytest.approx(own.backward_s)


def test_embedding_is_memory_traffic():
    embedding = AnalyticCompute(LLAMA, dtype="float16").embedding("T4", 1)
    # The gradient of the table: 12 bytes of 131 M parameters at 0.8 x 320 GB/s.
    assert embedding.backward_s == pytest.approx(131072000 * 12 / 256e9, rel=0.05)
    assert embedding.forward_s < 0.1 * embedding.backward_s


def test_points_that_are_not_believed_are_replaced():
    value = good()
    value["times"][0] |= {
        "micro_batch_sizes": [1, 2, 3, 4],
        "forward_s": [0.010, 0.013, 0.030, 0.040],
        "backward_s": [0.1, 0.2, 0.3, 0.4],
    }
    assert profiled(value=value).layer("T4", 2).forward_s == pytest.approx(0.020)


@given(
    st.sampled_from(sorted(GPU_KINDS)),
    st.sampled_from(sorted(MODELS)),
    st.integers(1, 32),
    st.sampled_from(["float16", "float32"]),
)
def test_analytic_times_are_sane(kind, name, size, dtype):
    model: ModelShape = MODELS[name]
    compute = AnalyticCompute(model, dtype=dtype)
    one, more = compute.layer(kind, size), compute.layer(kind, size + 1)
    assert 0 < one.forward_s <= more.forward_s
    assert one.forward_s < one.backward_s
    peak = GPU_KINDS[kind].peak.of(dtype) * max(1.0, shares_of([kind], dtype)[0].forward)
    assert one.forward_s >= size * layer_flops(model) / peak
    assert compute.head(kind, size).forward_s > 0
    assert compute.embedding(kind, size).backward_s > 0
