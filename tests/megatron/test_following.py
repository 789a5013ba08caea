"""A training that moves by itself: beside it runs `zorse follow`, and one of its ranks is slow."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.megatron.comparison import NUM_LAYERS, plan_of, plan_run, replica, stock_run
from tests.megatron.following_entry import AHEAD_S, LATE_S, LAYER_S, SLOW
from tests.megatron.launch import REPOSITORY
from tests.megatron.test_exactness import assert_equal_runs, flags_for
from zorse_megatron.schema.cluster.cluster_yaml import parse_cluster
from zorse_megatron.schema.plan.plan_json import fingerprint, load_plan
from zorse_megatron.schema.profile.profile import Profile, ProfiledModel, Source, Times
from zorse_megatron.schema.profile.profile_json import save_profile
from zorse_megatron.schema.status.status import LinkStatus
from zorse_megatron.schema.status.status_json import load_status

STEPS = 15
CLUSTER = b"nodes: [{name: here, gpus: 3 x T4}]\n"
PLAN = replace(
    plan_of(((replica(0, 1, 8),), 1), ((replica(1, 1, 8),), 1), ((replica(2, 1, 8),), 2)),
    cluster=parse_cluster(CLUSTER).fingerprint(),
)


def profile() -> Profile:
    """What a layer takes on a rank that is not slow, about."""
    sizes = (1, 2, 4, 8)
    model = ProfiledModel(
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


@contextmanager
def followed(directory: Path, flags: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    """`zorse follow` beside what happens in the block; it has begun when that does."""
    (directory / "cluster.yaml").write_bytes(CLUSTER)
    save_profile(profile(), directory / "profile.json")
    options = ["--cluster", "cluster.yaml", "--profile", "profile.json", "--every", "0.2"]
    options += [
        "--patience",
        "3",
        "--rebuild",
        "0.1",
        "--nice",
        "0",
        "--plan-options",
        "--max-tp 1",
    ]
    command = [sys.executable, "-m", "zorse_megatron", "follow", "status", *options]
    with subprocess.Popen(
        [*command, "--", "pretrain_gpt.py", *flags],
        cwd=directory,
        env={"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert "follows the run" in process.stdout.readline()
            yield process
        finally:
            process.kill()


def assert_links(links: tuple[LinkStatus, ...]) -> None:
    """Of the two ways between ranks one is late; clocks are as far apart as they may be."""
    assert [each.ranks for each in links] == [(0, 1), (1, 2)]
    for each in links:
        assert each.num_bytes == 32 * 32 * 4
        assert LATE_S / 2 < each.seconds < AHEAD_S / 100


def test_moves_by_itself_and_stays_exact(corpus: Path, tmp_path: Path) -> None:
    # Ranks wait for a search, which may have to wait for other tests.
    flags = flags_for(corpus, "--distributed-timeout-minutes", "5", steps=STEPS)
    status = tmp_path / "status"
    with followed(tmp_path, flags) as process:
        run = plan_run(
            PLAN,
            (*flags, "--zorse-status", str(status)),
            entry="tests.megatron.following_entry",
            env={"ZORSE_TEST_FOLLOWED": str(status)},
            timeout_s=300,
        )
        assert process.wait(120) == 0  # the training has ended, so it has, too
    assert_equal_runs(run, stock_run(flags))
    lines = (status / "follow" / "decisions.jsonl").read_text().splitlines()
    asks, *later = map(json.loads, lines)  # the training may end before the next look
    for moved in later[:1]:
        assert (asks["decision"], moved["decision"]) == ("moves", "moved")
    assert asks["factors"][SLOW] > 1.5 * max(asks["factors"][:SLOW])
    found = load_status(status)
    (move,) = found.moves
    assert move.refused is None and move.plan == found.plan == asks["plan"] and found.ended
    plan = load_plan(status / "running-plan.json")
    assert fingerprint(plan) == found.plan and plan.cluster == PLAN.cluster
    assert f"the training runs under plan {found.plan}" in run.outputs[0]
    assert_links(load_status(status / "before-move.json").links)
    # What the slow rank computes of the model has become less.
    first, stop = next(c.layers for c in plan.chunks if c.group == plan.group_of_rank(SLOW))
    (group, index) = plan.replica_of_rank(SLOW)
    assert (stop - first) * plan.groups[group].replicas[index].num_samples < 2 * 8
