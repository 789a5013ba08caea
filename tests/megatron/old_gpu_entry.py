"""`zorse_megatron.pretrain`, whose last rank sees a V100, and neither code for it nor an engine."""

import dataclasses
import os

from zorse_megatron import pretrain
from zorse_megatron.adapter import start_checks
from zorse_megatron.flags.installed_software import RankSoftware, SeenGpu

look = start_checks.found_software


def found_software(rank: int, local_rank: int, node: str) -> RankSoftware:
    is_last = rank == int(os.environ["WORLD_SIZE"]) - 1
    gpu = SeenGpu(
        name="Tesla V100" if is_last else "NVIDIA A100",
        uuid=f"GPU-{rank}",
        capability=(7, 0) if is_last else (8, 0),
    )
    archs = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
    seen = look(rank, local_rank, node)
    engine = None if is_last else "2.9"
    return dataclasses.replace(seen, gpu=gpu, archs=archs, transformer_engine=engine)


if __name__ == "__main__":
    start_checks.found_software = found_software
    pretrain.main()
