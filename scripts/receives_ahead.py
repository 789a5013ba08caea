"""What it is worth that receives begin before their place in the list and sends end after theirs.

    python -m scripts.receives_ahead

Plans of `zorse plan` for llama-3b (float16, 128 samples of 512 tokens, published figures) on the
example clusters, simulated with receives that begin at their place, as on the stream that computes,
and one, two or three computations before; and with a ring of two or three buffers for each pair of
ranks, whose receives begin as soon as one of them is free. Then with sends that must have left two,
four, ... computations after their place, or at the end of the step only, as if nobody waited for
them before. Prints two tables in Markdown: iteration time against that of the plan, and the most
that the fullest GPU has in buffers of messages. `--plans` simulates plan files of the paper's
clusters in the second table, which `--measured` prices as scripts/bench_planner.py does.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from scripts.bench_planner import paper_inputs
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import load_plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, make_inputs
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.schedule.actions import COMPUTE, RECEIVES, Action, ActionLists, Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.transfer_windows import RECEIVES_AHEAD, SENDS_BEHIND
from zorse_megatron.simulate.assumptions import Framework
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.result import SimulationResult

EXAMPLES = Path(__file__).parents[1] / "examples"
CLUSTERS = ("mini-a", "mini-b", "mini-c", "two-node-lab")
BEHIND = (2, 4, 6, 8)
UNTIL_STEP = Framework(sends_behind=sys.maxsize)
MIB = 1 << 20


def inputs_of(cluster: str, *, batch: int, length: int) -> Inputs:
    """What the planner is given."""
    model = replace(MODELS["llama-3b"], seq_length=length)
    return make_inputs(
        load_cluster(EXAMPLES / f"{cluster}.yaml"),
        model,
        None,
        global_batch_size=batch,
        dtype="float16",
    )


def with_ring(actions: Sequence[Action], depth: int) -> tuple[Action, ...]:
    """The list with each receive where a buffer of its link's ring is free again.

    That is before the computation that consumes the receive `depth` places before it on the same
    link, as if the buffer were free before what else that computation waits for has arrived.
    """
    consumed = {
        (a.kind is Kind.FORWARD, a.chunk, a.micro_batch): at
        for at, a in enumerate(actions)
        if a.kind in COMPUTE
    }
    history: dict[int | None, list[int]] = defaultdict(list)
    places = {}
    for at, action in enumerate(actions):
        places[at] = at, 1
        if action.kind in RECEIVES:
            taken = history[action.peer]
            free = taken[-depth] if len(taken) >= depth else 0
            places[at] = min(free, at), 0
            forward = action.kind is Kind.RECV_F
            taken.append(consumed[forward, action.chunk, action.micro_batch])
    return tuple(actions[at] for at in sorted(places, key=lambda at: (places[at], at)))


def ways(plan: Plan, inputs: Inputs) -> Iterator[tuple[str, SimulationResult]]:
    """Each way to begin receives, and what comes of it."""
    for ahead in (0, 1, 2, 3):
        yield (
            f"{ahead} ahead",
            simulate_plan(inputs, plan, framework=Framework(receives_ahead=ahead)),
        )
    at_place = Framework(receives_ahead=0)
    for depth in (2, 3):
        lists = ActionLists(ranks=tuple(with_ring(a, depth) for a in lower_plan(plan).ranks))
        yield f"ring of {depth}", simulate_plan(inputs, plan, framework=at_place, lists=lists)


def ways_to_leave(plan: Plan, inputs: Inputs) -> Iterator[tuple[str, SimulationResult]]:
    """Each time that a send may be on its way, and what comes of it."""
    for behind in BEHIND:
        yield (
            f"{behind} behind",
            simulate_plan(inputs, plan, framework=Framework(sends_behind=behind)),
        )
    yield "until STEP", simulate_plan(inputs, plan, framework=UNTIL_STEP)


def buffer_mib(result: SimulationResult) -> float:
    """Most that any GPU has in buffers."""
    peaks = (rank.by_category_bytes[Category.BUFFERS] for rank in result.memory)
    return max(peaks) / MIB


def show(
    cases: Iterable[tuple[str, Plan, Inputs]],
    ways_of: Callable[[Plan, Inputs], Iterator[tuple[str, SimulationResult]]],
    planned: str,
) -> None:
    """Print a table; `planned`: the way that plans are made for."""
    for number, (name, plan, inputs) in enumerate(cases):
        found = dict(ways_of(plan, inputs))
        if not number:
            print(f"| | planned | {' | '.join(found)} |\n{'|---' * (len(found) + 2)}|")
        planned_s = found[planned].iteration_s
        cells = [
            f"{100 * (result.iteration_s / planned_s - 1):+.1f} %, {buffer_mib(result):,.0f} MiB"
            for result in found.values()
        ]
        said = f"{name}, {plan.schedule.name}"
        print(f"| {said} | {planned_s:.3f} s | {' | '.join(cells)} |", flush=True)


def given_cases(plans: Sequence[Path], measured: Path) -> Iterator[tuple[str, Plan, Inputs]]:
    """Plan files called like c-llama-7b.json, priced as scripts/bench_planner.py does."""
    for path in plans:
        cluster, model = path.stem.split("-", 1)
        yield path.stem, load_plan(path), paper_inputs(measured, cluster, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--plans", nargs="*", type=Path, default=(), metavar="PLAN")
    parser.add_argument("--measured", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    cases = []
    for cluster in () if arguments.plans else arguments.clusters:
        inputs = inputs_of(cluster, batch=arguments.batch, length=arguments.length)
        cases.append((cluster, find_plan(inputs).plan, inputs))
    show(cases, ways, f"{RECEIVES_AHEAD} ahead")
    print()
    given = given_cases(arguments.plans, arguments.measured)
    show(chain(cases, given), ways_to_leave, f"{SENDS_BEHIND} behind")


if __name__ == "__main__":
    main()
