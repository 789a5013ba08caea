"""`zorse` as a rank on a pretended cluster: `ZORSE_TEST_NODES=2,2` puts two ranks on each of two
nodes, each with a kind of CPU of its own.

`ZORSE_TEST_DEATH=1:3`: rank 1 is killed when it is told of the third measurement.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

RANK = int(os.environ["RANK"])


def pretend() -> None:
    first = 0
    for number, count in enumerate(map(int, os.environ["ZORSE_TEST_NODES"].split(","))):
        if first <= RANK < first + count:
            os.environ["ZORSE_NODE_NAME"] = f"node-{number}"
            os.environ["ZORSE_GPU_KIND"] = f"cpu-{number}"
            os.environ["LOCAL_RANK"] = str(RANK - first)
        first += count


def dying(show: Callable[[Any], None], when: int) -> Callable[[Any], None]:
    shown = []

    def run(progress: Any) -> None:
        shown.append(progress)
        if len(shown) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        show(progress)

    return run


def main() -> None:
    pretend()
    rank, _, when = os.environ.get("ZORSE_TEST_DEATH", "").partition(":")
    if rank == str(RANK):
        from zorse_megatron.measure import discover, profile_run

        for module, name in ((discover, "discover"), (profile_run, "measure_profile")):
            measure = getattr(module, name)
            setattr(
                module,
                name,
                lambda place, wanted, show, measure=measure: measure(
                    place, wanted, dying(show, int(when))
                ),
            )
    from zorse_megatron.cli.main import app

    app(prog_name="zorse")


if __name__ == "__main__":
    main()
