"""Flags that change time and memory change what is predicted, by as much as can be said."""

import json
import re

import pytest

from tests.unit.cli_samples import FLAGS, lab_plan, runner_in
from zorse_megatron.costs.analytic_compute import AnalyticCompute
from zorse_megatron.costs.model_memory import LayerActivations
from zorse_megatron.flags.command import read_command
from zorse_megatron.flags.model_in_flags import computing_from_flags
from zorse_megatron.inputs.model import MODELS, USUAL, Computing, JobRecompute

QUIET = ["--hidden-dropout", "0", "--attention-dropout", "0"]
SAMPLES, LAYERS = 2, 5  # of a micro-batch and of the first group
TOKENS, HIDDEN, HEADS, FFN = 512, 1024, 16, 4096
SCORES = HEADS * TOKENS * TOKENS


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    run = runner_in(tmp_path, monkeypatch)

    def simulate(*flags):
        result = run(
            "explain", "plan.json", "--cluster", "cluster.yaml", "--json", "--", *FLAGS, *flags
        )
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout)
        return answer["iteration_s"], answer["ranks"][0]["peak_memory_bytes"]

    return simulate


def computing(*flags):
    return computing_from_flags(read_command([*FLAGS, *flags]).args)


def test_flags_say_how_it_is_computed():
    quiet = Computing(narrow_gradients=True)
    assert computing(*QUIET) == quiet
    assert computing() == Computing(
        narrow_gradients=True, hidden_dropout=True, attention_dropout=True
    )
    # Nothing in megatron-core 0.19 reads --use-flash-attn.
    assert computing(*QUIET, "--use-flash-attn") == quiet
    for backend in ("flash", "fused"):
        asked = computing("--attention-backend", backend)
        assert (asked.attention, asked.names_attention) == ("flash", True)
    assert computing("--transformer-impl", "local").attention == "unfused"
    assert computing("--attention-backend", "unfused").attention == "unfused"
    assert not computing("--accumulate-allreduce-grads-in-fp32").narrow_gradients
    assert computing("--recompute-activations").recompute == JobRecompute(mode="selective")
    full = ["--recompute-granularity", "full", "--recompute-num-layers", "2"]
    assert computing(*full, "--recompute-method", "block").recompute == JobRecompute(
        mode="full", num_layers=2
    )
    assert computing(*full, "--recompute-method", "uniform").recompute == JobRecompute(
        mode="full", layers_at_once=2
    )


@pytest.mark.parametrize(
    ("flags", "saved_bytes"),
    [
        # One byte of each mask after attention and after the feed-forward block.
        (["--attention-dropout", "0"], 2 * TOKENS * HIDDEN),
        # Unfused attention keeps its 16-bit softmax and not the sums of flash attention.
        ([*QUIET, "--attention-backend", "unfused"], 2 * SCORES - 4 * HEADS * TOKENS),
        ([*QUIET, "--transformer-impl", "local"], 2 * SCORES - 4 * HEADS * TOKENS),
        # With dropout also the mask and what it lets through.
        (
            ["--hidden-dropout", "0", "--transformer-impl", "local"],
            5 * SCORES - 4 * HEADS * TOKENS,
        ),
    ],
)
def test_memory_of_a_layer_grows_by_what_is_kept(simulated, flags, saved_bytes):
    """One micro-batch is in flight on the last group, two of them on the first."""
    _, before = simulated(*QUIET)
    _, after = simulated(*flags)
    assert after - before == pytest.approx(2 * SAMPLES * LAYERS * saved_bytes, rel=0.01)


def test_time_grows_with_what_is_done(simulated, tmp_path):
    told = "gpu_kinds: [{name: V100-16, attention: flash}]\n"
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(told + cluster.read_text())
    quick, _ = simulated(*QUIET)
    assert simulated("--attention-dropout", "0")[0] > quick
    unfused, _ = simulated(*QUIET, "--attention-backend", "unfused")
    assert unfused > 1.02 * quick
    assert simulated("--hidden-dropout", "0", "--attention-backend", "unfused")[0] > unfused


