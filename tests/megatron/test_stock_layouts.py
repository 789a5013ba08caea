"""Megatron's own parser and argument check take every layout that the search may propose."""

import dataclasses
import itertools
import json

from tests.megatron.launch import run_ranks
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.model import MODELS
from zorse_megatron.planner.baselines.stock_layouts import Grid, may_run
from zorse_megatron.planner.baselines.stock_plans import layout_flags
from zorse_megatron.planner.baselines.stock_search import StockSearch
from zorse_megatron.planner.inputs.search_inputs import make_inputs

# 26 layers, 32 heads.
MODEL = dataclasses.replace(MODELS["llama-3b"], seq_length=1024)
CLUSTER = b"""
nodes:
  - {name: a, gpus: 4 x A100-40, nics: 25 Gb/s}
  - {name: b, gpus: 2 x L4, nics: 25 Gb/s}
"""
BATCH = 24
USUAL = Grid(layers=(13, 13), width=3, micro_batch_size=2, mode="none")
BAD = {
    "a layer too few": dataclasses.replace(USUAL, layers=(12, 13)),
    "no whole micro-batches": dataclasses.replace(USUAL, micro_batch_size=3),
    "stages that do not divide the ranks": dataclasses.replace(USUAL, layers=(7, 7, 6, 6), width=1),
    "heads that TP groups do not divide": dataclasses.replace(USUAL, tensor=3, width=1),
}


def words(grid):
    """A whole command."""
    return [
        *("--num-layers", "26", "--hidden-size", "3200", "--num-attention-heads", "32"),
        *("--seq-length", "1024", "--max-position-embeddings", "1024", "--fp16"),
        *("--global-batch-size", str(BATCH), "--lr", "1e-4", "--train-iters", "10"),
        *("--transformer-impl", "local", "--no-gradient-accumulation-fusion"),
        *("--no-persist-layer-norm", "--position-embedding-type", "rope", "--no-rope-fusion"),
        *("--calculate-per-token-loss", "--tokenizer-type", "NullTokenizer"),
        *("--vocab-size", "32000", *layout_flags(grid)),
    ]


def test_megatron_takes_every_proposed_layout_and_refuses_others(tmp_path):
    inputs = make_inputs(
        parse_cluster(CLUSTER), MODEL, None, global_batch_size=BATCH, dtype="float16"
    )
    search = StockSearch(inputs)
    search.run()
    proposed = search.proposed()
    proposed = proposed[:: max(1, len(proposed) // 200)]
    shapes = {(each.tensor, each.stages, each.width, each.virtual, each.mode) for each in proposed}
    assert len(shapes) > 20 and {each.counts_ends is None for each in proposed} == {False, True}
    assert all(may_run(inputs, grid) for grid in proposed)
    assert not any(may_run(inputs, grid) for grid in BAD.values())
    asked = [*proposed, *BAD.values()]
    path = tmp_path / "commands.json"
    path.write_text(json.dumps([(6, words(grid)) for grid in asked]))
    result = run_ranks([str(path)], 1, entry="tests.megatron.layouts_entry", timeout_s=200)
    assert result.returncodes == (0,), result.outputs[0]
    found = json.loads(path.read_text())
    refused = [
        (grid.description, grid.layout, why)
        for grid, why in zip(proposed, found, strict=False)
        if why is not None
    ]
    assert refused == []
    taken = itertools.compress(BAD, (why is None for why in found[len(proposed) :]))
    assert list(taken) == []
