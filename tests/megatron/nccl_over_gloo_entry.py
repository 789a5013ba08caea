"""`recording_entry` with the branches of NCCL taken; every launch is written down."""

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

    from tests.megatron import nccl_over_gloo
    from zorse_megatron.runtime.host_link import HostLink

    log: list[dict[str, Any]] = []
    nccl_over_gloo.register(log)
    setup = RankSetup(
        init_process_group=partial(
            dist.init_process_group, nccl_over_gloo.BACKEND, timeout=timedelta(minutes=1)
        ),
        make_host_link=HostLink,
    )
    recording_entry.record(setup)
    path = recording_entry.RECORD / f"launches-rank{os.environ['RANK']}.json"
    nccl_over_gloo.save(log, path)


if __name__ == "__main__":
    main()
