"""Times that a chip's published peak does not allow, or that are a thousand times too long."""

import copy
import json

import pytest

from tests.unit.cli_samples import WORKLOAD, runner_in
from tests.unit.profile_samples import good
from zorse_megatron.costs.measured_curves import unlikely_times
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.profile import parse_profile

# 12 * 4096**2 parameters of a layer, 2048 tokens, two operations each, and half of the scores:
# 0.86 TFLOP, in 2.75 ms at the 312 TFLOP/s of NVIDIA's A100 data sheet.
LAYER = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 16384,
    "num_attention_heads": 32,
    "num_query_groups": 32,
    "kv_channels": 128,
    "seq_length": 2048,
}
PEAK_S = (2 * 2048 * 12 * 4096**2 + 2 * 2048**2 * 4096) / 312e12


def profile(factor, *, kind="A100-80", dtype="bfloat16"):
    """A profile whose times are so many times what the peak needs."""
    value = copy.deepcopy(good())
    value["models"][0] |= LAYER
    value["times"][0] |= {
        "gpu_kind": kind,
        "dtype": dtype,
        "seq_length": 2048,
        "forward_s": [size * factor * PEAK_S for size in (1, 2, 4)],
        "backward_s": [2 * size * factor * PEAK_S for size in (1, 2, 4)],
    }
    return value


def told(value):
    return list(unlikely_times(parse_profile(json.dumps(value).encode()), GPU_KINDS))


@pytest.mark.parametrize("factor", [1.0, 2.0, 2.5, 20.0])
def test_what_gpus_do_is_likely(factor):
    assert told(profile(factor)) == []


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1e-30, "the chip's published peak needs 0.0028 s"),
        (0.5, "times are in seconds"),
        (2.5e3, "2,500 times what the chip's published peak needs; were milliseconds"),
    ],
)
def test_what_no_gpu_does_is_told(factor, said, tmp_path, monkeypatch):
    (sentence,) = told(profile(factor))
    assert sentence.startswith("times[0], tiny on A100-80 in bfloat16: forward of 1 sample in ")
    assert said in sentence
    run = runner_in(tmp_path, monkeypatch)
    (tmp_path / "profile.json").write_text(json.dumps(profile(factor)))
    (tmp_path / "cluster.yaml").write_text("nodes: [{gpus: 1 x A100-80}]")
    for command in (
        ("check", "profile.json"),
        ("profile", "show", "profile.json"),
        ("plan", *WORKLOAD, "--profile", "profile.json"),
    ):
        result = run(*command)
        assert result.exit_code == 0, result.output
        assert f"unlikely: {sentence}" in " ".join(result.output.split())


def test_a_kind_or_type_without_a_published_peak_is_left_alone():
    assert told(profile(1e-9, kind="mine")) == []
    assert told(profile(1e-9, kind="V100-16")) == []  # no units for bfloat16


def test_small_layers_take_as_long_as_their_kernels_start():
    assert told(good()) == []
