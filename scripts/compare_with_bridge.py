"""Compare `zorse import-hf` and `export-hf` with NVIDIA's Megatron-Bridge: names and values.

    python scripts/compare_with_bridge.py

Converts a small random model of each type in both directions, in one process that needs no GPU.
Equal: our checkpoint has what Megatron's model asks for, and nothing else, and fills it with the
same bits as Bridge does; both export the Hugging Face model to the bit. Exits with 1 if one is not.
Layers are Megatron's own, with norms where Transformer Engine's have them; experts are one by one.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from safetensors import torch as files
from torch import distributed, nn

from tests.megatron.small_models import MODELS, make_models
from zorse_megatron.adapter import cpu_mode
from zorse_megatron.weights.convert import export_model, import_model


def layers(config: Any) -> Any:
    """Return Megatron's own layers with norms in linear layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp

    class LayerNormColumnParallelLinear(ColumnParallelLinear):
        """Bridge knows Transformer Engine's layer by this name."""

        def __init__(self, input_size: int, *arguments: Any, **more: Any) -> None:
            super().__init__(input_size, *arguments, **more)
            self.layer_norm_weight = nn.Parameter(self.weight.new_empty(input_size))

    experts, norm = config.num_moe_experts, config.normalization
    spec = get_gpt_layer_local_spec(experts, qk_layernorm=config.qk_layernorm, normalization=norm)
    parts = spec.submodules
    parts.input_layernorm = IdentityOp
    parts.self_attention.submodules.linear_qkv = LayerNormColumnParallelLinear
    if experts is None:
        parts.pre_mlp_layernorm = IdentityOp
        parts.mlp.keywords["submodules"].linear_fc1 = LayerNormColumnParallelLinear
    return spec


def built(bridge: Any) -> Any:
    """Build Megatron's model as Bridge configures it."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider = bridge.to_megatron_provider(load_weights=False)
    provider.transformer_layer_spec, provider.use_cpu_initialization = layers, True
    off = "apply_rope_fusion gradient_accumulation_fusion moe_permute_fusion persist_layer_norm"
    vars(provider).update(dict.fromkeys(off.split(), False))
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provider.finalize()
    return provider.provide(pre_process=True, post_process=True)


def differences(bridge: Any, source: Path, folder: Path) -> set[str]:
    """Convert one model in all four ways, and say what is not equal. Raises ValueError."""
    from megatron.core.dist_checkpointing import load, save

    filled, loaded = built(bridge), built(bridge)
    if None in bridge.get_conversion_tasks([filled]):
        raise ValueError("Bridge has no names for some parameters")
    bridge.load_hf_weights([filled])
    import_model(source, folder / "ours")
    asked = loaded.sharded_state_dict()
    state, *others = load(asked, f"{folder}/ours/release", strict="return_all")
    loaded.load_state_dict(state, strict=False)
    (folder / "theirs").mkdir()
    save(filled.sharded_state_dict(), str(folder / "theirs"))
    export_model(folder / "theirs", folder / "out", source=source)
    # States of modules say nothing: layers of other kinds have other ones.
    keys = {key for key in set().union(*others) if "_extra_state" not in key}
    in_megatron = bits(loaded.named_parameters()) ^ bits(filled.named_parameters())
    by_bridge = bits(bridge.export_hf_weights([loaded])) ^ in_files(source)
    by_us = in_files(folder / "out") ^ in_files(source)
    return keys | {name for name, _ in in_megatron | by_bridge | by_us}


def bits(tensors: Any) -> set[tuple[str, bytes]]:
    """Return all that there is of tensors: names, and types, shapes and values."""
    return {(name, files.save({"": each.detach()})) for name, each in tensors}


def in_files(folder: Path) -> set[tuple[str, bytes]]:
    """Return the same of a Hugging Face model."""
    loaded = map(files.load_file, folder.glob("*.safetensors"))
    return set().union(*(bits(each.items()) for each in loaded))


def main() -> int:
    """Compare all, and print a line for each."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    if cpu_mode.needed():
        cpu_mode.enable()  # before Megatron is imported
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state

    differ = False
    with tempfile.TemporaryDirectory() as name:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        make_models(folder := Path(name))
        for kind in MODELS:
            try:
                bridge = AutoBridge.from_hf_pretrained(str(folder / kind))
                found = sorted(differences(bridge, folder / kind, folder / f"of {kind}"))
                differ |= bool(found)
                print(f"{kind}: {'differs in ' * bool(found)}{', '.join(found) or 'equal'}")
            except ValueError as error:
                print(f"{kind}: not compared: {' '.join(str(error).split())[:63]}")
    return int(differ)


if __name__ == "__main__":
    raise SystemExit(main())
