"""A small good profile, and ways to spoil it."""

import copy
from typing import Any

GOOD: dict[str, Any] = {
    "schema_version": 1,
    "sources": [{"name": "lab", "kind": "measured", "origin": "by hand"}],
    "models": [
        {
            "name": "tiny",
            "num_layers": 4,
            "hidden_size": 64,
            "ffn_hidden_size": 256,
            "num_attention_heads": 4,
            "num_query_groups": 4,
            "kv_channels": 16,
            "vocab_size": 128,
            "seq_length": 32,
        }
    ],
    "times": [
        {
            "part": "layer",
            "model": "tiny",
            "gpu_kind": "T4",
            "seq_length": 32,
            "dtype": "float16",
            "source": "lab",
            "micro_batch_sizes": [1, 2, 4],
            "forward_s": [0.001, 0.002, 0.004],
            "backward_s": [0.003, 0.005, 0.009],
        }
    ],
    "updates": [
        {
            "gpu_kind": "T4",
            "dtype": "float16",
            "num_parameters": 1000000,
            "update_s": 0.001,
            "source": "lab",
        }
    ],
    "memory": [
        {
            "part": "layer",
            "model": "tiny",
            "seq_length": 32,
            "source": "lab",
            "parameters": 50000,
            "activation_elements": 30000,
            "output_elements": 2048,
        }
    ],
    "links": [
        {
            "link": "intra-node",
            "gpu_kind": "T4",
            "gpus_sharing": 2,
            "quadratic": -0.1,
            "linear": 1.0,
            "constant": 3.0,
            "max_bytes_per_s": 6e9,
            "source": "lab",
        }
    ],
}


def good() -> dict[str, Any]:
    """Return a fresh copy."""
    return copy.deepcopy(GOOD)


def spoil(path: list[Any], value: Any) -> dict[str, Any]:
    """Return the profile with one value changed."""
    profile = good()
    owner: Any = profile
    for item in path[:-1]:
        owner = owner[item]
    owner[path[-1]] = value
    return profile
