"""A config.json of Hugging Face gives the shape of its model, or is refused by its key."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.unit.cli_samples import runner_in
from zorse_megatron.cli.workload import named_model
from zorse_megatron.errors import ModelError
from zorse_megatron.files.yaml_text import read_table
from zorse_megatron.flags.model_in_flags import shape_from_flags
from zorse_megatron.inputs.hugging_face import FAMILIES, parse_config
from zorse_megatron.inputs.model import MODELS

# As published, without what the shape does not depend on.
_TABLE = read_table(__package__, "hugging_face_configs.yaml")
COUNTS = {name: (entry["config"], entry["parameters"]) for name, entry in _TABLE.items()}
CONFIGS = {name: config for name, (config, _) in COUNTS.items()}
LLAMA_3_8B = CONFIGS["Llama 3 8B"]
LLAMA_3_2_1B = CONFIGS["Llama 3.2 1B"]
QWEN_2_5_7B = CONFIGS["Qwen2.5 7B"]
MISTRAL_NEMO = CONFIGS["Mistral Nemo"]
GEMMA_2B = CONFIGS["Gemma 2B"]
PHI_2 = CONFIGS["Phi-2"]
PHI_3_MINI = CONFIGS["Phi-3 mini"]
OLMOE = CONFIGS["OLMoE 1B-7B"]
QWEN_3_30B_A3B = CONFIGS["Qwen3 30B-A3B"]
QWEN_1_5_MOE = CONFIGS["Qwen1.5-MoE A2.7B"]
MIXTRAL = CONFIGS["Mixtral 8x7B"]
DEEPSEEK_V2_LITE, DEEPSEEK_V3 = CONFIGS["DeepSeek-V2-Lite"], CONFIGS["DeepSeek-V3"]
BUILT_BY_MEGATRON = [
    *("Llama 3 8B", "Llama 3.2 1B", "Qwen2.5 7B", "Qwen3 0.6B", "Mistral Nemo"),
    *("GPT-2", "Phi-3 mini", "StarCoder2 3B"),
    *("Qwen3 30B-A3B", "Qwen1.5-MoE A2.7B", "Mixtral 8x7B", "DeepSeek-V2-Lite", "DeepSeek-V3"),
]


def parsed(config):
    return parse_config(json.dumps(config).encode())


def unpadded(config):
    """Parameters without the rows that pad a vocabulary to a multiple of 128."""
    shape = parsed(config).shape
    return dataclasses.replace(shape, vocab_size=config["vocab_size"]).num_parameters


@pytest.mark.parametrize(("config", "count"), COUNTS.values(), ids=COUNTS)
def test_parameters_are_those_of_the_published_model(config, count):
    assert unpadded(config) == count


def test_llama_is_the_well_known_one():
    shape, known = parsed(LLAMA_3_8B).shape, MODELS["llama3-8b"]
    assert shape.fingerprint() == known.fingerprint()
    assert shape.num_parameters == known.num_parameters


@pytest.mark.parametrize("name", BUILT_BY_MEGATRON)
def test_megatrons_flags_give_the_same_shape(name):
    model = parsed(COUNTS[name][0])
    length = str(model.shape.seq_length)
    again = shape_from_flags([*model.flags, "--seq-length", length])
    assert vars(again) | {"name": ""} == vars(model.shape) | {"name": ""}


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("Gemma 2B", ["GELU with a gate"]),
        ("Gemma 2 2B", ["norms after attention and feed-forward", "capped logits"]),
        ("Phi-2", ["attention and feed-forward side by side", "a bias of the output layer"]),
        ("Falcon 7B", ["attention and feed-forward side by side"]),
        ("BLOOM 560M", ["ALiBi"]),
        ("OPT 125M", ["ReLU"]),
        ("Pythia 160M", ["attention and feed-forward side by side"]),
    ],
)
def test_what_training_refuses_is_one_line(name, lacks):
    model = parsed(COUNTS[name][0])
    assert not model.flags
    (line,) = [note for note in model.notes if note.startswith("planning only: training refuses ")]
    assert all(each in line for each in lacks)


def test_scores_are_normalized_as_transformers_does_it():
    """Over the chosen experts by default; over all of them, so that they add up to less than 1."""
    assert "--moe-router-pre-softmax" not in parsed(QWEN_3_30B_A3B).flags
    assert "--moe-router-pre-softmax" not in parsed(MIXTRAL).flags
    assert "--moe-router-pre-softmax" in parsed(QWEN_1_5_MOE).flags
    assert "--moe-router-pre-softmax" in parsed(QWEN_3_30B_A3B | {"norm_topk_prob": False}).flags
    flags = parsed(MIXTRAL).flags
    assert flags[flags.index("--moe-aux-loss-coeff") + 1] == "0.02"
    assert "--moe-aux-loss-coeff" not in parsed(QWEN_1_5_MOE).flags
    jitter = parsed(MIXTRAL | {"router_jitter_noise": 0.1})
    assert not jitter.flags and "jitter" in jitter.notes[0]
    assert "over all heads" in parsed(OLMOE).notes[0]


def test_deepseek_is_built_as_its_authors_do_it():
    """As in NVIDIA's recipes of these models, but for what is said: multi-token prediction, and a
    norm that Megatron has where queries have no rank (`QKNormConfigResolver`)."""
    lite, large = (parsed(each) for each in (DEEPSEEK_V2_LITE, DEEPSEEK_V3))
    known = dataclasses.replace(MODELS["deepseek-v2-lite"], name="", seq_length=163840)
    assert dataclasses.replace(lite.shape, name="") == known
    yarn = "--rope-type yarn --rotary-scaling-factor 40 --mscale 0.707 --mscale-all-dim 0.707"
    assert yarn in " ".join(lite.flags)
    assert [note for note in lite.notes if "normalizes the input of queries" not in note] == []
    assert len(lite.notes) == 1
    assert "--moe-router-pre-softmax" in lite.flags and "--qk-layernorm" in lite.flags
    text = " ".join(large.flags)
    for words in (
        "--moe-layer-freq [0]*3+[1]*58 --multi-latent-attention",
        "--kv-lora-rank 512 --q-lora-rank 1536",
        "--moe-router-score-function sigmoid",
        "--moe-router-topk-scaling-factor 2.5",
        "--moe-router-num-groups 8 --moe-router-group-topk 4",
        "--moe-router-enable-expert-bias",
    ):
        for word in words.split(" --"):
            assert f"--{word.removeprefix('--')}" in text
    assert large.notes == ("multi-token prediction is left out",)
    rope = parsed(DEEPSEEK_V2_LITE | {"rope_scaling": None}).flags
    assert rope[rope.index("--rope-type") + 1] == "rope"
    other = DEEPSEEK_V2_LITE["rope_scaling"] | {"beta_fast": 64}
    assert "yarn" in parsed(DEEPSEEK_V2_LITE | {"rope_scaling": other}).notes[0]


@pytest.mark.parametrize(
    ("config", "where", "found"),
    [
        (QWEN_3_30B_A3B | {"decoder_sparse_step": 0}, "decoder_sparse_step", "0"),
        (QWEN_3_30B_A3B | {"mlp_only_layers": ["a"]}, "mlp_only_layers", "['a']"),
        (QWEN_3_30B_A3B | {"num_experts_per_tok": 200}, "--moe-router-topk", "200 of 128"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts", "0"),
        (MIXTRAL | {"model_type": "gpt_oss"}, "model_type", "attention sinks"),
        (MIXTRAL | {"model_type": "deepseek_v2"}, "kv_lora_rank", "no such key"),
        (DEEPSEEK_V3 | {"first_k_dense_replace": -1}, "first_k_dense_replace", "-1"),
        (DEEPSEEK_V3 | {"routed_scaling_factor": "x"}, "routed_scaling_factor", "'x'"),
        (LLAMA_3_8B | {"num_local_experts": 8}, "model_type", "experts (num_local_experts)"),
    ],
)
def test_experts_that_are_refused(config, where, found):
    with pytest.raises(ModelError) as refused:
        parsed(config)
    assert any(where in each.where and found in each.found for each in refused.value.problems)


def test_a_model_whose_layers_are_all_dense_has_no_experts():
    model = parsed(DEEPSEEK_V3 | {"first_k_dense_replace": 61})
    assert model.shape == dataclasses.replace(parsed(DEEPSEEK_V3).shape.dense, name="model")
    assert shape_from_flags([*model.flags, "--seq-length", "4096"]).experts is None


def test_other_layers_are_counted_on_every_rank_of_a_tp_group():
    """By hand, of Phi-2: matrices and the biases of their columns are split, one norm is whole."""
    shape = parsed(PHI_2).shape
    split = 2560 * (4 * 2560 + 2 * 10240) + 3 * 2560 + 10240
    assert shape.layer_parameters(2) == split // 2 + 2 * 2560 + 2 * 2560
    assert shape.head_parameters(2) == 2 * 2560 + 51200 * 2560 // 2 + 51200


def test_rotated_shares_of_heads_are_a_flag():
    flags = parsed(PHI_3_MINI | {"partial_rotary_factor": 0.75}).flags
    assert flags[flags.index("--rotary-percent") + 1] == "0.75"
    assert "--rotary-percent" not in parsed(PHI_3_MINI).flags


def test_what_flags_cannot_say_is_said():
    gemma = parsed(GEMMA_2B)
    assert gemma.shape.activation == "geglu" and gemma.shape.tied_embeddings
    windowed = parsed(MISTRAL_NEMO | {"sliding_window": 4096})
    assert "4096" in windowed.notes[0]
    assert not parsed(QWEN_2_5_7B).notes
    yarn = parsed(QWEN_2_5_7B | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    assert "yarn" in yarn.notes[0]
    chunked = parsed(QWEN_2_5_7B | {"dual_chunk_attention_config": {"chunk_size": 262144}})
    assert "dual_chunk_attention_config" in chunked.notes[0]
    assert "--rope-scaling-factor" in parsed(LLAMA_3_2_1B).flags


@pytest.mark.parametrize("name", ["phi-2/config.json", "phi-2", "phi2.json"])
def test_it_is_known_by_its_keys_or_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phi-2").mkdir()
    for path in ("phi-2/config.json", "phi2.json"):
        (tmp_path / path).write_text(json.dumps(PHI_2))
    workload = named_model(name)
    assert workload.model.num_parameters == 2_779_683_840 and workload.lacks_seq_length


def test_the_document_lists_each_type_where_it_belongs():
    document = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| Planned; a note .*\|$", document, re.MULTILINE)
    trained, planned = (re.findall(r"`(\w+)`", row.split("|")[2]) for row in rows)
    assert {*trained, *planned} == set(FAMILIES)
    of_type = {config["model_type"]: parsed(config) for config, _ in COUNTS.values()}
    for kind, model in of_type.items():
        assert bool(model.flags) == (kind in trained), kind


# Of each family its defaults, and what its keys change; sizes that keep the test small.
VARIANTS = [
    *((family, {}) for family in FAMILIES if family != "nemotron"),
    ("nemotron", {"head_dim": 64}),
    ("llama", {"attention_bias": True}),
    ("glm4_moe", {"attention_bias": True, "head_dim": 24, "first_k_dense_replace": 0}),
    ("glm4_moe", {"attention_bias": True, "head_dim": 24, "use_qk_norm": True}),
    ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 1}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"hidden_act": "gelu", "num_key_value_heads": 2, "head_dim": 24}),
    ("qwen2_moe", {"qkv_bias": False}),
    ("gpt2", {"n_inner": 96, "tie_word_embeddings": False}),
    ("gpt_bigcode", {"multi_query": False}),
    ("starcoder2", {"use_bias": False}),
    ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4, "bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"parallel_attn": False, "multi_query": False, "alibi": True, "bias": True}),
]
SMALL = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("hidden_size", "n_embd"), 128),
    **dict.fromkeys(("num_attention_heads", "n_head"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 320),
    **{"vocab_size": 512, "word_embed_proj_dim": 128, "rotary_dim": 8, "pad_token_id": 0},
    **{"num_key_value_heads": 8, "max_position_embeddings": 256, "n_positions": 256},
}


@pytest.mark.slow  # transformers takes seconds to import
def test_parameters_are_those_that_transformers_builds():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    for family, changes in VARIANTS:
        known = transformers.AutoConfig.for_model(family).to_dict()
        sizes = {key: size for key, size in SMALL.items() if key in known}
        config = transformers.AutoConfig.for_model(family, **(sizes | changes))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        whole = json.loads(config.to_json_string(use_diff=False))
        # Files have the sizes, and of the rest what differs from the class's defaults.
        short = json.loads(config.to_json_string()) | {key: whole[key] for key in sizes}
        short |= {"model_type": family}
        for each in (whole, short):
            assert unpadded(each) == model.num_parameters(), (family, changes)


@pytest.mark.slow
@pytest.mark.usefixtures("little_effort")
def test_the_commands_take_it(tmp_path, monkeypatch):
    run = runner_in(tmp_path, monkeypatch)
    small = LLAMA_3_8B | {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2816}
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(small))
    plan = ("plan", "--use-all", "--cluster", "cluster.yaml", "--model", "tiny", "--out", "p.json")
    lacking = run(*plan).output
    assert "--global-batch-size: found no" in lacking and "--seq-length: found no" in lacking
    made = run(*plan, "--global-batch-size", "8", "--seq-length", "256", "--max-tp", "1")
    assert made.exit_code == 0, made.output
    (following,) = re.findall(r"^next[^:]*: ((?:.*\\\n)*.*)", made.stdout, re.MULTILINE)
    launch = shlex.split(following.replace("\\\n", ""))
    assert launch[:3] == ["zorse", "launch", "p.json"]
    assert {"--rotary-base", "--norm-epsilon", "--seq-length"} <= set(launch)
    assert run(*launch[1:]).exit_code == 0
    # The plan says how long samples are.
    given = ("--cluster", "cluster.yaml", "--model", "tiny/config.json")
    assert "8 samples of 256 tokens" in run("explain", "p.json", *given).stdout
