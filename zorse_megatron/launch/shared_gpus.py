"""Lets several ranks share a GPU, to try things out where there are fewer GPUs than ranks.

NCCL refuses two ranks on one GPU of one host (`src/init.cc`, "Duplicate GPU detected"). With names
of their own for the host (NCCL's user guide, "NCCL_HOSTID") ranks are on different machines as far
as it knows, and talk over sockets. Slow, and not verified: no GPU was available.
"""

from collections.abc import MutableMapping

SHARE_GPUS = "ZORSE_SHARE_GPUS"
"""Environment variable: 1 where ranks may share GPUs."""


def share_gpus(environment: MutableMapping[str, str]) -> None:
    """Set what NCCL needs for that, if it is asked for; before the process uses NCCL."""
    if environment.get(SHARE_GPUS) != "1":
        return
    environment.update(
        NCCL_HOSTID=f"zorse-rank-{environment.get('RANK', '0')}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_NET="Socket",
        NCCL_IB_DISABLE="1",
    )
