"""`zorse_megatron.pretrain`, but in an evaluation all processes of a rank get SIGTERM, as Slurm
sends it: those of each rank, or of the one that `ZORSE_TEST_STOPPED` names.
"""

import os
import signal
from typing import Any

from zorse_megatron.pretrain import main

if __name__ == "__main__":
    from zorse_megatron.adapter import cpu_mode

    if cpu_mode.needed():
        cpu_mode.enable()
    from zorse_megatron.adapter.session import PlanSession

    stock = PlanSession.forward_backward

    def forward_backward(self: PlanSession, *, forward_only: bool = False, **inputs: Any) -> Any:
        if forward_only and os.environ.get("ZORSE_TEST_STOPPED") in (None, os.environ["RANK"]):
            os.killpg(0, signal.SIGTERM)
        return stock(self, forward_only=forward_only, **inputs)

    PlanSession.forward_backward = forward_backward  # type: ignore[method-assign]
    main()
