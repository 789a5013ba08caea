"""What is said of a run's speeds and of its moves."""

from collections.abc import Sequence

from zorse_megatron.follow.observed import Observed
from zorse_megatron.schema.status.status import Status


def told_speeds(seen: Observed, changed: Sequence[int]) -> str:
    """Which GPUs have changed, and to what."""
    kinds = seen.plan.cluster.gpu_kinds if seen.plan.cluster else None
    each = [
        f"rank {rank}{f' ({kinds[rank]})' if kinds else ''} takes {speed.factor:.2f} times as long "
        f"as the profile says"
        for rank in changed[:4]
        if (speed := seen.speeds[rank]) is not None
    ]
    more = f", and {len(changed) - 4} others" if len(changed) > 4 else ""
    return ", ".join(each) + more


def stood_still_s(before: Status, after: Status) -> float:
    """What has passed between two statuses beyond the iterations that lie between them."""
    slowest_s = max(before.iteration_s or 0.0, after.iteration_s or 0.0)
    ran_s = (after.iteration - before.iteration) * slowest_s
    return max(0.0, after.written_s - before.written_s - ran_s)
