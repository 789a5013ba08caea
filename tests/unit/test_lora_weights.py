"""Adapters of a checkpoint are those that peft loads, alone or merged; bases have a digest."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.megatron.small_models import made_models
from tests.unit.adapter_checkpoints import ALL, LAYERS, Made, in_each_layer, save
from zorse_megatron.cli.main import app
from zorse_megatron.errors import CheckpointError, OutputError
from zorse_megatron.weights import convert
from zorse_megatron.weights.convert import export_adapter, export_model, import_model
from zorse_megatron.weights.opened import _blocks, base_digest, iteration_folder
from zorse_megatron.weights.torch_dist import Archive

pytestmark = pytest.mark.slow  # transformers and peft take seconds to import
MOST = 1e-5
"""Of logits up to 3.4; seen: 4e-6."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with Hugging Face models, and beside each the checkpoint that it makes."""
    made = made_models()
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "qwen2"):
        (folder / name).symlink_to(made / name)
        (folder / f"{name}.pt").symlink_to(made / f"{name}.pt")
        import_model(made / name, folder / f"{name}-base")
    return folder


def digest_of(folder):
    return base_digest(iteration_folder(folder))


def merged(checkpoint, folder, models, name="llama", *, dtype=None, base=None):
    return export_model(
        checkpoint,
        folder,
        source=models / name,
        dtype=dtype,
        merge=base or models / f"{name}-base",
    )


CASES = {
    "llama": Made(targets=("q", "v", "up"), rank=3, alpha=7.5),
    "qwen2": Made(),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_of_adapters_in_peft_are_those_of_the_merged_model(name, models, tmp_path):
    """Of a llama with some targets and keys per layer, and a qwen2 with biases and a tied table."""
    import peft
    import transformers

    made = CASES[name]
    made.arguments["zorse_lora"]["base"] = digest_of(models / f"{name}-base")
    checkpoint = made.write(tmp_path / "saved", in_layers=name == "llama")
    export_adapter(checkpoint, tmp_path / "adapter", source=models / name)
    merged(checkpoint, tmp_path / "merged", models, name)
    tokens, original = torch.load(models / f"{name}.pt")
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load(models / name, attn_implementation="eager")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    whole = load(tmp_path / "merged", attn_implementation="eager")
    with torch.no_grad():
        adapted, found = loaded(tokens).logits, whole(tokens).logits
    assert (adapted - original).abs().max() > 0.05
    torch.testing.assert_close(found, adapted, rtol=0, atol=MOST)
    # Every tensor has found its place: peft says nothing of those that it does not find.
    config = loaded.peft_config["default"]
    assert (config.r, config.lora_alpha) == (made.rank, made.alpha)
    assert config.base_model_name_or_path == str(models / name)
    state = {key: each for key, each in loaded.state_dict().items() if ".lora_" in key}
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {key.replace(".default", "") for key in state} == set(saved)
    assert len(saved) == 2 * LAYERS * len(made.targets)
    for key, each in state.items():
        assert torch.equal(each, saved[key.replace(".default", "")]), key


def test_merged_matrices_are_those_by_hand(models, tmp_path):
    """W + (alpha / rank) B A in 64 bits, each target its own; the rest to the bit."""
    made = Made(base=digest_of(models / "qwen2-base"))
    merged(made.write(tmp_path / "saved"), tmp_path / "out", models, "qwen2")
    found = load_file(tmp_path / "out/model.safetensors")
    weights = {}
    for path in (models / "qwen2").glob("*.safetensors"):
        weights |= load_file(path)
    modules = [f"self_attn.{each}_proj" for each in "qkvo"]
    modules += [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
    matrices = dict(zip(ALL, modules, strict=True))
    for target, module in matrices.items():
        for layer in range(LAYERS):
            name = f"model.layers.{layer}.{module}.weight"
            a, b = (each.double() for each in made.of_layer(layer, target))
            change = torch.einsum("or,ri->oi", b, a) * made.alpha / made.rank
            expected = weights.pop(name).double() + change
            torch.testing.assert_close(found.pop(name).double(), expected, rtol=0, atol=1e-6)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in found)


def test_types_and_fp16(models, tmp_path):
    """Adapters keep the type that they have; sums are made in fp32, and fp16 may not hold them."""
    made = Made(base=digest_of(models / "llama-base"))
    made.tensors = {key: each.bfloat16() for key, each in made.tensors.items()}
    checkpoint = made.write(tmp_path / "saved")
    for dtype, kind in ((None, torch.bfloat16), ("fp32", torch.float32)):
        export_adapter(checkpoint, tmp_path / str(dtype), source=models / "llama", dtype=dtype)
        tensors = load_file(tmp_path / str(dtype) / "adapter_model.safetensors").values()
        assert {each.dtype for each in tensors} == {kind}
    name = "model.layers.1.mlp.up_proj.weight"
    weight = {}
    for path in (models / "llama").glob("*.safetensors"):
        weight |= load_file(path)
    a, b = (each.float() for each in made.of_layer(1, "up"))
    merged(checkpoint, tmp_path / "fp32-sum", models, dtype="bf16")
    found = load_file(tmp_path / "fp32-sum/model.safetensors")[name]
    assert torch.equal(found, (weight[name] + (b @ a) * 2.5).bfloat16())
    made.tensors["decoder.layers.mlp.lora.up.b"][1] *= 1e6
    made.write(tmp_path / "large")
    with pytest.raises(OutputError, match="65504"):
        merged(tmp_path / "large", tmp_path / "fp16", models, dtype="fp16")
    assert not (tmp_path / "fp16").exists()


def test_until_its_end_peft_refuses_an_export(models, tmp_path, monkeypatch):
    """And nothing stays of one that fails."""
    import peft

    seen = []

    def stop(path, *_):
        seen.append((path.parent / "adapter_config.json").read_text())
        with pytest.raises(ValueError):
            peft.PeftConfig.from_pretrained(str(path.parent))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "write_tensors", stop)
    checkpoint = Made().write(tmp_path / "saved")
    with pytest.raises(OutputError, match="No space left"):
        export_adapter(checkpoint, tmp_path / "out", source=models / "llama")
    assert "unfinished" in seen[0] and not (tmp_path / "out").exists()


