"""Attention by kind of GPU: what a layer keeps and takes where flash attention does not run."""

import dataclasses
import json

import pytest

from tests.unit.cli_samples import FLAGS, lab_plan, runner_in
from tests.unit.profile_samples import good as good_profile
from zorse_megatron.costs.analytic_compute import attention_by_kind, score_bytes
from zorse_megatron.costs.model_memory import TransformerMemory, memory_from_profile, precision_of
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS, USUAL, Computing
from zorse_megatron.inputs.profile import Profile, Source, parse_profile
from zorse_megatron.planner.inputs.cost_models import CostModels
from zorse_megatron.planner.inputs.search_inputs import make_inputs

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
    spared = [
        one["at_peak_bytes"]["activations"] - other["at_peak_bytes"]["activations"]
        for one, other in zip(before, after, strict=True)
    ]
    scores, sums = 16 * 512**2 * 2, 16 * 512 * 4
    # Three layers, one micro-batch of two samples in flight on the last group.
    assert spared == [0] * 4 + [3 * 2 * (scores - sums)] * 4


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
    model = found.models[0].shape()
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
