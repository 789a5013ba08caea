"""Weights of mixtures of experts from Hugging Face, through plans and back.

Their logits are compared in `test_weights.py`, with those of all models.
"""

from pathlib import Path

import pytest
import torch

from tests.megatron.launch import MegatronServer
from tests.megatron.plans import LAYOUTS
from tests.megatron.small_models import YARN, made_models
from tests.megatron.test_weights import (
    MOST,
    PLANS,
    Damage,
    assert_refused,
    assert_same_model,
    configured,
    copied,
    other_config,
    other_tensor,
    other_tensors,
    rewrite,
    stacked,
    train_and_export,
)
from tests.unit.adapter_checkpoints import in_each_layer, save
from zorse_megatron.errors import CheckpointError
from zorse_megatron.plan.plan import Plan
from zorse_megatron.weights.convert import export_model, import_model

STARTS = {
    "mixtral": LAYOUTS["1|2"],
    "qwen2-moe": PLANS["unequal groups"],
    "qwen3-moe": PLANS["breadth-first"],
    "glm4-moe": PLANS["unequal groups"],
}


@pytest.fixture(scope="module")
def models() -> Path:
    return made_models()


@pytest.mark.parametrize(("name", "plan"), STARTS.items(), ids=STARTS)
def test_plans_start_from_the_weights(
    name: str, plan: Plan, models: Path, megatron_server: MegatronServer, tmp_path: Path
) -> None:
    """The loss is stock's, and what both save is exported as it was imported."""
    source = models / name
    expected, exported = train_and_export(megatron_server, tmp_path / "stock", source, None)
    assert_same_model(exported, source)
    loss, exported = train_and_export(megatron_server, tmp_path / "plan", source, plan)
    assert loss == pytest.approx(expected, rel=MOST["loss"])
    assert_same_model(exported, source)


@pytest.mark.parametrize("in_layers", [False, True])
def test_checkpoints_of_other_layouts(in_layers: bool, models: Path, tmp_path: Path) -> None:
    """Layers with keys of their own, as with --moe-layer-freq; Transformer Engine's norms."""
    source = models / "qwen3-moe"
    import_model(source, tmp_path / "start")
    tensors = stacked(tmp_path / "start")
    assert tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (4, 12, 96, 64)
    norm = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    tensors["decoder.layers.pre_mlp_layernorm.weight"] = tensors.pop(norm)
    save(tmp_path / "other", in_each_layer(tensors) if in_layers else tensors, None)
    export_model(tmp_path / "other", tmp_path / "out", source=source)
    assert_same_model(tmp_path / "out", source)


EXPERTS = "model.layers.1.mlp.experts"
EXPERT = f"{EXPERTS}.5."


def _without_expert(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if EXPERT in name]:
        del tensors[name]


def _in_one_tensor(tensors: dict[str, torch.Tensor]) -> None:
    each = [tensors.pop(f"{EXPERTS}.{number}.down_proj.weight") for number in range(6)]
    tensors[f"{EXPERTS}.down_proj"] = torch.stack(each)


BAD: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "a missing expert": (
        other_tensors(_without_expert),
        tuple(f"no tensor {EXPERT}{each}_proj.weight" for each in ("gate", "up", "down")),
    ),
    "an expert too many": (
        other_tensor(f"{EXPERTS}.6.up_proj.weight", torch.ones(48, 64)),
        (f"1 tensors beside the model's: {EXPERTS}.6.up_proj.weight",),
    ),
    "another number of experts": (
        other_config(num_experts=5),
        ("model.layers.0.mlp.gate.weight: (6, 64)", "(5, 64)", "12 tensors beside the model's"),
    ),
    "experts in one tensor": (
        other_tensors(_in_one_tensor),
        (f"no tensor {EXPERT}down_proj.weight", f"{EXPERTS}.down_proj", "one by"),
    ),
    "an expert of 8 bits": (
        other_tensor(f"{EXPERT}up_proj.weight", torch.ones(48, 64).to(torch.float8_e4m3fn)),
        (f"tensors in F8_E4M3: {EXPERT}up_proj.weight",),
    ),
    "quantized": (
        other_config(quantization_config={"quant_method": "fp8"}), ("quantization_config", "fp8")
    ),
    "norms over all heads": (
        other_config(model_type="olmoe"),
        ("'olmoe'", "norms of queries and keys over all heads", "mixtral, qwen2_moe"),
    ),
}  # fmt: skip