def test_recomputation_by_flags_is_that_of_the_plan(simulated, tmp_path):
    # With gradients in 16 bits their copies for the step may be the peak.
    quiet = [*QUIET, "--accumulate-allreduce-grads-in-fp32"]
    full = [*quiet, "--recompute-granularity", "full", "--recompute-num-layers"]
    by_flags = {
        "full": simulated(*full, "1", "--recompute-method", "uniform"),
        "full 2": simulated(*full, "2", "--recompute-method", "block"),
        "selective": simulated(*quiet, "--recompute-activations"),
    }
    pairs = simulated(*full, "2", "--recompute-method", "uniform")
    plain = simulated(*quiet)
    for name, expected in by_flags.items():
        mode, _, number = name.partition(" ")
        plan = lab_plan()
        for group in plan["groups"]:
            group["recompute"] = {"mode": mode} | ({"num_layers": int(number)} if number else {})
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        assert simulated(*quiet) == expected
        assert expected != plain
    # Two layers with one input: fewer inputs are kept, but two whole layers are there at once.
    assert pairs[0] == by_flags["full"][0]
    assert pairs[1] != by_flags["full"][1]


@pytest.mark.parametrize(
    ("modules", "recompute_savings"),
    [
        (("core_attn",), 4 * HEADS * TOKENS),
        (("mlp",), 2 * TOKENS * 2 * FFN),
        (("layernorm",), 2 * TOKENS * 2 * HIDDEN),
        (("mlp", "layernorm"), 2 * TOKENS * (2 * FFN + 2 * HIDDEN)),
    ],
)
def test_modules_that_are_recomputed_are_not_kept(simulated, modules, recompute_savings):
    _, before = simulated(*QUIET)
    _, after = simulated(
        *QUIET, "--recompute-granularity", "selective", "--recompute-modules", *modules
    )
    # Two micro-batches are in flight; at the peak one layer may just be recomputed.
    assert 2 * LAYERS - 1 <= (before - after) / (SAMPLES * recompute_savings) <= 2 * LAYERS


def test_softmax_in_fp32_is_kept_beside_its_16_bit_copy():
    layer = {"model": MODELS["gpt-6.7b"], "element_bytes": 2, "attention": "unfused"}
    narrow = LayerActivations(**layer).bytes_per_sample("none")
    wide = LayerActivations(**layer, computing=Computing(softmax_in_fp32=True)).bytes_per_sample(
        "none"
    )
    model = MODELS["gpt-6.7b"]
    assert wide - narrow == 4 * model.num_attention_heads * model.seq_length**2


def test_gradients_in_16_bits_are_half_as_large(simulated):
    _, narrow = simulated(*QUIET)
    _, wide = simulated(*QUIET, "--accumulate-allreduce-grads-in-fp32")
    parameters = (wide - narrow) / 2
    assert parameters == pytest.approx(LAYERS * 12 * HIDDEN**2 + 32000 * HIDDEN, rel=0.01)


def test_flash_attention_that_a_gpu_lacks_is_told(tmp_path, monkeypatch):
    run = runner_in(tmp_path, monkeypatch)
    said = run("explain", "plan.json", "--cluster", "cluster.yaml", "--", *FLAGS).stdout
    assert re.search(r"V100-16: unfused attention, because Transformer Engine has no", said)
    assert "flash attention on A6000, unfused attention on V100-16 and dropout" in said
    named = run(
        *("explain", "plan.json", "--cluster", "cluster.yaml", "--", *FLAGS),
        *("--attention-backend", "unfused"),
    ).stdout
    assert "neither flash nor fused" not in named
    assert "with unfused attention and dropout" in named


def test_a_model_without_a_command_is_priced_as_before():
    model = MODELS["llama-7b"]
    usual = AnalyticCompute(model, dtype="float16", computing=USUAL)
    assert usual.layer("T4", 2) == AnalyticCompute(model, dtype="float16").layer("T4", 2)
