"""Public layer times show which kinds of GPU keep their scores.

A layer with as many tokens in samples of twice the length does the same but for its scores: twice
as many. Where flash attention runs that costs next to nothing; where it does not, several passes
over the new scores.
"""

import csv
from collections import defaultdict
from pathlib import Path

import pytest

from zorse_megatron.costs.analytic_compute import score_bytes
from zorse_megatron.gpus.known_gpus import GPU_KINDS, canonical_kind
from zorse_megatron.inputs.model import MODELS

TIMES = Path(__file__).parents[3] / "shared" / "measured" / "layer_latency.csv"
MODEL_NAMES = ("llama-3b", "llama-7b")


@pytest.mark.skipif(not TIMES.exists(), reason="the public measurements are not here")
def test_kinds_without_flash_attention_take_longer_for_longer_samples():
    times = defaultdict(dict)
    with TIMES.open() as file:
        for row in csv.DictReader(file):
            if row["dtype"] == "float16" and row["model"] in MODEL_NAMES:
                key = int(row["seq_length"]), int(row["micro_batch_size"])
                times[row["model"], row["gpu"]][key] = float(row["forward_ms"]) / 1e3
    compared = 0
    for (model, gpu), found in times.items():
        kind = GPU_KINDS[canonical_kind(gpu)]
        pairs = [((512, 2), (1024, 1)), ((512, 4), (1024, 2))]
        for short, long in pairs:
            if short not in found or long not in found:
                continue
            grown_s = found[long] - found[short]
            compared += 1
            if kind.runs_flash_attention:
                assert grown_s < 0.04 * found[short], (model, gpu)
            else:
                # The formula counts each pass once, of kernels that fuse: it is a lower bound.
                shape = MODELS[model]
                new = short[1] * shape.num_attention_heads * 512**2
                elements = shape.num_attention_heads * shape.seq_length**2
                per_element = score_bytes(shape, 2, has_dropout=False)[0] / elements
                assert grown_s > new * per_element / kind.memory_bytes_per_s, (model, gpu)
    assert compared >= 10
