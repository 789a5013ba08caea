"""Muon under a plan follows stock's single process, wherever shards end within matrices.

By default it multiplies matrices in bf16, whose rounding hides 1e-4: `high` does so in fp32.
"""

import pytest

from tests.megatron.comparison import (
    LLAMA,
    MUON,
    UNTIED,
    assert_follows,
    flags_for,
    plan_run,
    stock_run,
)
from tests.megatron.plans import LAYERED, LAYOUTS, TRIO, computing_in, hierarchical, with_settings

CASES = {
    "shards of 3, 1 and nothing": (LAYOUTS["3|2"], ("--muon-nesterov",)),
    "one group": (LAYOUTS["4"], (*UNTIED, *LLAMA, "--muon-scale-mode", "unit_rms_norm")),
    "sharded parameters": (LAYERED, ("--muon-no-split-qkv",)),
    "two regions": (hierarchical(TRIO, "wwe"), ()),
    "activations in the host": (with_settings(LAYERED, activations=True), ()),
}


def test_groups_in_16_bits_follow_stock_in_bf16(corpus):
    """Gradients of the group in fp16 have a loss scale, which stock's Muon does not know."""
    command = flags_for(corpus, *MUON, "--bf16", "--initial-loss-scale", "256")
    run = plan_run(computing_in(LAYOUTS["2|1"], "bf16", "fp16"), command)
    stock = stock_run(command)
    assert run.losses == pytest.approx(stock.losses, abs=2e-3)
    assert run.grad_norms == pytest.approx(stock.grad_norms, rel=5e-3)


@pytest.mark.parametrize("case", CASES)
def test_follows_one_process(case, corpus):
    plan, flags = CASES[case]
    command = flags_for(corpus, *MUON, *flags, "--clip-grad", "0.5")
    assert_follows(plan_run(plan, command), stock_run(command))
