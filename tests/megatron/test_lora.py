"""Adapters under any plan: they follow `peft` and one process, and the base stays as it is."""

import shlex
import shutil
from argparse import Namespace
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.megatron.comparison import (
    DEGREE,
    LLAMA,
    MAX_LOSS_DIFFERENCE,
    SEQUENCE_PARALLEL,
    UNTIED,
    Recorded,
    assert_follows,
    flags_for,
    for_one_process,
    plan_run,
)
from tests.megatron.launch import MegatronServer
from tests.megatron.plans import (
    FULL,
    LAYOUTS,
    chunked_plan,
    expert_replica,
    in_the_host,
    plan_of,
    replica,
    tp_replica,
    with_settings,
)
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.small_models import LENGTH, VOCABULARY, made_models
from tests.printed import run_zorse
from tests.unit.test_docs import commands_in
from zorse_megatron.errors import RankFailure
from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.inputs.lora import is_adapter
from zorse_megatron.live.checkpoint_choice import SKIP
from zorse_megatron.live.checkpoint_files import TRACKER
from zorse_megatron.plan.plan import Plan, TpShards
from zorse_megatron.weights.convert import Imported, import_model
from zorse_megatron.weights.opened import base_digest, iteration_folder

ALL = ("--zorse-lora", "rank=4,alpha=12,targets=q,k,v,o,gate,up,down")
BESIDE_EXPERTS = ("--zorse-lora", "rank=4,alpha=12,targets=q,k,v,o", "--moe-aux-loss-coeff", "0")
SOME = ("--zorse-lora", "rank=3,alpha=2,targets=q,v,up")
UNEQUAL = TpShards(kv_groups=(2, 0), mlp_columns=(32, 96), vocabulary_rows=(192, 64))
ALONE = plan_of(((replica(0, 2, 4),), 4))
MODEL = (*LLAMA, "--ffn-hidden-size", "128")
BREADTH_FIRST = chunked_plan(
    [(replica(0, 1, 6, 3.0), replica(1, 1, 2, 1.0)), (replica(2, 4, 2),)],
    [(0, 1), (1, 2), (0, 1)],
)
ROWS: dict[str, tuple[Plan, tuple[str, ...]]] = {
    "tied, some targets": (LAYOUTS["2|1|2"], (*MODEL, *SOME)),
    "untied, recomputed": (
        with_settings(LAYOUTS["1|2"], FULL, FULL),
        (*MODEL, *UNTIED, *SOME),
    ),
    "released and gathered": (BREADTH_FIRST, (*MODEL, *ALL)),
    "sequence parallel": (
        plan_of(((tp_replica((0, 1), 2, 4),), 3), ((replica(2, 4, 2),), 1)),
        (*MODEL, *ALL, *DEGREE, *SEQUENCE_PARALLEL),
    ),
    "unlike replicas": (
        plan_of(
            ((tp_replica((0, 1), 2, 3, 2.0, UNEQUAL), replica(2, 1, 2, 1.0)), 2),
            ((replica(3, 8, 1),), 2),
        ),
        (*MODEL, *ALL, *DEGREE),
    ),
    "in the host": (in_the_host(BREADTH_FIRST), (*MODEL, *ALL)),
    "GELU, biases": (LAYOUTS["2|1"], ("--zorse-lora", "rank=2,alpha=4,targets=k,o,up,down")),
}


@cache
def _reference(flags: tuple[str, ...]) -> Recorded:
    return plan_run(ALONE, flags)


@pytest.fixture(scope="module")
def models() -> Path:
    """A folder with a model of each type."""
    return made_models()


@pytest.mark.parametrize("name", ROWS)
def test_follows_one_process(name: str, corpus: Path) -> None:
    plan, more = ROWS[name]
    flags = flags_for(corpus, *more)
    alone = _reference(for_one_process(flags))
    run = plan_run(plan, flags)
    assert_follows(run, alone)
    for before, after in zip(run.initial, run.of_ranks, strict=True):
        for weight, value in before.items():
            changed = not torch.equal(value, after[weight])
            assert changed == is_adapter(weight) or not value.numel(), weight


# The same model, data and rate in `peft`, which is the reference of all else here.


