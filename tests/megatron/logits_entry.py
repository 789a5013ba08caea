"""Stock Megatron loads a checkpoint and writes its logits of given tokens, instead of training."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.megatron.recording_entry import let_values_be_narrower

TOKENS = "ZORSE_TEST_TOKENS"
"""A file with tokens of shape (samples, sequence), as torch saves them; `.logits` is put beside."""
OF_A_PLAN = "ZORSE_TEST_LAYERS_OF_A_PLAN"
"""If set, experts are in the layers that they have under a plan."""


def main() -> None:
    from zorse_megatron.adapter import cpu_mode
    from zorse_megatron.flags.installed_software import with_cpu_flags

    if cpu_mode.needed():
        cpu_mode.enable()
        sys.argv[1:] = with_cpu_flags(sys.argv[1:])
    import torch

    if "--multi-latent-attention" in sys.argv:
        let_values_be_narrower()
    from megatron.training import training

    from zorse_megatron.adapter import gpt_entry
    from zorse_megatron.adapter.model.expert_layers import with_plan_layers
    from zorse_megatron.adapter.model.experts import PlanRouter
    from zorse_megatron.adapter.patches.rebind import REGISTRY
    from zorse_megatron.adapter.start import stock_fixes

    def write_logits(forward_step: Any, model: Any, *_: Any, **__: Any) -> tuple[int, int]:
        routers = [each for each in model[0].modules() if isinstance(each, PlanRouter)]
        assert bool(routers) == bool(os.environ.get(OF_A_PLAN))
        path = Path(os.environ[TOKENS])
        tokens = torch.load(path)
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        positions = torch.arange(length).expand_as(tokens)
        with torch.no_grad():
            logits = model[0](tokens, positions, mask)
        torch.save(logits, path.with_suffix(".logits"))
        return 0, 0

    training.train = write_logits
    REGISTRY.apply(stock_fixes())
    if os.environ.get(OF_A_PLAN):
        REGISTRY.apply({"experts_spec": partial(with_plan_layers, 1, None, None)})
    gpt_entry.main()


if __name__ == "__main__":
    main()
