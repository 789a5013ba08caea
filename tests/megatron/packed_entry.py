"""The recording entry, with conversations, and under stock with attention of packed sequences.

Stock's own attention without Transformer Engine refuses packed sequences. Without a plan it gets
the mask that packing means: a token sees itself and what stands before it in its own sequence.
Plans have their own (`zorse_megatron.adapter.samples`), which makes no such mask.
"""

import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode


def attending_within_sequences(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DotProductAttention.forward`; packed [tokens, heads, dim] is a batch of one."""

    def forward(
        self: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> Any:
        import torch

        packing = options.pop("packed_seq_params", None)
        if packing is None:
            return stock(self, query, key, value, attention_mask, **options)
        bounds = packing.cu_seqlens_q.long()
        lengths = bounds[1:] - bounds[:-1]
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        apart = sequence[:, None] != sequence[None, :]
        later = torch.ones_like(apart).triu(1).bool()
        mask = (apart | later)[None, None]
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return stock(self, query, key, value, mask, **options)

    return forward


def read_json_lines(_kind: str, *, data_files: str, split: str) -> list[dict[str, Any]]:
    """What `datasets.load_dataset("json", ...)` gives, as far as stock's SFT data set needs it."""
    assert split == "all"
    return [json.loads(line) for line in Path(data_files).read_text().splitlines()]


def main() -> None:
    if cpu_mode.needed():
        cpu_mode.enable()
    if importlib.util.find_spec("datasets") is None:
        stand_in = types.ModuleType("datasets")
        stand_in.load_dataset = read_json_lines  # type: ignore[attr-defined]
        sys.modules["datasets"] = stand_in
    if "--zorse-plan" not in sys.argv:
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        DotProductAttention.forward = attending_within_sequences(DotProductAttention.forward)
    record()


if __name__ == "__main__":
    main()
