"""A training with a slow rank moves to the plan that `zorse plan --from-status` finds for it."""

import json
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.comparison import (
    MAX_RELATIVE_WEIGHT_DIFFERENCE,
    NUM_LAYERS,
    assert_equal_steps,
    flags_for,
    largest_difference,
    plan_run,
    stock_run,
)
from tests.megatron.launch import REPOSITORY
from tests.megatron.plans import plan_of, replica
from tests.megatron.slow_rank_entry import (
    AHEAD_S,
    FACTOR,
    LATE_S,
    LAYER_S,
    SLOW,
    WAITS_AFTER,
)
from zorse_megatron.errors import ZorseError
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import ModelShape
from zorse_megatron.inputs.profile import Profile, Source, Times, save_profile
from zorse_megatron.inputs.status import LinkStatus, load_status
from zorse_megatron.plan.plan_file import fingerprint, load_plan

STEPS, SEEN = 15, WAITS_AFTER - 2
CLUSTER = b"nodes: [{name: here, gpus: 3 x T4}]\n"
PLAN = replace(
    plan_of(((replica(0, 1, 8),), 1), ((replica(1, 1, 8),), 1), ((replica(2, 1, 8),), 2)),
    cluster=parse_cluster(CLUSTER).fingerprint(),
)


def profile() -> Profile:
    """A forward takes what a rank sleeps that is not slow, a backward as long."""
    sizes = (1, 2, 4, 8)
    model = ModelShape(
        name="tiny",
        num_layers=NUM_LAYERS,
        hidden_size=32,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=8,
        vocab_size=256,
        seq_length=32,
    )
    times = Times(
        part="layer",
        model="tiny",
        gpu_kind="T4",
        seq_length=32,
        dtype="float32",
        source="by hand",
        micro_batch_sizes=sizes,
        forward_s=tuple(size * LAYER_S for size in sizes),
        backward_s=tuple(size * LAYER_S for size in sizes),
    )
    return Profile(
        schema_version=1,
        sources=(Source(name="by hand", kind="measured"),),
        models=(model,),
        times=(times,),
    )


def zorse(directory: Path, *words: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "zorse_megatron", *words]
    environment = {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def plan_and_move(directory: Path, flags: tuple[str, ...]) -> dict[str, Any]:
    """As somebody does who finds a run slow; it goes on meanwhile. Returns what was said."""
    (directory / "cluster.yaml").write_bytes(CLUSTER)
    save_profile(profile(), directory / "profile.json")
    for _ in range(2400):
        with suppress(ZorseError):  # nothing has been written yet
            if load_status(directory / "status").iteration >= SEEN:
                break
        time.sleep(0.05)
    words = ("--from-status", "status", "--cluster", "cluster.yaml", "--profile", "profile.json")
    more = ("--out", "next.json", "--max-tp", "1", "--json")
    answer: dict[str, Any] = json.loads(zorse(directory, "plan", *words, *more, "--", *flags))
    zorse(directory, *shlex.split(answer["run"]["command"])[1:])
    return answer


def assert_links(links: tuple[LinkStatus, ...]) -> None:
    """Of the two ways between ranks one is late; clocks are as far apart as they may be."""
    assert [each.ranks for each in links] == [(0, 1), (1, 2)]
    for each in links:
        assert each.num_bytes == 32 * 32 * 4
        assert LATE_S / 2 < each.seconds < AHEAD_S / 100


def test_a_run_moves_to_the_plan_for_its_speeds_and_stays_exact(
    corpus: Path, tmp_path: Path
) -> None:
    # Ranks wait for a search, which may have to wait for other tests.
    flags = flags_for(corpus, "--distributed-timeout-minutes", "5", steps=STEPS)
    status = tmp_path / "status"
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(plan_and_move, tmp_path, flags)
        run = plan_run(
            PLAN,
            (*flags, "--zorse-status", str(status)),
            entry="tests.megatron.slow_rank_entry",
            env={"ZORSE_TEST_STATUS": str(status)},
            timeout_s=300,
        )
        factors = beside.result()["run"]["factors"]
    stock = stock_run(flags)
    assert_equal_steps(run, stock)  # of the initial weights a run that moves keeps no record
    (final,) = stock.of_ranks
    assert largest_difference(run, run.of_ranks, final) <= MAX_RELATIVE_WEIGHT_DIFFERENCE
    # Embedding and output layer, for which nobody sleeps, are planned to take next to nothing.
    assert factors == pytest.approx([0.5, 0.5, FACTOR / 2], rel=0.01)
    found, plan = load_status(status), load_plan(tmp_path / "next.json")
    (move,) = found.moves
    assert move.refused is None and move.plan == found.plan == fingerprint(plan) and found.ended
    assert plan.cluster == PLAN.cluster
    assert f"the training runs under plan {found.plan}" in run.outputs[0]
    assert_links(load_status(status / "before-move.json").links)
    # What the slow rank computes of the model has become less.
    first, stop = next(c.layers for c in plan.chunks if c.group == plan.group_of_rank(SLOW))
    (group, index) = plan.replica_of_rank(SLOW)
    assert (stop - first) * plan.groups[group].replicas[index].num_samples < 2 * 8
