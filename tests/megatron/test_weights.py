"""Weights of Hugging Face models in Megatron: the logits of transformers, and back to the bit."""

import json
import pickle
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.megatron.launch import MegatronServer
from tests.megatron.logits_entry import OF_A_PLAN, TOKENS
from tests.megatron.plans import LAYOUTS, chunked_plan, plan_of, replica, tp_replica
from tests.megatron.small_models import LENGTH, LLAMA3, MODELS, VOCABULARY, made_models
from tests.megatron.small_run import stock
from tests.megatron.stock_log import iterations
from tests.printed import run_zorse
from tests.unit.test_docs import commands_in
from zorse_megatron.errors import CheckpointError, ModelError, OutputError
from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.live.checkpoint_check import State, look_at
from zorse_megatron.live.checkpoint_files import read_tracker
from zorse_megatron.plan.plan import Plan, TpShards
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.weights.convert import export_model, import_model
from zorse_megatron.weights.model_folder import Description
from zorse_megatron.weights.names import WholeTensor
from zorse_megatron.weights.opened import base_digest, iteration_folder, opened

MOST = {"logits": 1e-5, "loss": 2e-6}
"""The issue asks for 1e-4 of logits up to 2; seen: 2e-6."""
UNEQUAL = TpShards(kv_groups=(2, 0), mlp_columns=(32, 96), vocabulary_rows=(192, 64))
PLANS = {
    "unequal groups": LAYOUTS["3|2"],
    "a set with unequal parts": plan_of(
        ((tp_replica((0, 1), 2, 4, tp_shards=UNEQUAL),), 3), ((replica(2, 4, 2),), 1)
    ),
    "breadth-first": chunked_plan(
        [(replica(0, 1, 6, 3.0), replica(1, 1, 2, 1.0)), (replica(2, 4, 2),)],
        [(0, 1), (1, 2), (0, 1)],
    ),
}


@pytest.fixture(scope="module")
def models() -> Path:
    """A folder with each model, and its logits of some tokens."""
    return made_models()


