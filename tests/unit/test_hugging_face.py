"""A config.json of Hugging Face gives the shape of its model, or is refused by its key."""

import json

import pytest

from tests.unit.cli_samples import runner_in
from zorse_megatron.errors import ModelError
from zorse_megatron.flags.shape import shape_from_flags
from zorse_megatron.schema.model.hugging_face import parse_config
from zorse_megatron.schema.model.model_presets import MODELS

# As published, without what the shape does not depend on.
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
LLAMA_3_2_1B = LLAMA_3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "head_dim": 64,
    "num_hidden_layers": 16,
    "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 32.0, "rope_type": "llama3"},
    "tie_word_embeddings": True,
}
QWEN_2_5_7B = LLAMA_3_8B | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
QWEN_3_0_6B = LLAMA_3_8B | {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
MISTRAL_NEMO = LLAMA_3_8B | {
    "model_type": "mistral",
    "hidden_size": 5120,
    "head_dim": 128,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
}
GEMMA_2B = {
    "model_type": "gemma",
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "vocab_size": 256000,
}
# Parameters as their model cards or safetensors indices count them; rows that pad a vocabulary to
# 128 are beside them (none here but for Qwen3's, whose 151,936 are a multiple already).
COUNTS = {
    "Llama 3 8B": (LLAMA_3_8B, 8_030_261_248),
    "Llama 3.2 1B": (LLAMA_3_2_1B, 1_235_814_400),
    "Qwen2.5 7B": (QWEN_2_5_7B, 7_615_616_512),
    "Qwen3 0.6B": (QWEN_3_0_6B, 596_049_920),
    "Mistral Nemo": (MISTRAL_NEMO, 12_247_782_400),
    "Gemma 2B": (GEMMA_2B, 2_506_172_416),
}


def parsed(config):
    return parse_config(json.dumps(config).encode())


def problems(config):
    with pytest.raises(ModelError) as caught:
        parsed(config)
    return caught.value.problems


@pytest.mark.parametrize(("config", "count"), COUNTS.values(), ids=COUNTS)
def test_parameters_are_those_of_the_published_model(config, count):
    assert parsed(config).shape.num_parameters == count


def test_llama_is_the_well_known_one():
    shape, known = parsed(LLAMA_3_8B).shape, MODELS["llama3-8b"]
    assert shape.fingerprint() == known.fingerprint()
    assert shape.num_parameters == known.num_parameters


@pytest.mark.parametrize("name", [name for name in COUNTS if name != "Gemma 2B"])
def test_megatrons_flags_give_the_same_shape(name):
    model = parsed(COUNTS[name][0])
    length = str(model.shape.seq_length)
    again = shape_from_flags([*model.flags, "--seq-length", length])
    assert vars(again) | {"name": ""} == vars(model.shape) | {"name": ""}


def test_what_flags_cannot_build_is_said():
    gemma = parsed(GEMMA_2B)
    assert gemma.shape.activation == "geglu" and gemma.shape.tied_embeddings
    assert not gemma.flags
    assert "cannot build" in gemma.notes[0]
    windowed = parsed(MISTRAL_NEMO | {"sliding_window": 4096})
    assert "4096" in windowed.notes[0]
    assert not parsed(QWEN_2_5_7B).notes
    yarn = parsed(QWEN_2_5_7B | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert "yarn" in yarn.notes[0]
    assert "--rope-scaling-factor" in parsed(LLAMA_3_2_1B).flags


@pytest.mark.parametrize(
    ("change", "key", "found"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "model_type", "experts"),
        ({"model_type": "gemma2"}, "model_type", "capped logits"),
        ({"model_type": "qwen3_moe"}, "model_type", "experts"),
        ({"num_local_experts": 8}, "model_type", "num_local_experts"),
        ({"model_type": "bert"}, "model_type", "'bert'"),
        ({"model_type": None}, "model_type", "no such key"),
        ({"model_type": ["llama"]}, "model_type", "['llama']"),
        ({"attention_bias": True}, "attention_bias", "true"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
        ({"hidden_size": "4096"}, "hidden_size", "'4096'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "1000000000"),
        ({"vocab_size": None}, "vocab_size", "no such key"),
        ({"num_key_value_heads": 7}, "num_query_groups", "7 with 32"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "'no'"),
        ({"rope_theta": "big"}, "rope_theta", "'big'"),
    ],
)
def test_others_are_refused_by_key(change, key, found):
    (problem,) = problems(LLAMA_3_8B | change)
    assert problem.where.startswith("config.json: ") and key in problem.where
    assert found in problem.found


def test_all_problems_at_once():
    assert len(problems({"model_type": "llama"})) == 6
    assert len(problems([1])) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_the_commands_take_it(tmp_path, monkeypatch):
    run = runner_in(tmp_path, monkeypatch)
    small = LLAMA_3_8B | {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2816}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(small))
    plan = ("plan", "--cluster", "cluster.yaml", "--model", "tiny", "--out", "p.json")
    lacking = run(*plan).output
    assert "--global-batch-size: found no" in lacking and "--seq-length: found no" in lacking
    made = run(*plan, "--global-batch-size", "8", "--seq-length", "256", "--max-tp", "1")
    assert made.exit_code == 0, made.output
    assert "note: Megatron's flags for tiny/config.json: --num-layers 4 --hidden-size 1024" in (
        made.stdout
    )
    # The plan says how long samples are.
    given = ("--cluster", "cluster.yaml", "--model", "tiny/config.json")
    assert "8 samples of 256 tokens" in run("simulate", "p.json", *given).stdout
