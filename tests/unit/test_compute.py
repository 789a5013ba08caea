"""Times of layers, measured and calculated, and attention by kind of GPU."""

import csv
import dataclasses
import json
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cli_samples import FLAGS, lab_plan, runner_in
from tests.unit.profile_samples import good, spoil
from tests.unit.profile_samples import good as good_profile
from zorse_megatron.costs.analytic_compute import (
    AnalyticCompute,
    attention_flops,
    elementwise_bytes,
    layer_flops,
    score_bytes,
    shares_of,
)
from zorse_megatron.costs.interface import ComputeCost, PassTimes
from zorse_megatron.costs.model_memory import (
    TransformerMemory,
    attention_by_kind,
    memory_from_profile,
    precision_of,
)
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.gpus.known_gpus import GPU_KINDS, canonical_kind
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS, USUAL, Computing, ModelShape
from zorse_megatron.inputs.profile import Profile, Source, parse_profile
from zorse_megatron.planner.inputs.cost_models import CostModels
from zorse_megatron.planner.inputs.search_inputs import make_inputs

LLAMA = MODELS["llama-7b"]


def profile(value=None):
    return parse_profile(json.dumps(value or good()).encode())


TINY = profile().models[0]


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


def test_weight_gradients_take_the_share_that_was_measured():
    value = good()
    estimated = profiled()
    assert not estimated.provenance("T4").has_weight_gradients
    value["times"][0]["weight_gradients_s"] = [0.0006, 0.002, 0.0027]
    compute = profiled(value=value)
    assert compute.provenance("T4").has_weight_gradients
    for size, share in ((1, 0.2), (2, 0.4), (3, 0.35), (4, 0.3), (8, 0.3)):
        backward_s = compute.layer("T4", size).backward_s
        assert compute.weight_gradients_s("T4", size) == pytest.approx(share * backward_s)


@pytest.mark.parametrize("share", [0.3, 0.999])
def test_both_parts_of_a_backward_are_scaled_as_their_estimates_differ(share):
    """Of a relative. What is left of a backward without weight gradients takes time, always."""
    value = good()
    backward_s = value["times"][0]["backward_s"]
    value["times"][0]["weight_gradients_s"] = [share * each for each in backward_s]
    wider = dataclasses.replace(TINY, ffn_hidden_size=1024)

    def quotient(compute: ComputeCost) -> float:
        weights_s = compute.weight_gradients_s("T4", 4)
        return weights_s / (compute.layer("T4", 4).backward_s - weights_s)

    measured = quotient(profiled(wider, value)) / quotient(profiled(value=value))
    analytic = [quotient(AnalyticCompute(each, dtype="float16")) for each in (wider, TINY)]
    assert measured == pytest.approx(analytic[0] / analytic[1])
    assert measured != 1


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


# Attention.

NOTHING = Profile(schema_version=1, sources=(Source(name="none", kind="analytic"),))
FOUR_KINDS = "nodes: [{gpus: [1 x V100-16, 1 x T4, 1 x A100-40, 1 x H100-80]}]"
GIB = 2**30


def models(model, *, text=FOUR_KINDS, dtype="float16", computing=USUAL, profile=NOTHING):
    return CostModels(
        cluster=parse_cluster(text.encode()),
        model=model,
        profile=profile,
        dtype=dtype,
        computing=computing,
    )


def at(name, seq_length):
    return dataclasses.replace(MODELS[name], seq_length=seq_length)


@pytest.mark.parametrize(
    ("computing", "dtype", "expected"),
    [
        (USUAL, "float16", ["unfused", "unfused", "flash", "flash"]),
        (Computing(), "float16", ["unfused", "unfused", "flash", "flash"]),
        (Computing(), "float32", ["unfused"] * 4),
        (Computing(attention="unfused"), "bfloat16", ["unfused"] * 4),
    ],
)
def test_each_kind_runs_what_it_has(computing, dtype, expected):
    names = ("V100-16", "T4", "A100-40", "H100-80")
    kinds = {name: GPU_KINDS[name] for name in names}
    assert list(attention_by_kind(kinds, computing, dtype).values()) == expected