def _flags(flags: tuple[str, ...], checkpoint: Path) -> list[str]:
    """Of a job that trains the model without changing it: a rate of 1e-30 is lost in rounding."""
    return [
        *("--tokenizer-type", "NullTokenizer", "--mock-data", "--calculate-per-token-loss"),
        *(*flags, "--load", str(checkpoint), "--finetune", "--seq-length", str(LENGTH)),
        *("--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "1"),
        *("--moe-router-bias-update-rate", "0"),
        *("--lr", "1e-30", "--lr-decay-style", "constant", "--log-interval", "1"),
        *(*WITHOUT_DROPOUT, *WITHOUT_EVALUATION, *WITHOUT_WORKERS, "--seed", "7"),
    ]


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_same_model(folder: Path, other: Path) -> None:
    """Every tensor to the bit, and the files that say what they are."""
    found, expected = _tensors(folder), _tensors(other)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name
    config, original = ((each / "config.json").read_text() for each in (folder, other))
    assert json.loads(config) == json.loads(original)


def for_own_layers(tensors: list[WholeTensor]) -> list[WholeTensor]:
    """With the keys of Megatron's own layers for latent attention, which run without a GPU, where
    Transformer Engine's join norms and what follows."""
    return [
        replace(each, key=each.other_key, other_key=each.key)
        if each.other_key is not None and "layer_norm_" in each.key
        else each
        for each in tensors
    ]


def stacked(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, as torch alone reads them."""
    found = opened(checkpoint / "release")
    return {key: found.read_box(key, (0,) * len(size), size) for key, size in found.sizes().items()}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(
    name: str,
    models: Path,
    megatron_server: MegatronServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Token by token, from a checkpoint that is whole, and that goes back to the same bits."""
    flags: tuple[str, ...] = ()
    if name.startswith("deepseek"):
        of_engine, flags = Description.tensors, ("--transformer-impl", "local")
        monkeypatch.setattr(Description, "tensors", lambda own: for_own_layers(of_engine(own)))
    done = import_model(models / name, tmp_path / "checkpoint")
    latest = read_tracker(tmp_path / "checkpoint").names
    assert latest is not None and look_at(latest).state is State.WHOLE
    monkeypatch.undo()
    tokens, expected = torch.load(models / f"{name}.pt")
    torch.save(tokens, tmp_path / "tokens.pt")
    for of_a_plan in ("", "1") if "--num-experts" in done.flags else ("",):
        megatron_server.run_ranks(
            _flags((*done.flags, *flags), tmp_path / "checkpoint"),
            1,
            entry="tests.megatron.logits_entry",
            timeout_s=60,
            env={
                TOKENS: str(tmp_path / "tokens.pt"),
                OF_A_PLAN: of_a_plan,
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            },
        ).check()
        logits = torch.load(tmp_path / "tokens.logits")
        torch.testing.assert_close(logits[..., :VOCABULARY], expected, rtol=0, atol=MOST["logits"])
        # Rows that stand for no token are zero.
        assert logits.shape[-1] > VOCABULARY and not logits[..., VOCABULARY:].any()
    again = tmp_path / "again"
    export_model(tmp_path / "checkpoint", again, source=models / name, shard_bytes=200_000)
    assert len(list(again.glob("*.safetensors"))) > 1
    assert_same_model(again, models / name)


def train_and_export(
    server: MegatronServer, folder: Path, source: Path, plan: Plan | None
) -> tuple[float, Path]:
    """Return the loss of the first iteration and a model exported from what it saved."""
    done = import_model(source, folder / "checkpoint")
    flags = [
        *_flags(done.flags, folder / "checkpoint"),
        "--save",
        str(folder / "saved"),
        "--save-interval",
        "1",
    ]
    if plan is None:
        result = stock(server, flags)
    else:
        save_plan(plan, folder / "plan.json")
        num_ranks = sum(len(each.ranks) for group in plan.groups for each in group.replicas)
        flags += ["--zorse-plan", str(folder / "plan.json")]
        result = server.run_ranks(flags, num_ranks, timeout_s=120).check()
    export_model(folder / "saved", folder / "out", source=source)
    losses = [each.lm_loss for output in result.outputs for each in iterations(output)]
    saved, start = (iteration_folder(folder / name) for name in ("saved", "checkpoint"))
    assert base_digest(saved) == base_digest(start)
    # Megatron's arguments have types of its own, which stay closed.
    assert vars(opened(saved).common()["args"])["save"] == str(folder / "saved")
    return losses[0], folder / "out"


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_plans_start_from_the_weights(
    name: str, models: Path, megatron_server: MegatronServer, tmp_path: Path
) -> None:
    """The loss is stock's under each plan, and what it saves is exported as it was imported."""
    source = models / name
    expected, exported = train_and_export(megatron_server, tmp_path / "stock", source, None)
    assert_same_model(exported, source)
    for title, plan in PLANS.items():
        loss, exported = train_and_export(megatron_server, tmp_path / title, source, plan)
        assert loss == pytest.approx(expected, rel=MOST["loss"]), title
        assert_same_model(exported, source)


def test_the_commands_of_the_page(
    models: Path, megatron_server: MegatronServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/migration.md from a downloaded model to one that transformers loads, on a small one."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    monkeypatch.chdir(tmp_path)
    shutil.copytree(models / "llama", "Llama-3.1-8B")
    # With fewer tokens than the table has rows, as most models have.
    words = {f"word{number}": number for number in range(100)} | {"<eos>": 100}
    tokenizer = Tokenizer(WordLevel(words, unk_token="word0"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>"
    ).save_pretrained("Llama-3.1-8B")
    nodes = "nodes:\n  - {name: new, gpus: [1 x A6000, 1 x V100-16], nics: 100 Gb/s}\n"
    Path("cluster.yaml").write_text(nodes)
    lines = commands_in("docs/migration.md")
    first = next(at for at, line in enumerate(lines) if line.startswith("zorse import-hf"))
    imports, plans, trains, exports = lines[first : first + 4]
    printed = run_zorse([*shlex.split(imports), "--json"])
    run_zorse(shlex.split(plans.replace("4096", str(LENGTH))))
    assert trains.endswith(" MEGATRON_FLAGS --zorse-plan plan.json")
    done = json.loads(printed)
    flags = _flags(tuple(done["flags"]), tmp_path / "start")
    at = flags.index("--load")
    flags[at : at + len(("--load", "start", "--finetune"))] = done["load"]
    flags += ["--global-batch-size", "64", "--save", "trained", "--save-interval", "1"]
    flags += ["--lr", "1e-3", "--fp16", "--initial-loss-scale", "16"]
    launches = ["zorse", "launch", "plan.json", "--cluster", "cluster.yaml", "--torchrun"]
    said = run_zorse([*launches, "--", *flags])
    (line,) = (each for each in said.splitlines() if " torchrun " in each)
    _, _, job = line.partition("-m zorse_megatron.pretrain ")
    megatron_server.run_ranks(shlex.split(job), 2, timeout_s=120, directory=tmp_path).check()
    printed = run_zorse(shlex.split(exports))
    assert "6 rows of output_layer.weight are left out" in printed
    assert len(transformers.AutoTokenizer.from_pretrained("out")) == len(words)
    model = transformers.AutoModelForCausalLM.from_pretrained("out")
    trained, original = model.state_dict(), _tensors(Path("Llama-3.1-8B"))
    changes = [(trained[name] - tensor).abs().max().item() for name, tensor in original.items()]
    # Adam's first step changes what has a gradient by the rate, beside two roundings to fp16 of
    # weights below 2, at most 2**-11 each.
    assert 0.9e-3 < max(changes) < 1e-3 * 1.01 + 2 * 2**-11


def test_exported_types(models: Path, tmp_path: Path) -> None:
    """Weights are rounded to the type asked for, which config.json names; fp16 may not do."""
    import_model(models / "llama", tmp_path / "checkpoint")
    source = models / "llama"
    export_model(tmp_path / "checkpoint", tmp_path / "bf16", source=source, dtype="bf16")
    original = _tensors(source)
    for name, tensor in _tensors(tmp_path / "bf16").items():
        assert torch.equal(tensor, original[name].bfloat16())
    assert json.loads((tmp_path / "bf16/config.json").read_text())["dtype"] == "bfloat16"
    large = copied(source, tmp_path / "large")
    rewrite(large, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    import_model(large, tmp_path / "large-checkpoint")
    with pytest.raises(OutputError, match="100000") as caught:
        export_model(tmp_path / "large-checkpoint", tmp_path / "fp16", source=large, dtype="fp16")
    assert "65504" in str(caught.value) and not (tmp_path / "fp16").exists()


def test_files_of_other_names_and_a_type_that_is_not_named(models: Path, tmp_path: Path) -> None:
    """An index may name any file; without a dtype in config.json, weights go out as they came."""
    source = copied(models / "llama", tmp_path / "model")
    (source / "model.safetensors").rename(source / "weights.safetensors")
    index = {"weight_map": dict.fromkeys(_tensors(source), "weights.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    configured(source, dtype=None)
    checkpoint = tmp_path / "checkpoint"
    import_model(source, checkpoint)
    export_model(checkpoint, tmp_path / "out", source=source, shard_bytes=200_000)
    found, expected = _tensors(tmp_path / "out"), _tensors(source)
    assert {name: each.dtype for name, each in found.items()} == dict.fromkeys(
        expected, torch.float32
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"


def test_what_is_to_be_copied_is_looked_at_first(models: Path, tmp_path: Path) -> None:
    import_model(models / "llama", tmp_path / "checkpoint")
    source = copied(models / "llama", tmp_path / "model")
    (source / "tokenizer.model").symlink_to("../blobs/none")
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        export_model(tmp_path / "checkpoint", tmp_path / "out", source=source)
    assert not (tmp_path / "out").exists()


def test_an_index_that_has_elements_twice_is_refused(models: Path, tmp_path: Path) -> None:
    """As many elements as the tensor has, of which the second half is nowhere."""
    import_model(models / "llama", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint/release/.metadata"
    metadata = pickle.loads(path.read_bytes())
    (whole,) = metadata.state_dict_metadata[NORM_KEY].chunks
    half = replace(whole, sizes=torch.Size([whole.sizes[0] // 2]))
    metadata.state_dict_metadata[NORM_KEY].chunks[:] = [half, half]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="32 elements are in no file"):
        export_model(tmp_path / "checkpoint", tmp_path / "out", source=models / "llama")


NORM_KEY = "decoder.final_layernorm.weight"
STATE = "decoder.final_layernorm._extra_state/shard_0_1"
MISPLACED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another tensor's bytes": (lambda norm: norm, f"some of which are those of {STATE}"),
    "one byte of them": (
        lambda norm: replace(norm, offset=norm.offset + norm.length - 1),
        f"some of which are those of {NORM_KEY}",
    ),
    "bytes past the end": (
        lambda norm: replace(norm, length=10**7), "of __0_0.distcp, which ends at "
    ),
    "bytes before the start": (
        lambda norm: replace(norm, offset=-1), "bytes -1 to "
    ),
    "no bytes": (
        lambda norm: None, "AttributeError"
    ),
    "a file that is not there": (
        lambda norm: replace(norm, relative_path="__1_0.distcp"),
        "of __1_0.distcp, which is not there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISPLACED)
def test_bytes_that_are_not_a_tensors_own_are_refused(
    case: str, models: Path, tmp_path: Path
) -> None:
    """Of a tensor that is not exported, too: one of the two has lost its own."""
    import_model(models / "llama", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint/release/.metadata"
    metadata = pickle.loads(path.read_bytes())
    places = {index.fqn: index for index in metadata.storage_data}
    change, said = MISPLACED[case]
    metadata.storage_data[places[STATE]] = change(metadata.storage_data[places[NORM_KEY]])
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError) as caught:
        export_model(tmp_path / "checkpoint", tmp_path / "out", source=models / "llama")
    problem = caught.value.problems[0]
    assert said in problem.found and problem.where.startswith(str(path.parent))
    assert not (tmp_path / "out").exists()


def copied(source: Path, folder: Path) -> Path:
    """A copy of a model with all tensors in one file."""
    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    save_file(_tensors(source), folder / "model.safetensors")
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = _tensors(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configured(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


Damage = Callable[[Path], Any]


def other_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    return lambda folder: rewrite(folder, change)


def other_tensor(name: str, tensor: torch.Tensor) -> Damage:
    return other_tensors(lambda tensors: tensors.update({name: tensor}))


def other_config(**values: Any) -> Damage:
    return lambda folder: configured(folder, **values)


def assert_refused(source: Path, case: tuple[Damage, tuple[str, ...]], place: Path) -> None:
    """A damaged copy of a model is refused in these words, before anything is written."""
    folder = copied(source, place / "model")
    damage, said = case
    damage(folder)
    with pytest.raises(ModelError) as caught:
        import_model(folder, place / "checkpoint")
    assert [each for each in said if each not in str(caught.value)] == []
    assert not (place / "checkpoint").exists()


def _truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def _overlapping(folder: Path) -> None:
    """The file stays as long as its header says; the bytes of the last tensor are another's."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    first, second = (header[f"model.layers.{each}.mlp.up_proj.weight"] for each in range(2))
    first["data_offsets"] = second["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def _indexed(folder: Path, file: str) -> None:
    index = {"weight_map": dict.fromkeys(_tensors(folder), file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")


def _tokenized(folder: Path) -> None:
    value = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 250, "content": "b"}]}
    (folder / "tokenizer.json").write_text(json.dumps(value))


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
BAD: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "a missing tensor and an unknown one": (
        other_tensors(lambda all_: all_.update({"other": all_.pop(QUERY)})),
        (f"no tensor {QUERY}", "1 tensors beside the model's: other"),
    ),
    "another shape": (
        other_tensor(NORM, torch.ones(65)), (f"{NORM}: (65,)", "(64,)")
    ),
    "another dtype": (
        other_tensor(NORM, torch.ones(64).half()), (f"tensors in F16: {NORM}", "F32")
    ),
    "another output layer though tied": (
        other_config(tie_word_embeddings=True),
        ("lm_head.weight differs from model.embed_tokens.weight",),
    ),
    "several types, config.json naming none": (
        lambda folder: (
            rewrite(folder, lambda all_: all_.update({QUERY: all_[QUERY].half()})),
            configured(folder, dtype=None),
        ),
        ("tensors in F16 and F32",),
    ),
    "8 bits beside a tied table": (
        lambda folder: (
            configured(folder, tie_word_embeddings=True),
            rewrite(
                folder,
                lambda all_: all_.update(
                    {"lm_head.weight": all_["lm_head.weight"].to(torch.float8_e4m3fn)}
                ),
            ),
        ),
        ("lm_head.weight differs",),
    ),
    "a type that nobody knows": (other_config(dtype="int8"), ("'int8'",)),
    "a base beyond floats": (
        other_config(rope_parameters={"rope_theta": 10**400}),
        ("rope_theta",),
    ),
    "a scaling that is no object": (
        other_config(rope_scaling="yarn"), ("'yarn'",)
    ),
    "a factor that is no number": (
        other_config(rope_parameters=LLAMA3 | {"factor": "abc"}),
        ("rope_scaling.factor", "'abc'"),
    ),
    "8 bits": (
        other_tensor(NORM, torch.ones(64).to(torch.float8_e4m3fn)),
        (f"tensors in F8_E4M3: {NORM}",),
    ),
    "tensors that share bytes": (
        _overlapping, ("model.safetensors: ", "invalid offset for tensor", "Download it again")
    ),
    "a truncated file": (_truncated, ("model.safetensors", "Download it again")),
    "a path outside": (
        lambda folder: _indexed(folder, "../model.safetensors"),
        ("../model.safetensors",),
    ),
    "a missing file": (
        lambda folder: _indexed(folder, "model-00001-of-00002.safetensors"),
        ("no model-00001-of-00002.safetensors", "model.safetensors, which"),
    ),
    "a surplus file": (
        lambda folder: shutil.copyfile(
            folder / "model.safetensors", folder / "model-00003-of-00003.safetensors"
        ),
        ("model-00003-of-00003.safetensors, which",),
    ),
    "pickles": (_pickled, ("no model.safetensors (there is pytorch_model.bin)",)),
    "a larger tokenizer": (_tokenized, ("token 250",)),
    "tokenizers that are links to nothing": (
        lambda folder: [
            (folder / f"tokenizer.{each}").symlink_to("../blobs/none") for each in ("json", "model")
        ],
        ("tokenizer.json: found a file that cannot be read, or a link", "tokenizer.model: found"),
    ),
    "experts": (other_config(model_type="mixtral"), ("experts",)),
    "a type that is not converted": (
        other_config(model_type="phi3"), ("'phi3'",)
    ),
    "quantized": (
        other_config(quantization_config={"quant_method": "gptq"}),
        ("quantization_config", "gptq"),
    ),
    "a quantization that is no object": (
        other_config(quantization_config="awq"),
        ("quantization_config", "awq"),
    ),
    "another scaling": (
        other_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}),
        ("yarn",),
    ),
    "other constants of llama3": (
        other_config(rope_parameters=LLAMA3 | {"high_freq_factor": 2.0}),
        ("high_freq_factor", "2.0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_models_are_refused_before_anything_is_written(
    case: str, models: Path, tmp_path: Path
) -> None:
    assert_refused(models / "llama", BAD[case], tmp_path)


def test_a_checkpoint_of_another_model_is_refused(models: Path, tmp_path: Path) -> None:
    """By the tensors that differ, each once."""
    import_model(models / "qwen3", tmp_path / "checkpoint")
    with pytest.raises(CheckpointError) as caught:
        export_model(tmp_path / "checkpoint", tmp_path / "out", source=models / "llama")
    said = [each.where.partition(": ")[2] for each in caught.value.problems]
    attention = "decoder.layers.self_attention"
    assert said == [
        *(f"{attention}.linear_{name}.weight" for name in ("qkv", "proj")),
        *(f"{attention}.{each}_layernorm.weight" for each in "qk"),
    ]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_refused(name: str, models: Path, tmp_path: Path) -> None:
    """Whether a file is shorter or gone; and no half of a model stays."""
    import_model(models / "llama", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint/release" / name
    data = path.read_bytes()
    for damage in (lambda: path.write_bytes(data[: len(data) // 2]), path.unlink):
        damage()
        with pytest.raises(CheckpointError):
            export_model(tmp_path / "checkpoint", tmp_path / "out", source=models / "llama")
        assert not (tmp_path / "out").exists()


def test_weights_that_the_source_has_not_are_not_lost(models: Path, tmp_path: Path) -> None:
    """An output layer of a checkpoint whose source is tied."""
    import_model(models / "llama", tmp_path / "checkpoint")
    source = copied(models / "llama", tmp_path / "tied")
    configured(source, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"output_layer\.weight"):
        export_model(tmp_path / "checkpoint", tmp_path / "out", source=source)
