"""`recording_entry` on streams that are watched; `$ZORSE_TEST_WITHOUT`: waits that are ignored.

Writes `$ZORSE_TEST_RECORD/rehearsal-rank<R>.json`: hazards, and where what was waited for.
"""

import json
import os
from datetime import timedelta
from functools import partial
from typing import Any

from tests.megatron import recording_entry
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.adapter.plan_run import RankSetup


def main() -> None:
    cpu_mode.enable()
    import torch.distributed as dist

    from tests.megatron import changing_entry, nccl_over_gloo, rehearsal
    from zorse_megatron.adapter import watching
    from zorse_megatron.adapter.moving import leave_plan
    from zorse_megatron.runtime import (
        collectives,
        hierarchical_collectives,
        state_transfer,
        transport,
    )

    seen = rehearsal.Rehearsal(os.environ.get("ZORSE_TEST_WITHOUT"))
    nccl_over_gloo.register([], rehearsal.groups_of(seen))

    # What these ask a tensor or a device is whether it is CUDA's.
    def start_stages(stages: Any, whole: Any, finish: Any, buffers: Any, worker: Any) -> Any:
        wait = collectives._on_streams(stages, finish, whole.device)
        return collectives.StagedWork((), wait, buffers)

    hierarchical_collectives.start_stages = start_stages
    transport.NoStreams = lambda: transport.CudaStreams(None)  # type: ignore[assignment, arg-type, misc]
    # Between the hosts, over gloo.
    for module in (collectives, leave_plan):
        module.dist = rehearsal.HostObjects(seen)  # type: ignore[attr-defined]
    for module in (state_transfer, watching):
        module.dist = rehearsal.HostMessages(seen)  # type: ignore[attr-defined]
    seen.start()
    setup = RankSetup(
        init_process_group=partial(
            dist.init_process_group, nccl_over_gloo.BACKEND, timeout=timedelta(minutes=1)
        ),
        make_host_link=partial(rehearsal.RehearsedLink, seen),
    )
    changing_entry.change()
    changing_entry.move_with_setup()
    recording_entry.record(setup)
    found = {"hazards": list(seen.hazards), "waits": seen.waits}
    path = recording_entry.RECORD / f"rehearsal-rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
