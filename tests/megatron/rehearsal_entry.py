"""`recording_entry` on streams that are watched; `$ZORSE_TEST_WITHOUT`: waits that are ignored.

Writes `$ZORSE_TEST_RECORD/rehearsal-rank<R>.json`: hazards, where something was waited for, and of
each training step where the host waited for the device.
"""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from typing import Any

from tests.megatron import recording_entry
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.adapter.plan_run import RankSetup


def main() -> None:
    cpu_mode.enable()
    import torch.distributed as dist
    from megatron.training import training

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
    waited: list[dict[str, int]] = []
    training.train_step = counting(training.train_step, seen, waited)
    setup = RankSetup(
        init_process_group=partial(
            dist.init_process_group, nccl_over_gloo.BACKEND, timeout=timedelta(minutes=1)
        ),
        make_host_link=partial(rehearsal.RehearsedLink, seen),
    )
    changing_entry.change()
    changing_entry.move_with_setup()
    recording_entry.record(setup)
    found = {"hazards": list(seen.hazards), "waits": seen.waits, "waited": waited}
    path = recording_entry.RECORD / f"rehearsal-rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(found))


def counting(
    train_step: Callable[..., Any], seen: Any, waited: list[dict[str, int]]
) -> Callable[..., Any]:
    """Note for each step what the host waited for in it."""

    @wraps(train_step)  # whose parameters are compared with those that are known
    def step(*args: Any, **kwargs: Any) -> Any:
        before = seen.host_waited.copy()
        result = train_step(*args, **kwargs)
        waited.append(dict(seen.host_waited - before))
        return result

    return step


if __name__ == "__main__":
    main()
