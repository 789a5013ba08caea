"""Look for hangs in what GPU ranks would launch for random plans and for the planner's.

    python -m scripts.launch_order.check --plans 2000

For each plan, and each number of hardware queues and of NCCL kernels for which a GPU has room: how
many plans hang. "all": room for as many kernels as can wait at once, by the bound that plans are
held to (`schedule.communicators`). Receives that are launched when they are opened are what the
project does not do, to show that such hangs are found.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from scripts.launch_order.hardware_queues import find_hang
from scripts.launch_order.launches import Launch, launches_of
from scripts.receives_ahead import EXAMPLES, inputs_of
from tests.strategies import lowerable_plans, plans, trained_plans
from zorse_megatron.plan.divided_replicas import replicas_that_share_experts
from zorse_megatron.plan.plan import Group, ModelFingerprint, Plan, Recompute, Replica
from zorse_megatron.plan.rules import hierarchical_problems
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.outcome import STRATEGIES, NoPlanError
from zorse_megatron.schedule.actions import Action, ActionLists
from zorse_megatron.schedule.communicators import communicators_of, most_waiting
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.transfer_windows import receives_posted_at
from zorse_megatron.schedule.validate import executes_in_order

Room = int | Literal["fit"] | None
LIMITS: tuple[tuple[int | None, Room], ...] = (
    *((queues, "fit") for queues in (None, 32, 8, 1)),
    *((None, room) for room in (4, 2, 1)),
)
"""(hardware queues, room for NCCL kernels) of each column."""
WAYS = ("as they are launched", "receives launched when opened")
IN_ORDER = "as they are launched with global_aux_loss"
"""Which lets hosts wait for loads; of plans that are not refused with it (`tell_in_order`)."""
SEEDS = 2
_MODEL = ModelFingerprint(
    num_layers=6, hidden_size=96, ffn_hidden_size=384, num_attention_heads=12, vocab_size=768
)
"""Of plans with tensor-parallel groups and regions."""
_EXPERTS = replace(_MODEL, num_experts=4, moe_layer_freq=(0, 1, 1, 0, 1, 1))
"""Of plans whose ranks share experts."""


def launched_when_opened(actions: Sequence[Action]) -> tuple[Action, ...]:
    """The list with its receives where their buffers are opened."""
    places = {at: (at, 1) for at in range(len(actions))}
    places |= {at: (post_position, 0) for at, post_position in receives_posted_at(actions).items()}
    return tuple(actions[at] for at in sorted(places, key=lambda at: (places[at], at)))


def bounds_of(plan: Plan, lists: ActionLists) -> list[int]:
    """Rank -> how many of its kernels can wait at once, by the bound."""
    others = Counter(
        rank
        for communicator in communicators_of(plan, [lists])
        if communicator.use != "link"
        for rank in communicator.ranks
    )
    return [
        most_waiting(rank, actions, others=others[rank]) for rank, actions in enumerate(lists.ranks)
    ]


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What the ranks of a plan launch, and for how many kernels their GPUs must have room."""

    launches: Sequence[Sequence[Launch]]
    resident: Sequence[int]

    @classmethod
    def of(cls, plan: Plan, way: str, *, forward_only: bool = False) -> "Launched":
        """In one of the `WAYS`, or `IN_ORDER`."""
        lists = lower_plan(plan, forward_only=forward_only)
        bounds = bounds_of(plan, lists)
        if way == WAYS[1]:
            lists = ActionLists(ranks=tuple(map(launched_when_opened, lists.ranks)))
        return cls(
            launches=launches_of(plan, lists, in_order=way == IN_ORDER),
            resident=bounds,
        )

    def hang(self, queues: int | None, room: Room) -> str | None:
        """Where the ranks stand if they hang, in any of several ways to share queues and room."""
        limit = self.resident if room == "fit" else room
        seeds = range(1 if queues is None and room in ("fit", None) else SEEDS)
        found = (
            find_hang(self.launches, num_queues=queues, num_resident=limit, seed=seed)
            for seed in seeds
        )
        return next((hang for hang in found if hang is not None), None)


