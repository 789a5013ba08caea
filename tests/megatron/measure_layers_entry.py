"""Measures the layers of its flags, and the same layers in other ways; prints what it found.

Before the first word that starts with `--` comes the micro-batch size.
"""

import json
import sys
import time
from typing import Any

import torch

from tests.megatron.recording_entry import let_values_be_narrower
from zorse_megatron.adapter.measuring_run import run_until_built
from zorse_megatron.inputs.lora import LORA_FLAG, parse_lora

ROUNDS = 6


def compare(model: Any, size: int) -> dict[str, Any]:
    from zorse_megatron.adapter.model.model_passes import ModelPasses
    from zorse_megatron.measure.on_ranks.layer_timing import measured_pass

    passes = ModelPasses(model)
    repeats, wholes_s = [], []
    for _ in range(ROUNDS):  # in turns, so that both meet the machine alike
        repeats.append(
            {part: measured_pass(passes, part, size) for part in ("embedding", "layer", "head")}
        )
        wholes_s.append(whole_model_s(passes, size))
    found = repeats[0]
    return {
        # The fastest, as of the whole model.
        "measured_s": {
            part: [
                min(repeat[part].forward_s for repeat in repeats),
                min(repeat[part].backward_s for repeat in repeats),
            ]
            for part in found
        },
        "weight_gradients_s": {
            part: None
            if repeats[0][part].weight_gradients_s is None
            else min(repeat[part].weight_gradients_s for repeat in repeats)
            for part in found
        },
        "parameters": {p: f.parameters for p, f in found.items()},
        "saved_bytes": found["layer"].saved_bytes,
        "attention": found["layer"].attention,
        "peak_bytes": {p: f.peak_bytes for p, f in found.items()},
        **counted(passes, size),
        "whole_s": min(wholes_s),
    }


def counted(passes: Any, size: int) -> dict[str, int]:
    """What autograd keeps of a layer."""
    from zorse_megatron.adapter.memory import SavedActivations

    parameters = {p.untyped_storage().data_ptr() for p in passes.model.parameters()}
    kept = SavedActivations(parameters.__contains__, None)
    one = passes.make("layer", size)
    with kept.counting():
        output = one.forward()
    counted_bytes = kept.num_bytes
    del output
    return {"counted_bytes": counted_bytes, "input_bytes": one.given[0].nbytes}


def whole_model_s(passes: Any, size: int) -> float:
    """Fastest of several forwards and backwards of the model as training runs it."""
    tokens = torch.randint(passes.args.padded_vocab_size, (size, passes.args.seq_length))
    positions = torch.arange(passes.args.seq_length).expand_as(tokens)
    times = []
    for _ in range(3):
        start_s = time.perf_counter()
        passes.model(tokens, positions, None, labels=tokens).sum().backward()
        times.append(time.perf_counter() - start_s)
    return min(times)


if __name__ == "__main__":
    # CPU seconds: on a machine that others use, short passes run undisturbed more often than long.
    time.perf_counter = time.process_time
    size = int(sys.argv[1])
    flags, adapters = sys.argv[2:], None
    if LORA_FLAG in flags:
        at = flags.index(LORA_FLAG)
        adapters = parse_lora(flags[at + 1], [])
        del flags[at : at + 2]
    if "--multi-latent-attention" in flags:
        let_values_be_narrower()

    def use(model: Any, _optimizer: Any) -> None:
        if adapters is None:
            found = compare(model, size)
        else:
            from zorse_megatron.adapter.model.lora import add_adapters
            from zorse_megatron.adapter.model.model_passes import ModelPasses

            add_adapters(model.module, adapters)
            found = counted(ModelPasses(model), size)
        print("FOUND " + json.dumps(found))

    run_until_built(None, flags, use)
