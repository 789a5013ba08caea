"""Every test here runs with each implementation that this process has.

Plain torch always; Triton on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU,
which has to be set before anything imports Triton: `test_interpreter.py` starts such a process.
"""

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from tests.kernels.memory import IS_INTERPRETED
from zorse_megatron.kernels import dispatch

IMPLEMENTATIONS = ["torch"]
if IS_INTERPRETED or torch.cuda.is_available():
    IMPLEMENTATIONS.append("triton")


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Which one runs: the choice is taken out of `dispatch`'s hands.

    Sizes at which work is cut are small here, so that small tensors go through all the cuts.
    """
    reason = None if request.param == "triton" else "this is a test"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "why_not_triton", lambda device: reason)
        patch.setattr(dispatch, "CHUNK", 1000)
        if request.param == "triton":
            # The package has the function under its module's name.
            module = import_module("zorse_megatron.kernels.on_triton")
            patch.setattr(module, "MAX_PROGRAMS", 2)
        yield request.param