class Harmful:
    """Makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_arguments_of_any_type_do_nothing(models, tmp_path):
    made = Made()
    harm = Harmful(tmp_path / "harm")
    made.arguments |= {"path": Path("a"), "dtype": torch.bfloat16, "set": {1}, "harm": harm}
    made.arguments |= {"generator": torch.ones(3), "complex": [1j, {"a": harm}]}
    checkpoint = made.write(tmp_path / "saved")
    export_adapter(checkpoint, tmp_path / "out", source=models / "llama")
    assert not (tmp_path / "harm").exists()
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["r"] == 4


def _renamed(made):
    tensors = made.tensors
    tensors["decoder.layers.mlp.lora.router.a"] = tensors.pop("decoder.layers.mlp.lora.up.a")


def _reshaped(made):
    made.tensors["decoder.layers.self_attention.lora.q.b"] = torch.zeros(LAYERS, 65, 4)
    made.tensors["decoder.layers.mlp.lora.down.a"] = torch.zeros(LAYERS - 1, 4, 128)


def _kept(**values):
    return lambda made: made.arguments["zorse_lora"].update(values)


BAD = {
    "a missing and an unknown tensor": (
        _renamed, ("lora.up.a: found no such tensor", "lora.router.a: found a tensor that")
    ),
    "other shapes": (
        _reshaped, ("lora.q.b: found (65, 4)", "(64, 4) in each of 4 layers", "found 3 layers")
    ),
    "the tensors of another rank": (_kept(rank=5), ("lora.v.a: found (4, 64)", "(5, 64)")),
    "a weight of the base": (
        lambda made: made.tensors.update({"decoder.final_layernorm.weight": torch.ones(64)}),
        ("decoder.final_layernorm.weight: found a tensor that would be left out",),
    ),
    "targets that it has not": (_kept(targets=["q", "k"]), ("lora.down.b: found a tensor that",)),
    "no numbers": (
        _kept(rank=0, alpha="x", targets=["w"]), ('rank "0"', 'alpha "x"', 'target "w"')
    ),
    "nothing kept": (
        lambda made: made.arguments.pop("zorse_lora"), ("zorse_lora of its arguments: found",)
    ),
    "no base kept": (
        lambda made: made.arguments["zorse_lora"].pop("base"), ("rank, alpha, targets and base",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_adapters_are_refused_before_anything_is_written(case, models, tmp_path):
    """Either way, with all that is wrong with them, and with the base beside it."""
    change, said = BAD[case]
    made = Made()
    change(made)
    checkpoint = made.write(tmp_path / "saved")
    with pytest.raises(CheckpointError) as caught:
        export_adapter(checkpoint, tmp_path / "out", source=models / "llama")
    with pytest.raises(CheckpointError) as merging:
        merged(checkpoint, tmp_path / "out", models, base=models / "none")
    assert len(merging.value.problems) == len(caught.value.problems) + 1
    for each in said:
        assert each in str(caught.value) and each in str(merging.value)
    assert f"{models / 'none'}: found no latest" in str(merging.value)
    assert not (tmp_path / "out").exists()


def test_a_layer_that_is_missing_is_named(models, tmp_path):
    made = Made()
    tensors = in_each_layer(made.tensors)
    del tensors["decoder.layers.2.mlp.lora.gate.b"]
    made.tensors = tensors
    with pytest.raises(CheckpointError) as caught:
        export_adapter(made.write(tmp_path / "saved"), tmp_path / "out", source=models / "llama")
    (problem,) = caught.value.problems
    assert problem.where.endswith("decoder.layers.2.mlp.lora.gate.b")


def test_another_base_is_refused(models, tmp_path):
    """With both digests; and a run that started from random weights has none."""
    other, own = digest_of(models / "qwen2-base"), digest_of(models / "llama-base")
    checkpoint = Made(base=other).write(tmp_path / "saved")
    with pytest.raises(CheckpointError) as caught:
        merged(checkpoint, tmp_path / "out", models)
    assert own[:12] in str(caught.value) and other[:12] in str(caught.value)
    checkpoint = Made(base="random:77").write(tmp_path / "random")
    alone = export_adapter(checkpoint, tmp_path / "alone", source=models / "llama")
    assert "initial weights of seed 77" in alone.notes[0]
    with pytest.raises(CheckpointError, match="initial ones of seed 77"):
        merged(checkpoint, tmp_path / "out", models)
    assert not (tmp_path / "out").exists()


def test_the_command_and_what_it_refuses(models, tmp_path):
    """Adapters without an option, whole models with one, and both options."""
    checkpoint = Made(base=digest_of(models / "llama-base")).write(tmp_path / "saved")
    source = ("--source", str(models / "llama"))
    base = str(models / "llama-base")

    def run(checkpoint, *options):
        words = ["export-hf", str(checkpoint), str(tmp_path / "out"), *source, *options]
        return CliRunner().invoke(app, words)

    bare = run(checkpoint)
    assert bare.exit_code != 0 and "--adapter" in bare.output and "--merge BASE" in bare.output
    for options in (("--adapter",), ("--merge", base)):
        whole = run(base, *options)
        assert whole.exit_code != 0 and "found no adapters" in whole.output
    swapped = run(checkpoint, "--merge", str(checkpoint))
    assert "found adapters of LoRA alone" in swapped.output
    both = run(checkpoint, "--adapter", "--merge", base)
    assert both.exit_code != 0 and "beside --adapter" in both.output
    assert not (tmp_path / "out").exists()
    assert run(checkpoint, "--adapter").exit_code == 0
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]


# Digests of bases.

NORM = "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
MATRIX = "decoder.layers.mlp.linear_fc2.weight"
TABLE = "embedding.word_embeddings.weight"


def a_base():
    torch.manual_seed(3)
    return {
        TABLE: torch.randn(40, 8),
        NORM: torch.randn(3, 8),
        MATRIX: torch.randn(3, 600, 8),
        "decoder.final_layernorm.weight": torch.randn(8),
        "output_layer.weight": torch.randn(40, 8),
    }


def digest_after(tensors, folder):
    save(folder, tensors, None)
    return base_digest(folder)


def test_digests_are_of_weights_not_of_layouts(tmp_path):
    base = a_base()
    digest = digest_after(base, tmp_path / "stacked")
    assert len(digest) == 64
    padded = base | {
        key: torch.cat([base[key], torch.zeros(24, 8)]) for key in (TABLE, "output_layer.weight")
    }
    own_norms = {key.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm."): each
                 for key, each in base.items()}  # fmt: skip
    # A view with strides: torch saves it as such.
    turned = base | {MATRIX: base[MATRIX].transpose(1, 2).contiguous().transpose(1, 2)}
    beside = {
        "decoder.layers.mlp.lora.up.a": torch.ones(3, 4, 8),
        "optimizer.state.exp_avg.x": torch.ones(2),
    }
    same = {
        "apart": in_each_layer(base),
        "padded": padded,
        "norms": own_norms,
        "turned": turned,
        "beside": base | beside,
        "double": {key: each.double() for key, each in base.items()},
    }
    for name, tensors in same.items():
        assert digest_after(tensors, tmp_path / name) == digest, name


def _first(key, *index):
    def change(base):
        base[key][index] += 1e-3

    return change


def _shorter(base):
    base[MATRIX] = base[MATRIX][:, :-1].clone()


def _layers(base):
    base[NORM], base[MATRIX] = base[NORM][:2].clone(), base[MATRIX][:2].clone()


@pytest.mark.parametrize(
    "change",
    [
        _first(NORM, 2, 7),
        _first(MATRIX, 1, slice(384, 512)),  # of the values of one of four groups
        _first(TABLE, 0, 0),
        _first("output_layer.weight", 7, 7),
        _shorter,
        _layers,
        lambda base: base.update({NORM: base[NORM].flip(0)}),
        lambda base: base.pop("output_layer.weight"),
    ],
)
def test_digests_differ_with_weights(change, tmp_path):
    base = a_base()
    before = digest_after(base, tmp_path / "before")
    change(base)
    assert digest_after(base, tmp_path / "after") != before


@pytest.mark.parametrize(("queries", "head"), [(1, 128), (4, 128), (8, 64), (7, 80)])
def test_digests_see_every_part_of_a_fused_matrix(queries, head):
    """An adapter merged into one of query, key, value, gate and up changes all of its rows."""
    group = (queries + 2) * head
    rows = [offsets[0] % group for offsets, _ in _blocks((32 // queries * group, 4096))]
    parts = Counter("qkv"[max(0, row // head - queries + 1)] for row in rows)
    assert len(parts) == 3 and min(parts.values()) >= 4
    halves = Counter(offsets[0] < 11008 for offsets, _ in _blocks((2 * 11008, 4096)))
    assert min(halves.values()) > 24
    columns = {offsets[1] for offsets, _ in _blocks((4096, 11008))}
    assert len(columns) > 60 and max(columns) > 10000


def test_a_part_of_a_file_is_read_as_torch_reads_it(tmp_path):
    """Of a view into the middle of what is stored, in the middle of a file."""
    tensor = torch.arange(24, dtype=torch.bfloat16).view(4, 6)[1:, 2:].t()
    torch.save(tensor, tmp_path / "alone")
    data = (tmp_path / "alone").read_bytes()
    (tmp_path / "file").write_bytes(b"before" + data + b"after")
    mapped = np.memmap(tmp_path / "file", np.uint8, "r")
    archive = Archive(mapped[len(b"before") :][: len(data)])
    assert torch.equal(archive.box((0, 0), (4, 3), torch.bfloat16), tensor)
    assert torch.equal(archive.box((1, 2), (2, 1), torch.bfloat16), tensor[1:3, 2:])
    with pytest.raises(OSError, match=r"a tensor of \(4, 3\), shorter than \(5, 3\)"):
        archive.box((1, 0), (4, 3), torch.bfloat16)


def test_digests_of_what_is_no_base(tmp_path):
    Made().write(tmp_path / "adapters")
    with pytest.raises(CheckpointError, match="no weights of a model"):
        base_digest(tmp_path / "adapters")
    save(tmp_path / "cut", a_base(), None)
    (file,) = (tmp_path / "cut").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:20000])
    with pytest.raises(CheckpointError, match="zorse checkpoint verify"):
        base_digest(tmp_path / "cut")
