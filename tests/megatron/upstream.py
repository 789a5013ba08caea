"""NVIDIA's own training script, where it is there: it is not in megatron-core's wheel, nor here.

Looked for in `$ZORSE_UPSTREAM`, a checkout of Megatron-LM at core_v0.19.0, else beside this
repository.
"""

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).parents[3] / "shared" / "upstream" / "core_v0.19.0"
DIRECTORY = Path(os.environ.get("ZORSE_UPSTREAM", _BESIDE))
PRETRAIN_GPT = DIRECTORY / "pretrain_gpt.py"

SCRIPT = (str(PRETRAIN_GPT),) if PRETRAIN_GPT.is_file() else ()
"""How a command starts; empty: with the built-in entry."""

needs_upstream = pytest.mark.skipif(
    not SCRIPT, reason=f"no {PRETRAIN_GPT}; $ZORSE_UPSTREAM names a checkout of core_v0.19.0"
)