RATE, STEPS = 3e-3, 20
TARGETS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def _job(base: Imported, *more: str) -> list[str]:
    """A command that trains adapters on a converted model."""
    return [
        *("--tokenizer-type", "NullTokenizer", "--mock-data", "--calculate-per-token-loss"),
        *(*base.flags, "--pretrained-checkpoint", str(base.folder), "--seq-length", str(LENGTH)),
        *("--micro-batch-size", "1", "--global-batch-size", "8", "--lr", str(RATE)),
        *("--lr-decay-style", "constant", "--weight-decay", "0.1", "--log-interval", "1"),
        *(*WITHOUT_DROPOUT, *WITHOUT_EVALUATION, *WITHOUT_WORKERS, "--seed", "7"),
        *(BESIDE_EXPERTS if "--num-experts" in base.flags else ALL),
        *more,
    ]


def _peft_and_transformers() -> tuple[Any, Any]:
    """Imported in the process that needs them, which takes seconds."""
    import peft
    import transformers

    return peft, transformers


def _of_peft(
    source: Path, initial: dict[str, torch.Tensor], batches: list[Any]
) -> tuple[list[float], Any]:
    """Losses of its steps, from the initial values of adapters that are given, and its model."""
    peft, transformers = _peft_and_transformers()
    base = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    names = [name.split(".")[1] for name in TARGETS.values()]
    if hasattr(base.config, "num_local_experts"):
        names = names[:4]
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=names, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    parameters = dict(model.named_parameters())
    for name, value in initial.items():
        if is_adapter(name):
            layer, target, which = name.split(".")[2], *name.split(".")[-2:]
            place = f"base_model.model.model.layers.{layer}.{TARGETS[target]}"
            parameters[f"{place}.lora_{which.upper()}.default.weight"].data.copy_(value)
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    losses = []
    for start in range(0, len(batches), len(batches) // STEPS):
        step = batches[start : start + len(batches) // STEPS]
        tokens, labels = (torch.cat([each[key] for each in step]) for key in ("tokens", "labels"))
        # Megatron's table has rows of zeros up to a multiple of 128, which count in its softmax.
        logits = F.pad(model(tokens).logits, (0, -VOCABULARY % 128))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_follows_peft(name: str, models: Path, tmp_path: Path) -> None:
    """Twenty steps of Adam with clipping and weight decay; the first loss is the base's.

    Experts have none, and no loss of their load. What is exported, as adapters or merged into the
    base, is the model that `peft` has trained.
    """
    source, saved = models / name, tmp_path / "saved"
    base = import_model(source, tmp_path / "base")
    batches = tmp_path / "batches.pt"
    run = plan_run(
        ALONE,
        _job(base, "--train-iters", str(STEPS), "--save", str(saved), "--save-interval", "20"),
        entry="tests.megatron.batches_entry",
        script=(),
        env={"ZORSE_TEST_BATCHES": str(batches)},
    )
    losses, model = _of_peft(source, run.initial[0], torch.load(batches))
    assert run.losses == pytest.approx(losses, abs=MAX_LOSS_DIFFERENCE)  # seen: 1e-6
    assert losses[-1] < losses[0] - 0.1  # it has learnt something
    command = ["export-hf", str(saved), "OUT", "--source", str(source)]
    for kind, more in (("adapter", ["--adapter"]), ("merged", ["--merge", str(base.folder)])):
        run_zorse(["zorse", *command[:2], str(tmp_path / kind), *command[3:], *more])
    peft, transformers = _peft_and_transformers()
    fresh = transformers.AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager")
    adapted = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    )
    tokens, before = torch.load(models / f"{name}.pt")
    expected = model(tokens).logits
    assert (expected - before).abs().max() > 0.1
    for found in (adapted, merged):
        torch.testing.assert_close(found(tokens).logits, expected, rtol=0, atol=1e-4)


def test_the_commands_of_the_page(
    models: Path, megatron_server: MegatronServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/migration.md, on a small model, with the line that `zorse launch` makes of them."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models / "llama", "Llama-3.1-8B")
    nodes = "nodes:\n  - {name: new, gpus: [1 x A6000, 1 x V100-16], nics: 100 Gb/s}\n"
    Path("cluster.yaml").write_text(nodes)
    lines = commands_in("docs/migration.md")
    imports = next(line for line in lines if line.startswith("zorse import-hf"))
    first = next(at for at, line in enumerate(lines) if " --lora " in line)
    plans, trains, adapter, merge = map(shlex.split, lines[first : first + 4])
    run_zorse(shlex.split(imports))
    run_zorse([str(LENGTH) if word == "4096" else word for word in plans])
    base = import_model(Path("Llama-3.1-8B"), Path("same"))
    saves = ("--save", "trained", "--load", "trained", "--save-interval", "1", "--train-iters", "1")
    flags = _job(replace(base, folder=Path("start")), *saves, "--global-batch-size", "64", "--fp16")
    flags[flags.index("--zorse-lora") + 1] = trains[trains.index("--zorse-lora") + 1]
    launches = ["zorse", "launch", "plan.json", "--cluster", "cluster.yaml", "--torchrun"]
    said = run_zorse([*launches, "--", *flags, "--initial-loss-scale", "16"])
    (line,) = (each for each in said.splitlines() if " torchrun " in each)
    _, _, job = line.partition("-m zorse_megatron.pretrain ")
    megatron_server.run_ranks(shlex.split(job), 2, timeout_s=120, directory=tmp_path).check()
    for words in (adapter, merge):
        run_zorse(words)
    peft, transformers = _peft_and_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained("merged")
    bare = transformers.AutoModelForCausalLM.from_pretrained("Llama-3.1-8B")
    adapted = peft.PeftModel.from_pretrained(bare, "adapter")
    largest = {
        name: each.abs().max().item() for name, each in adapted.named_parameters() if "_B" in name
    }
    assert len(largest) == 7 * 4 and all(value > 0.9 * RATE for value in largest.values())
    tokens, _ = torch.load(models / "llama.pt")
    torch.testing.assert_close(model(tokens).logits, adapted(tokens).logits, rtol=0, atol=1e-4)


# Checkpoints.


def _saving(base: Imported, folder: Path, *more: str, steps: int = 4) -> list[str]:
    """A command that starts as it would after a failure."""
    saves = ("--save", str(folder), "--load", str(folder), "--save-interval", "2")
    return _job(base, *saves, "--train-iters", str(steps), *more)


def _tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {key: tuple(each.size) for key, each in metadata.items() if hasattr(each, "size")}


def test_goes_on_under_any_plan(models: Path, tmp_path: Path) -> None:
    """From its second step, under each plan; what it saves are adapters and their state alone."""
    base = import_model(models / "llama", tmp_path / "base")
    saved = tmp_path / "saved"
    whole = plan_run(LAYOUTS["3|2"], _saving(base, saved), script=())
    tensors = _tensors(saved / "iter_0000002")
    assert all(is_adapter(key) for key in tensors)
    states = {key.split("decoder.")[0] for key in tensors}
    assert states >= {"", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."}
    assert tensors["decoder.layers.self_attention.lora.k.b"] == (4, 32, 4)
    assert tensors["decoder.layers.mlp.lora.down.a"] == (4, 4, 128)
    shutil.rmtree(saved / "iter_0000004")
    for name in ("in the host", "unlike replicas"):
        again = tmp_path / name
        shutil.copytree(saved, again)
        (again / TRACKER).write_text("2")
        plan, _ = ROWS[name]
        degree = DEGREE if name == "unlike replicas" else ()
        # In a checkpoint's other format from then on, too.
        more = () if name == "in the host" else ("--use-distributed-optimizer",)
        run = plan_run(plan, _saving(base, again, *degree, *more), script=())
        assert run.losses == pytest.approx(whole.losses[2:], abs=MAX_LOSS_DIFFERENCE), name
        assert run.grad_norms == pytest.approx(whole.grad_norms[2:], rel=1e-4), name


def test_goes_on_beside_experts(models: Path, tmp_path: Path) -> None:
    """Experts and routers come from the base at every start, also to ranks that share them."""
    base = import_model(models / "mixtral", tmp_path / "base")
    saved = tmp_path / "saved"
    whole = plan_run(LAYOUTS["3|2"], _saving(base, saved), script=())
    assert all(is_adapter(key) for key in _tensors(saved / "iter_0000002"))
    shutil.rmtree(saved / "iter_0000004")
    (saved / TRACKER).write_text("2")
    shared = plan_of(((expert_replica((0, 1), (1, 3), (3, 1), 2),), 3), ((replica(2, 8, 1),), 1))
    run = plan_run(shared, _saving(base, saved), script=())
    assert run.losses == pytest.approx(whole.losses[2:], abs=MAX_LOSS_DIFFERENCE)
    assert run.grad_norms == pytest.approx(whole.grad_norms[2:], rel=1e-4)


def _refused(flags: list[str]) -> str:
    """What is said where all ranks end with status 2."""
    with pytest.raises(RankFailure) as refused:
        plan_run(LAYOUTS["2|1"], flags, script=())
    said = str(refused.value)
    assert said.count("found exit status 2") == 3, said
    return said


def test_refuses_what_it_cannot_go_on_from(models: Path, tmp_path: Path) -> None:
    """Another scale, the base as --load, another base, no files, and adapters as a whole model."""
    base = import_model(models / "llama", tmp_path / "base")
    saved, flags = tmp_path / "saved", _saving(base, tmp_path / "saved", steps=2)
    at = flags.index("--pretrained-checkpoint")
    bare = [*flags[:at], *flags[at + 2 :]]  # random weights will do
    run = plan_run(LAYOUTS["2|1"], bare, script=())
    assert "adapters are trained beside random weights" in run.outputs[0]
    where = f"--load {saved}/iter_0000002: found "
    lora = flags.index("--zorse-lora")
    other = [*bare]
    other[other.index("--zorse-lora") + 1] = "rank=4,alpha=8,targets=q,k"
    said = _refused(other)
    assert f"{where}adapters with alpha 12; expected 8" in said
    assert f"{where}adapters with targets q,k,v,o,gate,up,down" in said
    assert f"{where}adapters for the base random:7" in _refused([*bare, "--seed", "8"])
    assert f"{where}adapters for the base random:7" in _refused(flags)
    whole = [*bare, "--load", str(base.folder)]
    assert f"--load {base.folder}/release: found whole weights" in _refused(whole)
    remote = [*flags, "--pretrained-checkpoint", "msc://far/away"]
    assert "--pretrained-checkpoint msc://far/away: found what is not in files" in _refused(remote)
    shutil.copytree(saved / "iter_0000002", saved / "iter_0000004")
    (saved / TRACKER).write_text("4")
    (damaged,) = list((saved / "iter_0000004").glob("__0_0.distcp"))
    damaged.unlink()
    assert f"{where}adapters with alpha 12" in _refused([*other, *SKIP.split()])
    assert (saved / TRACKER).read_text() == "4"
    (saved / TRACKER).write_text("2")
    tied = [each for each in flags if each not in UNTIED]
    for words in (tied, [*tied[: tied.index("--zorse-lora")], "--load", str(tmp_path / "none")]):
        assert f"{base.folder}/release: found output_layer.weight" in _refused(words)
    without = [*flags[:lora], *flags[lora + 2 :]]
    assert f"{where}adapters alone" in _refused(without)


def _problems_of_base(folder: Path, digest: str) -> list[str]:
    from zorse_megatron.adapter.checkpoint.adapters import base_problems

    args = Namespace(
        load=None,
        save=None,
        ckpt_step=None,
        exit_on_missing_checkpoint=False,
        pretrained_checkpoint=str(folder),
        zorse_lora={"base": digest},
    )
    return [str(each) for each in base_problems(args)]


def test_a_run_moves_only_if_its_base_is_still_there(models: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    import_model(models / "llama", folder)
    digest = base_digest(iteration_folder(folder))
    assert run_megatron_ranks(1, _problems_of_base, folder, digest) == [[]]
    ((other,),) = run_megatron_ranks(1, _problems_of_base, folder, "0" * 64)
    assert "found other weights than at the start" in other
    shutil.rmtree(folder / "release")
    ((gone,),) = run_megatron_ranks(1, _problems_of_base, folder, digest)
    assert str(folder) in gone


def _engine_norms() -> list[float]:
    """How far the norm inside a layer as Transformer Engine's is from one written by hand."""
    from zorse_megatron.adapter.model import lora

    torch.manual_seed(3)
    inputs, weight, bias = torch.randn(5, 2, 8) + 0.5, torch.randn(8), torch.randn(8)
    off = []
    for normalization, is_zero_centered in product(("RMSNorm", "LayerNorm"), (False, True)):
        layer = type(lora._NORM_AND_COLUMN, (), {})()
        layer.layer_norm_weight, layer.layer_norm_bias = weight, bias
        layer.normalization, layer.eps = normalization, 1e-3
        layer.zero_centered_gamma = is_zero_centered
        centered = inputs - inputs.mean(-1, keepdim=True) * (normalization == "LayerNorm")
        scaled = centered / (centered.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        expected = scaled * (weight + is_zero_centered) + bias * (normalization == "LayerNorm")
        off.append((lora._normed(layer, inputs) - expected).abs().max().item())
    return off


def test_norms_inside_layers() -> None:
    """Transformer Engine's first matrices have the norm inside, so adapters compute it."""
    (off,) = run_megatron_ranks(1, _engine_norms)
    assert len(off) == 4 and max(off) < 1e-5
