"""`zorse_megatron.pretrain` over the backend `staged`: for ranks that share a GPU without NCCL."""

from datetime import timedelta
from functools import partial

from zorse_megatron import pretrain

_TIMEOUT = timedelta(minutes=2)


def main() -> None:
    """Entry point."""
    import torch.distributed as dist

    from zorse_megatron.doctor.on_ranks.staged_group import BACKEND, register

    register()
    # Megatron trains on the process group that is there already.
    start = partial(dist.init_process_group, BACKEND, timeout=_TIMEOUT)
    pretrain.main(setup=pretrain.RankSetup(init_process_group=start))


if __name__ == "__main__":
    main()
