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
from tests.megatron.plans import LAYERED, LAYOUTS, TRIO, hierarchical

CASES = {
    "shards of 3, 1 and nothing": (LAYOUTS["3|2"], ("--muon-nesterov",)),
    "one group": (LAYOUTS["4"], (*UNTIED, *LLAMA, "--muon-scale-mode", "unit_rms_norm")),
    "sharded parameters": (LAYERED, ("--muon-no-split-qkv",)),
    "two regions": (hierarchical(TRIO, "wwe"), ()),
}


@pytest.mark.parametrize("case", CASES)
def test_follows_one_process(case, corpus):
    plan, flags = CASES[case]
    command = flags_for(corpus, *MUON, *flags, "--clip-grad", "0.5")
    assert_follows(plan_run(plan, command), stock_run(command))
