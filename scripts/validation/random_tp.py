"""Trains random plans with tensor-parallel groups on the CPU, each beside a stock single process.

    python -m scripts.validation.random_tp --plans 20 --seed 0

Prints, for each plan, how far loss, gradient norm and weights are apart after four steps in fp32,
and ends with status 1 if a plan is beyond the project's tolerances or fails. Each plan takes some
seconds. It runs on what the tests run on (`tests/megatron`), so from a checkout.
"""

import argparse
import os
import random
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.megatron.comparison import (
    MASKED,
    SEQUENCE_PARALLEL,
    UNTIED,
    flags_for,
    for_one_process,
    largest_difference,
    plan_run,
    stock_run,
)
from tests.megatron.launch import run_ranks
from tests.megatron.plans import chunked_plan, tp_replica
from zorse_megatron.errors import ZorseError
from zorse_megatron.plan.plan import (
    Group,
    Offload,
    Plan,
    Recompute,
    Replica,
    Schedule,
    TpShards,
    has_equal_tp_shards,
)
from zorse_megatron.schedule.pipeline_schedules import RESIDENT, parameters_setting

LAYERS, SAMPLES, SEQUENCE, GROUPS, COLUMNS, ROWS = 4, 8, 32, 4, 128, 256
LLAMA = (
    *("--swiglu", "--ffn-hidden-size", str(COLUMNS), "--disable-bias-linear"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm"),
)
MODELS: tuple[tuple[str, ...], ...] = ((), UNTIED, LLAMA, (*LLAMA, *UNTIED))


def composition(dice: random.Random, total: int, count: int, least: int) -> tuple[int, ...]:
    """Random numbers that sum up to `total`."""
    cuts = sorted(dice.randint(0, total - least * count) for _ in range(count - 1))
    edges = [0, *cuts, total - least * count]
    return tuple(b - a + least for a, b in pairwise(edges))


def random_tp_shards(dice: random.Random, degree: int) -> TpShards | None:
    """Uneven TP shards of any of the three kinds; equal ones where they divide."""
    even = degree in (1, 2, 4)
    if degree == 1 or (even and dice.random() < 0.4):
        return None
    return TpShards(
        kv_groups=None if even and dice.random() < 0.3 else composition(dice, GROUPS, degree, 0),
        mlp_columns=None if even and dice.random() < 0.3 else composition(dice, COLUMNS, degree, 0),
        vocabulary_rows=None
        if even and dice.random() < 0.3
        else composition(dice, ROWS, degree, 0),
    )


def random_replicas(dice: random.Random, degrees: list[int], first: int) -> tuple[Replica, ...]:
    """Replicas of these degrees that share the batch out."""
    samples = composition(dice, SAMPLES, len(degrees), 0)
    weights = [dice.choice([0.0, 1.0, 2.5]) for _ in degrees]
    if not any(weights):
        weights[0] = 1.0
    found = []
    for degree, count, weight in zip(degrees, samples, weights, strict=True):
        size = dice.choice([n for n in (1, 2, 3, 4) if count % n == 0]) if count else 1
        ranks = tuple(range(first, first + degree))
        parts = random_tp_shards(dice, degree)
        found.append(tp_replica(ranks, size, count // size, weight, parts))
        first += degree
    return tuple(found)


def random_plan(dice: random.Random, most_ranks: int) -> Plan:
    """A plan of one or two groups, with one to four chunks, and any of its settings."""
    while True:
        shape = [
            [dice.choice([1, 2, 2, 3, 4]) for _ in range(dice.choice([1, 1, 2]))]
            for _ in range(dice.choice([1, 2]))
        ]
        if 2 <= sum(map(sum, shape)) <= most_ranks and max(map(max, shape)) > 1:
            break
    groups, first = [], 0
    for degrees in shape:
        groups.append(random_replicas(dice, degrees, first))
        first += sum(degrees)
    rounds = dice.choice([1, 1, 2])
    order = [number for _ in range(rounds) for number in range(len(groups))]
    layers = composition(dice, LAYERS, len(order), 1)
    plan = chunked_plan(groups, list(zip(order, layers, strict=True)))
    names = ["interleaved", "breadth_first"] if rounds > 1 else ["1f1b", "breadth_first"]
    setting = dice.choice(["per_pass", "resident", "per_micro_batch"])
    name: Any = dice.choice(names)
    plan = replace(
        plan,
        schedule=Schedule(
            name=name,
            parameters={"parameters": setting} if name == "breadth_first" else {},
        ),
    )
    return replace(plan, groups=tuple(with_settings(dice, plan, each) for each in plan.groups))


def with_settings(dice: random.Random, plan: Plan, group: Group) -> Group:
    """The group, with random recomputation and offloading."""
    mode: Any = dice.choice(["none", "none", "selective", "full"])
    alike = has_equal_tp_shards(group)
    offload = Offload(
        parameters=alike and parameters_setting(plan) != RESIDENT and dice.random() < 0.3,
        optimizer_state=dice.random() < 0.3,
        activations=mode == "full" and dice.random() < 0.5,
    )
    return replace(group, recompute=Recompute(mode=mode), offload=offload)


def described(plan: Plan) -> str:
    """The plan in a few words."""
    groups = "|".join(
        "+".join(str(len(r.ranks)) + ("'" if r.tp_shards else "") for r in group.replicas)
        for group in plan.groups
    )
    name = plan.schedule.name + "".join(f" {v}" for v in plan.schedule.parameters.values())
    return f"{groups} ({len(plan.chunks)} chunks, {name})"


def compared(plan: Plan, corpus: Path, more: tuple[str, ...]) -> tuple[float, float, float]:
    """Largest differences of losses, of gradient norms and of weights; the latter two relative."""
    flags = flags_for(corpus, *MASKED, "--clip-grad", "0.5", *more)
    stock, run = stock_run(for_one_process(flags)), plan_run(plan, flags)
    pairs = list(zip(run.losses, stock.losses, strict=True))
    norms = zip(run.grad_norms, stock.grad_norms, strict=True)
    weights = largest_difference(run, run.of_ranks, stock.of_ranks[0])
    return (
        max(abs(mine - theirs) for mine, theirs in pairs),
        max(abs(mine - theirs) / theirs for mine, theirs in norms),
        weights,
    )


def main() -> None:
    """Compare as many plans as asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-ranks", type=int, default=6)
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["ZORSE_TEST_SHARED"] = scratch
        corpus = Path(scratch, "text")
        entry = "tests.megatron.masked_corpus_entry"
        run_ranks([str(corpus)], 1, entry=entry, timeout_s=60).check()
        for number in range(args.plans):
            dice = random.Random(f"{args.seed} {number}")
            plan = random_plan(dice, args.most_ranks)
            divide = all(SEQUENCE % len(r.ranks) == 0 for g in plan.groups for r in g.replicas)
            more = (*dice.choice(MODELS), *dice.choice([(), SEQUENCE_PARALLEL if divide else ()]))
            try:
                loss, norm, weights = compared(plan, corpus, more)
            except ZorseError as error:
                failed += 1
                print(f"{number}: {described(plan)}: failed: {error}", flush=True)
                continue
            good = loss <= 2e-5 and norm <= 1e-4 and weights <= 1e-4
            failed += not good
            print(
                f"{number}: {'equal' if good else 'DIFFERENT'}: {described(plan)} "
                f"{'sequence parallel ' * (SEQUENCE_PARALLEL[0] in more)}loss {loss:.1e} "
                f"norm {norm:.1e} weights {weights:.1e}",
                flush=True,
            )
    print(f"{args.plans - failed} of {args.plans} plans equal a stock single process")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
