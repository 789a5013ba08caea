"""Which core attention ran, seen from what it keeps; and where the run would use the other one."""

import dataclasses
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.unit.test_compute import FOUR_KINDS, NOTHING, at, models
from tests.unit.test_profile import T4, one_pass, started
from zorse_megatron.inputs.model import Computing
from zorse_megatron.inputs.profile import Source, Times
from zorse_megatron.measure.measured_profile import with_pass
from zorse_megatron.measure.on_ranks import layer_timing
from zorse_megatron.measure.on_ranks.layer_timing import SeenAttention, _context_bytes

HEADS, TOKENS, CHANNELS = 3, 16, 16


@pytest.mark.parametrize(
    ("backend", "expected"),
    [(SDPBackend.MATH, "unfused"), (SDPBackend.FLASH_ATTENTION, "flash")],
)
def test_scores_that_are_kept_are_seen(backend, expected):
    """As wide as long, so that weights and keys are square, too."""
    weight = torch.randn(CHANNELS, TOKENS, requires_grad=True)
    seen = SeenAttention(TOKENS)
    with seen.looking(), sdpa_kernel(backend):
        query, key, value = (torch.randn(2, HEADS, TOKENS, 8, requires_grad=True) for _ in "qkv")
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        loss = (torch.randn(4, CHANNELS) @ weight).tanh().sum() + output.sum()
    loss.backward()
    assert seen.attention == expected
    assert query.grad is not None


def test_what_others_have_of_a_gpu_is_not_the_process_s_own(monkeypatch):
    """The rank that waits has a context, too: both were counted as one (H100, 2.2 GB)."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 12)
    gpu = torch.device("cuda")
    assert _context_bytes(gpu, 0) == 18
    assert _context_bytes(gpu, 8) == 10
    assert _context_bytes(gpu, None) is _context_bytes(torch.device("cpu"), 8) is None


def test_it_is_written_to_the_profile():
    found = dataclasses.replace(one_pass("layer", 2), attention="unfused")
    profile = with_pass(with_pass(started(), T4, found), T4, one_pass("head", 2))
    assert {times.part: times.attention for times in profile.times} == {
        "layer": "unfused",
        "head": None,
    }
    assert {entry.part: entry.attention for entry in profile.memory} == {
        "layer": "unfused",
        "head": None,
    }


@pytest.mark.parametrize(
    ("measured", "computing", "warned"),
    [
        ("unfused", Computing(), ["A100-40: layer times were measured with unfused attention"]),
        ("flash", Computing(), []),
        ("flash", Computing(attention="unfused"), ["A100-40: layer times were measured with fla"]),
        ("unfused", Computing(attention="unfused"), []),
        (None, Computing(attention="unfused"), []),
    ],
)
def test_a_run_with_another_attention_than_was_measured_is_told(measured, computing, warned):
    model = at("llama-3b", 512)
    times = Times(
        part="layer",
        model="m",
        gpu_kind="A100-40",
        seq_length=512,
        dtype="float16",
        source="s",
        micro_batch_sizes=(1, 2),
        forward_s=(0.001, 0.002),
        backward_s=(0.002, 0.004),
        attention=measured,
    )
    profile = dataclasses.replace(
        NOTHING,
        sources=(Source(name="s", kind="measured"),),
        models=(dataclasses.replace(model, name="m"),),
        times=(times,),
    )
    text = FOUR_KINDS.replace("1 x V100-16, 1 x T4, ", "").replace(", 1 x H100-80", "")
    found = models(model, text=text, computing=computing, profile=profile).warnings
    assert [note[: len(expected)] for note, expected in zip(found, warned, strict=True)] == warned


class Passes:
    """Of a layer on the CPU, with weight gradients apart."""

    seq_length, device = 8, torch.device("cpu")

    def make(self, part, size):
        def forward():
            return torch.ones(size, requires_grad=True) * 2.0

        return SimpleNamespace(forward=forward, backward=lambda output: output.sum().backward())

    def num_parameters(self, part):
        return 1

    @contextmanager
    def weight_gradients_apart(self):
        yield SimpleNamespace(delaying=lambda key: nullcontext(), compute=lambda key: None)


def test_weight_gradients_take_their_part_of_the_backward_that_is_told(monkeypatch):
    """Of one in both parts: profiles were refused, and computations of plans took no time, where
    they were compared with whole backwards of another moment. Warm-up does not count."""
    warm_up = [9.0] * layer_timing.WARM_UP
    backwards_s = [*warm_up, 1.0, 1.0, 1.0, 5.0, 5.0]
    inputs_s, weights_s = ([*warm_up, *[each] * layer_timing.REPEATS] for each in (1.5, 6.0))
    assert len(backwards_s) == layer_timing.WARM_UP + layer_timing.REPEATS
    in_parts_s = [each_s for both in zip(inputs_s, weights_s, strict=True) for each_s in both]
    times_s = iter([each_s for each_s in backwards_s for _ in ("forward", "backward")] + in_parts_s)

    def timed_s(work, device):
        work()
        return next(times_s)

    monkeypatch.setattr(layer_timing, "timed_s", timed_s)
    found = layer_timing.measured_pass(Passes(), "layer", 2)
    assert (found.backward_s, found.weight_gradients_s) == (1.0, 6.0 / 7.5)
    assert next(times_s, None) is None