def test_llama_8b_at_8192_as_counted_by_hand():
    """Scores are 32 heads x 8192^2 x 2 bytes = 4 GiB; with dropout also a mask of a byte each and
    what it lets through, 6 GiB more. Flash attention keeps 32 x 8192 sums of 4 bytes instead."""
    model = at("llama3-8b", 8192)
    quiet, _ = models(model).memory
    loud, _ = models(model, computing=Computing(attention_dropout=True)).memory
    sums, scores = 32 * 8192 * 4, 32 * 8192**2
    flash = quiet.activation_bytes(1, "none", "A100-40")
    assert flash / GIB == pytest.approx(1.06, abs=0.01)
    assert quiet.activation_bytes(1, "none", "V100-16") - flash == 2 * scores - sums
    assert loud.activation_bytes(1, "none", "T4") - flash == 5 * scores - sums
    assert loud.activation_bytes(1, "none", "T4") / GIB == pytest.approx(11.06, abs=0.01)
    assert quiet.activation_bytes(1, "selective", "V100-16") == flash - sums


def test_scores_pass_through_memory_where_they_are_kept():
    """The time of a layer grows by bytes over bandwidth and the half of the scores that flash
    attention skips; not at all where flash attention runs."""
    model = at("llama-3b", 2048)
    by_kind = models(model).compute
    told = models(
        model, text="gpu_kinds: [{name: V100-16, attention: flash}]\n" + FOUR_KINDS
    ).compute
    assert by_kind.layer("A100-40", 2) == told.layer("A100-40", 2)
    there, back = score_bytes(model, 2, has_dropout=False)
    slower, flash = by_kind.layer("V100-16", 2), told.layer("V100-16", 2)
    kind = GPU_KINDS["V100-16"]
    half = 2 * 4 * (model.seq_length**2 / 2) * model.query_width
    expected = 2 * there / kind.memory_bytes_per_s + half / (kind.peak.of("float16") * 0.80)
    assert slower.forward_s - flash.forward_s == pytest.approx(expected)
    assert slower.backward_s - flash.backward_s > 2 * back / kind.memory_bytes_per_s


def test_a_softmax_of_several_kernels_moves_each_of_their_matrices():
    """16 bits to fp32, mask, softmax, back to 16 bits, by hand: 6 + 8 + 8 + 6 bytes in place of 4
    forward; 6 + 12 + 8 + 6 in place of 6 backward."""
    model = at("llama-3b", 2048)
    elements = model.num_attention_heads * 2048**2
    plain = score_bytes(model, 2, has_dropout=False)
    wide = score_bytes(model, 2, has_dropout=False, softmax_in_fp32=True)
    assert [w - p for w, p in zip(wide, plain, strict=True)] == [24 * elements, 26 * elements]


def test_groups_of_both_are_planned_and_simulated_by_kind(tmp_path, monkeypatch):
    """The V100s of the lab keep scores, the A6000s do not: 16 x 512^2 x 2 bytes each."""
    run = runner_in(tmp_path, monkeypatch)
    command = ("explain", "plan.json", "--cluster", "cluster.yaml", "--json")
    flags = ("--", *FLAGS, "--hidden-dropout", "0", "--attention-dropout", "0")
    before = json.loads(run(*command, *flags).stdout)["ranks"]
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("gpu_kinds: [{name: V100-16, attention: flash}]\n" + cluster.read_text())
    after = json.loads(run(*command, *flags).stdout)["ranks"]
    recompute_savings = [
        one["at_peak_bytes"]["activations"] - other["at_peak_bytes"]["activations"]
        for one, other in zip(before, after, strict=True)
    ]
    scores, sums = 16 * 512**2 * 2, 16 * 512 * 4
    # Three layers, one micro-batch of two samples in flight on the last group.
    assert recompute_savings == [0] * 4 + [3 * 2 * (scores - sums)] * 4


def test_flash_attention_asked_of_a_gpu_without_it_is_refused(tmp_path, monkeypatch):
    run = runner_in(tmp_path, monkeypatch)
    plan = lab_plan()
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    command = ("check", "plan.json", "cluster.yaml", "--", *FLAGS)
    refused = run(*command, "--attention-backend", "flash")
    assert refused.exit_code != 0
    assert "flash for a plan with V100-16" in " ".join(refused.output.split())
    assert run(*command, "--attention-backend", "unfused").exit_code == 0


