"""How many NCCL kernels can wait at once on the GPUs of plans, and what they have room for.

    python -m scripts.launch_order.waiting plan.json [...]

Prints a table in Markdown. For each plan and kind of GPU, of its ranks the most: communicators;
kernels that can wait at once (`schedule.communicators`); multiprocessors that these hold, with
the channels that the runtime gives each communicator.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scripts.launch_order.check import bounds_of
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.schedule.communicators import (
    max_ctas,
    most_held,
    planned_communicators,
    resident_kernels,
)
from zorse_megatron.schedule.lower import lower_plan

HEAD = ("Plan", "GPU", "Ranks", "Communicators", "Can wait at once", "Hold at most", "Of")


def rows(name: str, plan: Plan) -> Iterator[tuple[object, ...]]:
    """Yield one row for each kind of GPU."""
    assert plan.cluster is not None and plan.cluster.gpu_kinds is not None, "a plan of zorse plan"
    kinds = plan.cluster.gpu_kinds
    num_sms = [GPU_KINDS[kind].multiprocessors or 0 for kind in kinds]
    communicators = planned_communicators(plan)
    counts = resident_kernels(communicators)
    held = most_held(plan, range(plan.world_size), max_ctas(communicators, num_sms))
    steps = (bounds_of(plan, lower_plan(plan, forward_only=only)) for only in (False, True))
    bounds = [max(each) for each in zip(*steps, strict=True)]
    for kind, number in Counter(kinds).items():
        ranks = [rank for rank, each in enumerate(kinds) if each == kind]
        yield (
            *(name, kind, number, max(counts[rank] for rank in ranks)),
            *(max(bounds[rank] for rank in ranks), max(held[rank] for rank in ranks)),
            num_sms[ranks[0]],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plans", nargs="+", type=Path, metavar="PLAN")
    print("|", " | ".join(HEAD), "|")
    print("|", "---|" * len(HEAD), sep="")
    for path in parser.parse_args().plans:
        for row in rows(path.stem, load_plan(path)):
            print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
