import importlib.util
import re
import shlex
from pathlib import Path

from zorse_megatron.flags import model_in_flags as megatron_flags
from zorse_megatron.flags.model_in_flags import dtype_from_flags, shape_from_flags
from zorse_megatron.inputs.model import MODELS, ModelShape

LLAMA = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
--seq-length 2048 --max-position-embeddings 4096 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--vocab-size 32000 --micro-batch-size 1 --lr=3e-4 --bf16"""


def test_llama():
    found = shape_from_flags(shlex.split(LLAMA))
    assert vars(found) == {**vars(MODELS["llama-7b"]), "name": "megatron flags"}
    assert dtype_from_flags(shlex.split(LLAMA)) == "bfloat16"


def test_megatron_defaults():
    found = shape_from_flags(
        shlex.split(
            "--num-layers=4 --hidden-size=64 --num-attention-heads=8 --seq-length=128 "
            "--max-position-embeddings=256 --vocab-size=50257"
        )
    )
    assert found == ModelShape(
        name="megatron flags",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=8,
        num_query_groups=8,
        kv_channels=8,
        vocab_size=50304,
        seq_length=128,
        tied_embeddings=True,
        activation="gelu",
        norm="layernorm",
        position_embedding="learned",
        max_positions=256,
        linear_bias=True,
    )
    assert dtype_from_flags([]) == "float32"
    assert dtype_from_flags(["--fp16"]) == "float16"


def test_other_flags():
    found = shape_from_flags(
        shlex.split(
            "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --kv-channels"
            " 32 --group-query-attention --num-query-groups 2 --use-rotary-position-embeddings "
            "--padded-vocab-size 1000 --squared-relu --disable-bias-linear --add-qkv-bias "
            "--qk-layernorm"
        )
    )
    assert (found.kv_channels, found.num_query_groups, found.vocab_size) == (32, 2, 1000)
    assert (found.activation, found.position_embedding) == ("squared_relu", "rope")
    assert (found.linear_bias, found.qkv_bias, found.qk_norm) == (False, True, True)


def test_the_last_of_equal_flags_counts():
    assert shape_from_flags([*shlex.split(LLAMA), "--num-layers", "40"]).num_layers == 40


def test_vocabulary_is_padded_for_tensor_parallel():
    words = shlex.split(LLAMA.replace("32000", "50257"))
    assert shape_from_flags(words, tensor_parallel=4).vocab_size == 50688
    odd = [*words, "--make-vocab-size-divisible-by", "1"]
    assert shape_from_flags(odd).vocab_size == 50257


def test_flags_exist_in_megatron():
    """Spelled out in its sources, or made from the name of a field."""
    roots = importlib.util.find_spec("megatron").submodule_search_locations
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for root in roots
        for folder in ("training", "core/transformer")
        for path in (Path(root) / folder).rglob("*.py")
    )
    text = Path(megatron_flags.__file__).read_text(encoding="utf-8")
    flags = set(re.findall(r'"(--[a-z-]+)"', text)) - {"--"}
    assert len(flags) > 20
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        assert flag in sources or re.search(rf"\b{name}\b", sources), flag