def profile_with(**entry):
    value = good_profile()
    layer = next(each for each in value["memory"] if each["part"] == "layer")
    layer.update(entry)
    value["memory"] = [layer, {**layer, "part": "head"}]
    return parse_profile(json.dumps(value).encode())


def test_a_profile_that_says_its_attention_wins():
    """Without a word of it the measured number counts on every kind; with one the other kinds
    differ by what the formula says; an entry of a kind is that kind's, with what that runs."""
    found = profile_with()
    model = found.models[0]
    entry = next(each for each in found.memory if each.part == "layer")
    model = dataclasses.replace(model, seq_length=entry.seq_length)
    boundary = model.seq_length * model.hidden_size

    def kept(profile, kind):
        formula = TransformerMemory(
            model=model,
            dtype="float16",
            precision=precision_of("float16"),
            attention="flash",
            attention_by_kind={"T4": "unfused", "A100-40": "flash"},
        )
        memory = memory_from_profile(profile, formula)
        return memory.activation_bytes(1, "none", kind)

    plain = 2 * (entry.activation_elements + boundary)
    assert kept(found, "T4") == kept(found, "A100-40") == plain
    rows = model.num_attention_heads * model.seq_length
    more = 2 * rows * model.seq_length - 4 * rows
    flash = profile_with(attention="flash")
    assert (kept(flash, "A100-40"), kept(flash, "T4")) == (plain, plain + more)
    own = profile_with(attention="unfused", gpu_kind="T4")
    assert (kept(own, "A100-40"), kept(own, "T4")) == (plain - more, plain)
    other = profile_with(attention="flash", gpu_kind="T4")
    assert (kept(other, "A100-40"), kept(other, "T4")) == (plain, plain + more)
    for kind in ("A100-40", "H100-80"):  # in the cluster or not, its own attention is known
        there = profile_with(gpu_kind=kind)
        assert (kept(there, "A100-40"), kept(there, "T4")) == (plain, plain + more)


def test_what_a_search_knows_of_it_is_told():
    inputs = make_inputs(
        parse_cluster(FOUR_KINDS.encode()),
        at("llama-3b", 2048),
        None,
        global_batch_size=8,
        dtype="float16",
    )
    said = "\n".join(inputs.notes)
    assert "flash attention on A100-40 and H100-80" in said
    assert "V100-16 and T4: unfused attention" in said


TIMES = Path(__file__).parents[3] / "shared" / "measured" / "layer_latency.csv"
MODEL_NAMES = ("llama-3b", "llama-7b")


@pytest.mark.skipif(not TIMES.exists(), reason="the public measurements are not here")
def test_kinds_without_flash_attention_take_longer_for_longer_samples():
    times = defaultdict(dict)
    with TIMES.open() as file:
        for row in csv.DictReader(file):
            if row["dtype"] == "float16" and row["model"] in MODEL_NAMES:
                key = int(row["seq_length"]), int(row["micro_batch_size"])
                times[row["model"], row["gpu"]][key] = float(row["forward_ms"]) / 1e3
    compared = 0
    for (model, gpu), found in times.items():
        kind = GPU_KINDS[canonical_kind(gpu)]
        pairs = [((512, 2), (1024, 1)), ((512, 4), (1024, 2))]
        for short, long in pairs:
            if short not in found or long not in found:
                continue
            grown_s = found[long] - found[short]
            compared += 1
            if kind.runs_flash_attention:
                assert grown_s < 0.04 * found[short], (model, gpu)
            else:
                # The formula counts each pass once, of kernels that fuse: it is a lower bound.
                shape = MODELS[model]
                new = short[1] * shape.num_attention_heads * 512**2
                elements = shape.num_attention_heads * shape.seq_length**2
                per_element = score_bytes(shape, 2, has_dropout=False)[0] / elements
                assert grown_s > new * per_element / kind.memory_bytes_per_s, (model, gpu)
    assert compared >= 10
