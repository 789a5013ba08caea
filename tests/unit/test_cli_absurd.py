"""Absurd but valid clusters and models, with a short search: a plan that holds, or a clear no.

Tensor-parallel groups are searched where GPUs or layers are few; `test_planner_tensor_parallel` is
about them.
"""

import json

import pytest

from tests.unit.cli_samples import MODEL, runner_in
from zorse_megatron.plan.plan_file import load_plan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("little_effort", "few_layouts")]

LAYER = MODEL | {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
DEEP = LAYER | {"num_hidden_layers": 100}
SMALL_KIND = "gpu_kinds: [{{name: T4-small, like: T4, memory: {memory}}}]\n"

LLAMA_65B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 22016,
    "num_attention_heads": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


def small(memory, nodes):
    return SMALL_KIND.format(memory=memory) + f"nodes: [{nodes}]"


@pytest.fixture
def run(tmp_path, monkeypatch):
    runner = runner_in(tmp_path, monkeypatch)

    def plan(cluster, model, batch, *more):
        (tmp_path / "cluster.yaml").write_text(cluster)
        (tmp_path / "model.json").write_text(json.dumps(model))
        files = ("--cluster", "cluster.yaml", "--model", "model.json")
        size = ("--global-batch-size", batch, "--seq-length", model["max_position_embeddings"])
        return runner("plan", "--use-all", *files, *size, *more, "--out", "new.json"), runner

    return plan


NO_TP = ("--max-tp", 1)
FEASIBLE = {
    "one GPU, one layer, one sample": ("nodes: [{gpus: 1 x T4}]", LAYER, 1),
    "one GPU, a prime number of samples": ("nodes: [{gpus: 1 x T4}]", LAYER, 7),
    "more GPUs than layers and samples": ("nodes: [{gpus: 8 x T4}]", LAYER, 1),
    "100 layers": ("nodes: [{gpus: 2 x T4}]", DEEP, 2, *NO_TP),
    "every GPU another kind": (
        "nodes: [{gpus: [1 x T4, 1 x L4, 1 x A10G, 1 x P40]}]",
        MODEL,
        5,
        *NO_TP,
    ),
    "every GPU another kind, and TP groups": (
        "nodes: [{gpus: [1 x T4, 1 x L4, 1 x P40]}]",
        LAYER,
        5,
    ),
    "a network of a modem": (
        "nodes: [{gpus: 1 x T4, nics: 56 kb/s}, {gpus: 1 x T4, nics: 56 kb/s}]",
        LAYER,
        4,
    ),
    "a minute to the other side": (
        "nodes: [{gpus: 1 x T4, nics: {bandwidth: 1 Gb/s, latency: 60 s}}, "
        "{gpus: 1 x T4, nics: {bandwidth: 1 Gb/s, latency: 60 s}}]",
        LAYER,
        2,
    ),
}


@pytest.mark.parametrize("case", FEASIBLE.values(), ids=FEASIBLE)
def test_there_is_a_plan(run, case):
    result, runner = run(*case)
    assert result.exit_code == 0, result.output
    checked = runner("check", "new.json", "cluster.yaml", "model.json")
    assert checked.exit_code == 0, checked.output


REFUSED = {
    "no GPU holds a layer": (small("20MB", "gpus: 4 x T4-small"), MODEL, 8, *NO_TP, "T4-small"),
    "too few GPUs": ("nodes: [{gpus: 2 x T4}]", LLAMA_65B, 2, *NO_TP, "T4 (2 GPUs"),
    "more samples than memory for one": (
        "nodes: [{gpus: 2 x T4}]",
        MODEL | {"max_position_embeddings": 9_000_000},
        1,
        "T4",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_there_is_none_and_the_answer_says_what_is_missing(run, case):
    *inputs, said = case
    result, _ = run(*inputs)
    assert result.exit_code == 1, result.output
    assert "found " in result.stderr
    assert "expected " in result.stderr
    assert said in result.stderr


def test_a_gpu_too_small_for_a_layer_gets_state_or_nothing_or_is_named(run):
    cluster = small("60MB", "gpus: [2 x T4, 2 x T4-small]")
    result, _ = run(cluster, MODEL, 4, *NO_TP)
    if result.exit_code:
        assert "T4-small" in result.stderr
        return
    plan = load_plan("new.json")
    replicas = [replica for group in plan.groups for replica in group.replicas]
    assert all(r.num_microbatches == 0 for r in replicas if set(r.ranks) & {2, 3})


def test_the_same_input_gives_the_same_file(run, tmp_path):
    texts = []
    for _ in range(2):
        run("nodes: [{gpus: [2 x T4, 1 x L4]}]", MODEL, 6, *NO_TP)
        texts.append((tmp_path / "new.json").read_bytes())
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["predictions"]
