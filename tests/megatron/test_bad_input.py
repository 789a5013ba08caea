"""Bad input: every rank exits non-zero, rank 0 says what, where and what to do, nothing hangs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.comparison import BASE_FLAGS
from tests.megatron.launch import RunResult, run_ranks
from tests.megatron.plans import LAYOUTS
from tests.megatron.small_run import TOKENIZER_FLAGS
from zorse_megatron.live.watched_rank import BAD_INPUT
from zorse_megatron.plan.plan_file import dump_plan

MAX_DURATION_S = 30.0
FLAGS = (
    *BASE_FLAGS,
    *("--train-iters", "2", "--mock-data", "--split", "90,5,5"),
    *TOKENIZER_FLAGS,
)


def good_plan() -> dict[str, Any]:
    return dict(json.loads(dump_plan(LAYOUTS["2|1"])))


def run_plan(text: str, tmp_path: Path, *flags: str, world_size: int = 3, **env: str) -> RunResult:
    path = tmp_path / "plan.json"
    path.write_text(text)
    words = [*FLAGS, *flags, "--zorse-plan", str(path)]
    return run_ranks(words, world_size, timeout_s=60, env=env)


def assert_refused(result: RunResult, *facts: str) -> None:
    assert all(code not in (0, None) for code in result.returncodes), result.returncodes
    assert result.wall_s < MAX_DURATION_S
    for fact in facts:
        assert fact in result.outputs[0], f"rank 0 does not say {fact!r}:\n{result.outputs[0]}"
    assert "expected" in result.outputs[0]
    for output in result.outputs:
        assert "Traceback" not in output, output


def edit(change: Callable[[dict[str, Any]], Any]) -> str:
    plan = good_plan()
    change(plan)
    return json.dumps(plan)


def first_replica(plan: dict[str, Any]) -> dict[str, Any]:
    replica: dict[str, Any] = plan["groups"][0]["replicas"][0]
    return replica


GAP = edit(lambda p: p["chunks"][1].update(layers=[2, 4]))


def test_all_that_is_wrong_with_a_plan_is_told_at_once(tmp_path: Path) -> None:
    """Each rule alone is in `tests/unit/bad_input.txt`: `zorse check` asks the same function."""
    plan = good_plan()
    plan["chunks"][1].update(layers=[2, 4])
    plan["global_batch_size"] = 9
    lora = ("--zorse-lora", "rank=8,alpha=16,targets=gate")
    flags = ("--num-layers", "6", "--context-parallel-size", "2", *lora)
    result = run_plan(json.dumps(plan), tmp_path, *flags)
    assert_refused(result, "plan.json", "layer 1", "groups[0]", "groups[1]")
    assert_refused(result, "; the command fits no plan (", "--context-parallel-size: found 2")
    assert_refused(result, "--zorse-lora: found the target gate")


def test_a_plan_that_cannot_be_executed(tmp_path: Path) -> None:
    plan = edit(lambda p: p["groups"][0].update(offload={"parameters": True}))
    result = run_plan(plan, tmp_path)
    assert_refused(result, "plan.json", "groups[0].offload.parameters", "breadth_first")


def test_plan_for_another_world_size(tmp_path: Path) -> None:
    result = run_plan(json.dumps(good_plan()), tmp_path, world_size=2)
    assert_refused(result, "WORLD_SIZE", "found 2", "expected 3")


def test_flags_that_do_not_fit(tmp_path: Path) -> None:
    """Each flag alone is in `tests/unit/test_flag_rows.py` and `tests/unit/test_removed.py`."""
    flags = ("--num-layers", "6", "--context-parallel-size", "2", "--dataloader-type", "external")
    result = run_plan(json.dumps(good_plan()), tmp_path, *flags)
    assert_refused(result, "--num-layers", "--context-parallel-size", "--dataloader-type")
    flags = ("--zorse-plam", "x", "--zorse-mirror", "1")
    result = run_plan(json.dumps(good_plan()), tmp_path, *flags)
    assert_refused(result, "--zorse-plan", "--zorse-mirror: found", "--save-interval")


SCRIPT = """
from megatron.training.arguments import parse_args

def add(parser):
    parser.add_argument("--shards-of-ours", type=int)
    return parser

parse_args(add)
"""


def test_a_flag_that_the_parser_of_the_script_lacks(tmp_path: Path) -> None:
    """Only the script's own parser can tell: it knows flags that no table has."""
    script, plan = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT)
    plan.write_text(json.dumps(good_plan()))
    words = [script, *FLAGS, "--zorse-plan", plan, "--shards-of-our", "3"]
    result = run_ranks([str(word) for word in words], 3, timeout_s=60)
    assert_refused(result, "unknown flags", "--shards-of-our: ", "Did you mean --shards-of-ours?")
    assert "usage:" not in result.outputs[0]


def test_model_that_differs_in_what_megatron_derives(tmp_path: Path) -> None:
    """ffn_hidden_size and the padded vocabulary are only known after validation."""
    plan = good_plan()
    plan["model"] |= {"ffn_hidden_size": 96, "vocab_size": 1000, "tied_embeddings": False}
    result = run_plan(json.dumps(plan), tmp_path)
    assert_refused(result, "--untie-embeddings-and-output-weights", "model.tied_embeddings")
    plan["model"].pop("tied_embeddings")
    result = run_plan(json.dumps(plan), tmp_path)
    assert_refused(result, "--ffn-hidden-size", "found 128", "expected 96", "--padded-vocab-size")