def random_plans(count: int, max_world: int) -> list[Plan]:
    """As many plans of every schedule, the same in every run that imports the same modules:
    hypothesis also draws constants that it finds in them.

    A quarter may have TP groups; in another one ranks share experts, in every other of these plans
    overlapped.
    """
    of_ranks = st.one_of(
        plans(max_world, 5),
        lowerable_plans(max_world, 5, schedule_names=("breadth_first",)),
        lowerable_plans(max_world, 4, schedule_names=("interleaved",)),
    )
    of_tp_groups, with_experts = (
        trained_plans(model, 8, max_world=max_world, max_ranks_per_replica=3)
        for model in (_MODEL, _EXPERTS)
    )
    sharing = _drawn(
        with_experts.filter(lambda plan: any(replicas_that_share_experts(plan))), count // 4
    )
    sharing[::2] = map(overlapped, sharing[::2])
    drawn = [
        *_drawn(of_ranks, count - 2 * (count // 4)),
        *_drawn(of_tp_groups, count // 4),
        *sharing,
    ]
    found = []
    for number, plan in enumerate(drawn):
        # Every other one has a tied embedding, where first and last chunk are two.
        model = replace(plan.model, tied_embeddings=number % 2 == 0)
        groups = map(in_two_levels if number % 3 == 0 else in_16_bits, plan.groups)
        changed = replace(plan, model=model, groups=tuple(groups))
        is_refused = any(hierarchical_problems(changed))
        found.append(replace(plan, model=model) if is_refused else changed)
    return found


def _drawn(strategy: st.SearchStrategy[Plan], count: int) -> list[Plan]:
    found: list[Plan] = []

    @seed(1)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(plan: Plan) -> None:
        found.append(plan)

    draw()
    return found


def overlapped(plan: Plan) -> Plan:
    """The plan with twice the samples, whose halves are interleaved where ranks share experts."""
    groups = tuple(
        replace(group, replicas=tuple(map(_overlapped, group.replicas))) for group in plan.groups
    )
    return replace(plan, global_batch_size=2 * plan.global_batch_size, groups=groups)


def _overlapped(replica: Replica) -> Replica:
    twice = replace(replica, micro_batch_size=2 * replica.micro_batch_size)
    if (shared := replica.expert_parallel) is None:
        return twice
    samples = tuple(2 * count for count in shared.samples)
    in_halves = replace(shared, samples=samples, overlap=True)
    return replace(twice, expert_parallel=in_halves, recompute=Recompute(mode="none"))


def in_two_levels(group: Group) -> Group:
    """The group with its replicas in two regions, if there are so many: strategies draw few."""
    if len(group.replicas) == 1:
        return group
    by_rank = sorted(group.replicas, key=lambda replica: replica.ranks)
    replicas = [replace(each, region="ab"[each is by_rank[-1]]) for each in group.replicas]
    return replace(group, replicas=tuple(replicas), hierarchical=True, grad_reduce_dtype=None)


def in_16_bits(group: Group) -> Group:
    """A group of three ranks or more with gradients that are sent so, for which it waits."""
    return replace(group, grad_reduce_dtype="bf16") if len(group.ranks) > 2 else group


def planned() -> Iterator[Plan]:
    """What every strategy plans for llama-3b on the example clusters."""
    for path in sorted(EXAMPLES.glob("*.yaml")):
        inputs = inputs_of(path.stem, batch=128, length=512)
        for strategy in STRATEGIES:
            try:
                yield find_plan(inputs, strategy=strategy).plan
            except NoPlanError:
                continue


def tell_in_order(each: Iterable[Plan]) -> list[Plan]:
    """Those that are not refused with `global_aux_loss`: which overlapped ones are."""
    return [
        plan
        for plan in each
        if not any(shared.overlap for _, _, shared in replicas_that_share_experts(plan))
        and executes_in_order(plan, lower_plan(plan))
    ]


def count_hangs(each: Iterable[Plan], way: str) -> Counter[tuple[int | None, Room]]:
    """Limits -> how many plans hang in a training or an evaluation step."""
    found: Counter[tuple[int | None, Room]] = Counter()
    for plan in each:
        both = [Launched.of(plan, way, forward_only=only) for only in (False, True)]
        for limits in LIMITS:
            found[limits] += any(one.hang(*limits) for one in both)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=2000, help="random plans")
    parser.add_argument("--world", type=int, default=8, help="ranks of these at most")
    parser.add_argument("--planned", action="store_true", help="the planner's plans, too")
    arguments = parser.parse_args()
    sets = {"random": random_plans(arguments.plans, arguments.world)}
    if arguments.planned:
        sets["planned"] = list(planned())
    names = [
        f"{queues or 'unlimited'} queues, room for {'all' if room == 'fit' else room}"
        for queues, room in LIMITS
    ]
    print(f"| | {' | '.join(names)} |\n{'|---' * (len(names) + 1)}|")
    for name, each in sets.items():
        for way, some in (*((way, each) for way in WAYS), (IN_ORDER, tell_in_order(each))):
            found = count_hangs(some, way)
            cells = " | ".join(str(found[limits]) for limits in LIMITS)
            print(f"| {len(some)} {name} plans, {way} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