OF_DEEPSEEK: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "scores that are not divided by their sum": (
        other_config(norm_topk_prob=False), ("norm_topk_prob: found false", "by their sum")
    ),
    "groups by one expert each": (
        other_config(topk_group=4), ("topk_group: found 4; expected 2", "the best 2 experts")
    ),
    "queries without a rank": (
        other_config(q_lora_rank=None), ("q_lora_rank: found no rank", "input of queries")
    ),
    "norms with another epsilon": (
        other_config(rms_norm_eps=1e-5), ("rms_norm_eps: found 1e-05; expected 1e-06",)
    ),
    "one of two factors": (
        other_config(rope_parameters=YARN | {"mscale_all_dim": 0}),
        ("mscale 0.7, mscale_all_dim 0", "both, or neither"),
    ),
    "the other of two factors": (
        other_config(rope_parameters={k: v for k, v in YARN.items() if k != "mscale"}),
        ("mscale None, mscale_all_dim 0.8",),
    ),
    "a factor of attention's own": (
        other_config(rope_parameters=YARN | {"attention_factor": 1.0}), ("attention_factor",)
    ),
    "no number of further layers": (
        other_config(num_nextn_predict_layers=10**9), ("found 1000000000; expected an integer",)
    ),
    "a scaling that is not latent attention's": (
        other_config(rope_parameters=YARN | {"rope_type": "dynamic"}), ("dynamic", "llama3")
    ),
    "a dense layer's router": (
        other_tensor("model.layers.0.mlp.gate.weight", torch.ones(8, 64)),
        ("1 tensors beside the model's: model.layers.0.mlp.gate.weight",),
    ),
    "a layer beyond those of multi-token prediction": (
        lambda folder: (
            other_config(num_nextn_predict_layers=1)(folder),
            other_tensor("model.layers.5.enorm.weight", torch.ones(64))(folder),
        ),
        ("1 tensors beside the model's: model.layers.5.enorm.weight",),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "case"),
    [("qwen2-moe", case) for case in BAD] + [("deepseek-v3", case) for case in OF_DEEPSEEK],
)
def test_bad_models_are_refused_before_anything_is_written(
    name: str, case: str, models: Path, tmp_path: Path
) -> None:
    assert_refused(models / name, (BAD | OF_DEEPSEEK)[case], tmp_path)


@pytest.mark.parametrize("kept", [("e_score_correction_bias", "gate.weight"), ()])
def test_routers_may_be_in_fp32_and_what_predicts_further_tokens_is_left_out(
    kept: tuple[str, ...], models: Path, tmp_path: Path
) -> None:
    """In bf16 with what transformers keeps in fp32, and with all of it in bf16: to the bit."""
    source, whole = tmp_path / "model", tmp_path / "whole"
    for folder in (source, whole):
        copied(models / "deepseek-v3", folder)
        configured(folder, dtype="bfloat16", num_nextn_predict_layers=1)
        rewrite(
            folder,
            lambda tensors: tensors.update(
                {name: each.bfloat16() for name, each in tensors.items() if not name.endswith(kept)}
            ),
        )
    of_prediction = {"model.layers.4.enorm.weight": torch.ones(64).bfloat16()}
    rewrite(source, lambda tensors: tensors.update(of_prediction))
    done = import_model(source, tmp_path / "start")
    assert "multi-token prediction is left out" in done.notes
    export_model(tmp_path / "start", tmp_path / "out", source=source)
    assert_same_model(tmp_path / "out", whole)


FC, LEFT_OUT = ("fc1", "fc2"), "a tensor that would be left out"


def test_checkpoints_of_other_experts_are_refused(models: Path, tmp_path: Path) -> None:
    """By the tensors that differ, each once, before anything is written."""
    import_model(models / "qwen2-moe", tmp_path / "start")
    tensors = stacked(tmp_path / "start")
    tensors["decoder.layers.mlp.router.expert_bias"] = torch.ones(4, 6)
    experts = "decoder.layers.mlp.experts.experts.linear_"
    tensors[f"{experts}fc1.weight"] = tensors[f"{experts}fc1.weight"][:, :5]
    save(tmp_path / "other", tensors, None)
    by_source = {
        "qwen2-moe": [
            (f"{experts}fc1.weight", "5 experts"),
            ("decoder.layers.mlp.router.expert_bias", LEFT_OUT),
        ],
        "llama": [
            *((f"decoder.layers.mlp.linear_{each}.weight", "no such tensor") for each in FC),
            *((f"{experts}{each}.weight", LEFT_OUT) for each in FC),
        ],
    }
    for name, said in by_source.items():
        with pytest.raises(CheckpointError) as caught:
            export_model(tmp_path / "other", tmp_path / "out", source=models / name)
        found = [(each.where.partition(": ")[2], each.found) for each in caught.value.problems]
        assert set(said) <= set(found) and len(found) == len(set(found)), found
        assert not (tmp_path / "out").exists()
        if name == "qwen2-moe":
            expected = "(96, 64) in each of 6 experts in each of 4 layers, by config.json"
            assert caught.value.problems[0].expected == expected
            assert len(found) == len(said)