def test_a_checkpoint_whose_model_is_not_that_of_the_plan(tmp_path: Path) -> None:
    """--use-checkpoint-args sets flags that the command leaves out."""
    saves = str(tmp_path / "saves")
    run_plan(json.dumps(good_plan()), tmp_path, "--save", saves, "--save-interval", "2").check()
    plan = edit(
        lambda p: (
            p["model"].update(num_layers=2),
            p["chunks"][0].update(layers=[0, 1]),
            p["chunks"][1].update(layers=[1, 2]),
        )
    )
    (tmp_path / "plan.json").write_text(plan)
    at = FLAGS.index("--num-layers")
    words = [*FLAGS[:at], *FLAGS[at + 2 :], "--load", saves, "--use-checkpoint-args"]
    result = run_ranks([*words, "--zorse-plan", str(tmp_path / "plan.json")], 3, timeout_s=60)
    assert_refused(result, "--num-layers", "found 4", "expected 2")


def test_parts_of_a_vocabulary_that_only_megatron_knows(tmp_path: Path) -> None:
    """Taken for proportions, they would give the ranks of the TP group rows that overlap."""
    plan = good_plan()
    plan["model"].pop("vocab_size", None)
    plan["groups"][0]["replicas"] = [
        {
            **first_replica(plan),
            **{"ranks": [0, 1], "micro_batch_size": 2, "num_microbatches": 4},
            "tp_shards": {"vocabulary_rows": [3, 1]},
        }
    ]
    result = run_plan(json.dumps(plan), tmp_path)
    assert_refused(
        result, "tp_shards: found [3, 1], 4 rows of the vocabulary in all", "expected 256"
    )


def test_unsupported_megatron_version(tmp_path: Path) -> None:
    result = run_ranks(
        [*FLAGS, "--zorse-plan", str(tmp_path / "plan.json")],
        3,
        entry="tests.megatron.other_version_entry",
        timeout_s=60,
        env={"ZORSE_TEST_PLAN": str(tmp_path / "plan.json")},
    )
    assert_refused(result, "megatron-core 0.18.1", ">=0.19,<0.20", "pip install")


def test_ranks_with_different_plans(tmp_path: Path) -> None:
    """A stale copy of the file on one node."""
    (tmp_path / "0").mkdir()
    stale = good_plan()
    stale["groups"][0]["replicas"][0]["shard_weight"] = 2.0
    for rank, plan in enumerate((good_plan(), good_plan(), stale)):
        (tmp_path / f"plan-{rank}.json").write_text(json.dumps(plan))
    result = run_ranks(
        [*FLAGS, "--zorse-plan", str(tmp_path / "plan-RANK.json")],
        3,
        entry="tests.megatron.rank_in_argv_entry",
        timeout_s=60,
    )
    assert_refused(result, "rank 2", "on rank 0", "Copy the same plan")


@pytest.mark.parametrize("bad", [(2,), (0, 1, 2)])
def test_a_plan_that_is_bad_on_some_nodes(bad: tuple[int, ...], tmp_path: Path) -> None:
    """Each rank is a node. The others would wait for a rank that has not come so far as to meet
    them, as nothing but torchrun or srun knows of its end; and not every launcher tells."""
    for rank in range(3):
        text = GAP if rank in bad else json.dumps(good_plan())
        (tmp_path / f"plan-{rank}.json").write_text(text)
    result = run_ranks(
        [*FLAGS, "--zorse-plan", str(tmp_path / "plan-RANK.json")],
        3,
        entry="tests.megatron.rank_in_argv_entry",
        timeout_s=60,
        env={"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        grace_after_failure_s=20.0,
    )
    assert result.returncodes == (BAD_INPUT,) * 3
    for rank, output in enumerate(result.outputs):
        assert ("found layer 1 in no chunk" in output) == (rank in bad or rank == 0), output
    # Where all say the same, none is to blame.
    assert ("the job ends" in result.outputs[0]) == (len(bad) == 1)
    assert result.wall_s < 20


def test_ranks_on_other_gpus_and_nodes(tmp_path: Path) -> None:
    """All ranks are on node "a" and say that they have a T4: right for ranks 0 and 1 alone."""
    cluster = tmp_path / "cluster.yaml"
    nodes = ("{name: a, gpus: 2 x T4, nics: 1 Gb/s}", "{name: b, gpus: 1 x L4, nics: 1 Gb/s}")
    cluster.write_text("".join(["nodes:\n", *(f"  - {node}\n" for node in nodes)]))
    plan = edit(lambda p: p.update(cluster={"gpu_kinds": ["T4", "T4", "L4"]}))
    flags = ("--zorse-cluster", str(cluster))
    result = run_plan(plan, tmp_path, *flags, ZORSE_GPU_KIND="t4", ZORSE_NODE_NAME="a")
    assert_refused(
        result,
        "The ranks are not on the GPUs of the plan (2 problems)",
        "rank 2 on node a: found node a; expected node b",
        "rank 2 on node a: found a GPU of kind T4; expected L4",
    )
    assert set(result.returncodes) == {BAD_INPUT}


def test_a_gpu_that_torch_has_no_code_for_and_bf16_on_it(tmp_path: Path) -> None:
    """All ranks refuse before any of them computes; all that is wrong is said, once.

    Also a flag that cannot work on one of them alone, for which the others waited 20 s.
    """
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(good_plan()))
    result = run_ranks(
        [*FLAGS, "--bf16", "--attention-backend", "flash", "--zorse-plan", str(path)],
        3,
        entry="tests.megatron.old_gpu_entry",
        timeout_s=60,
    )
    assert_refused(result, "(4 problems)", "compute capability 7.0", "cu126", "found bf16 on Tesla")
    assert "--attention-backend (rank 2 on" in result.outputs[0]
    assert result.returncodes == (BAD_INPUT,) * 3
    assert sum("4 problems" in output for output in result.outputs) == 1
    assert result.wall_s < 20
