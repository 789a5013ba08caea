"""Experts' optimizer state, to the bit, from stock with expert parallelism to plans and back.

A run of stock saves; then runs that train nothing load and save, one after the other. What each of
them has saved is read by one process of stock's own reader, and compared with the first.
"""

import tempfile
import traceback
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.megatron.checkpoint_jobs import read_checkpoint
from tests.megatron.comparison import flags_for
from tests.megatron.preloaded import run_megatron_ranks
from tests.megatron.test_checkpoints import RUNS, Saved, assert_same_rest, start
from tests.megatron.test_experts import BIASED, MODEL
from tests.megatron.test_optimizer_checkpoint import assert_equal
from zorse_megatron.cli.main import app
from zorse_megatron.errors import RankFailure
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import save_plan

STEPS = 3
"""Of which an odd number leaves biases other than they began."""
APART = ("--expert-model-parallel-size", "2")
"""Under a plan: save as stock does with any such flag."""

RUNS["stock EP=2"] = (APART, 2)  # beside those of `test_experts`
RUNS["stock EP=4"] = (("--expert-model-parallel-size", "4"), 4)

# A star: saves for expert parallelism.
FP16 = ("--fp16", "--initial-loss-scale", "4096", "--loss-scale-window", "1")
DISTRIBUTED = ("--bf16", "--use-distributed-optimizer", "--ckpt-fully-parallel-save")
CHAINS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fp32": (("stock EP=4", "shared by ranks*", "stock EP=2", "in TP groups", "stock"), ()),
    "fp16": (
        (
            *("stock", "in TP groups*", "stock EP=4", "shared by ranks*", "stock EP=2"),
            *("1|3|1", "stock"),
        ),
        FP16,
    ),
    # Stock's distributed optimizer cannot load where torch's AdamW steps.
    "distributed": (
        ("stock EP=2", "in TP groups*", "shared by ranks*"),
        (*DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable"),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_every_bit_goes_from_run_to_run(name: str, corpus: Path) -> None:
    runs, more = CHAINS[name]
    flags = flags_for(corpus, *MODEL, *BIASED, "--save-interval", "9", *more, steps=STEPS)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, str(number)) for number in range(len(runs))]
        for number, run in enumerate(runs):
            load = ("--load", str(folders[number - 1])) if number else ()
            apart = APART if run.endswith("*") else ()
            words = [*flags, *load, *apart, "--save", str(folders[number])]
            assert len(start(run.rstrip("*"), words).steps) == (0 if number else STEPS)
        steps = [each / f"iter_{STEPS:07}" for each in folders]
        is_apart = ["EP=" in run or run.endswith("*") for run in runs]
        (differences,) = run_megatron_ranks(1, _differences, steps, is_apart)
    for run, difference in zip(runs[1:], differences, strict=True):
        assert difference is None, f"{run}: {difference}"


def _differences(folders: Sequence[Path], is_apart: Sequence[bool]) -> list[str | None]:
    """Of each checkpoint but the first, where it is not the same as that one."""
    expected, common = _read(folders[0])
    assert sum("experts" in key for key in expected) in {6, 8}, "moments and main parameters"
    assert expected["decoder.layers.mlp.router.expert_bias"].any()
    found: list[str | None] = []
    for folder, apart in zip(folders[1:], is_apart[1:], strict=True):
        tensors, others = _read(folder)
        try:
            assert_equal(tensors, expected)
            assert_equal(others["optimizer"], _common(common["optimizer"], apart=apart))
            assert_equal(others["iteration"], STEPS)
        except AssertionError:
            found.append(traceback.format_exc())
        else:
            found.append(None)
    return found


def _read(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors, and the common part."""
    found, common = read_checkpoint(folder)
    return {key: each for key, each in found.items() if isinstance(each, torch.Tensor)}, common


def _common(optimizer: dict, *, apart: bool) -> dict:
    """What stock has of the state beside tensors: of one optimizer, or of two."""
    dense = optimizer.get(0, optimizer)
    experts = deepcopy(dense)
    inner: dict[str, Any] = experts.get("optimizer", experts)
    inner["param_groups"] = [
        group | {"is_expert_parallel": True} for group in inner["param_groups"] if group["wd_mult"]
    ]
    made = {0: dense, 1: experts}
    if 0 in optimizer:
        assert_equal(made, optimizer)
    return made if apart else dense


def test_resumes(corpus: Path) -> None:
    saved = Saved(corpus)
    directory, uninterrupted = saved.by("stock EP=2", *MODEL, *BIASED)
    assert_same_rest(saved.resume("shared by ranks", directory, *MODEL, *BIASED), uninterrupted)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--num-experts", "8"), "8 experts of width 48 in layers 0 to 3"),
        (("--moe-ffn-hidden-size", "64"), "4 experts of width 64 in layers 0 to 3"),
        (("--moe-layer-freq", "2"), "4 experts of width 48 in layers 0, 2"),
    ],
)
def test_other_experts_are_refused_by_name(
    more: tuple[str, ...], expected: str, corpus: Path, tmp_path: Path
) -> None:
    """By `zorse check`, before there are any GPUs, and by the run before it loads anything."""
    saved = Saved(corpus)
    directory, _ = saved.by("stock", *MODEL, *BIASED)
    found = "found 4 experts of width 48 in layers 0 to 3; expected "
    with pytest.raises(RankFailure) as failure:
        saved.resume("1|2", directory, *MODEL, *BIASED, *more)
    assert f"{found}{expected}" in str(failure.value)
    assert "Traceback" not in str(failure.value)
    plan = RUNS["1|2"]
    assert isinstance(plan, Plan)
    save_plan(plan, tmp_path / "plan.json")
    flags = [*saved.flags(*MODEL, *BIASED), "--load", str(directory)]
    check = ["check", str(tmp_path / "plan.json"), "--", *flags]
    assert CliRunner().invoke(app, check).exit_code == 0
    # The base of adapters, whose own checkpoints have no experts.
    lora = "rank=4,alpha=8,targets=q,v"
    save_plan(replace(plan, model=replace(plan.model, lora=lora)), tmp_path / "lora.json")
    check_adapters = ["check", str(tmp_path / "lora.json"), *check[2:], "--zorse-lora", lora]
    assert CliRunner().invoke(app, [*check_adapters, *more]).exit_code == 0
    check_base = [*check_adapters, "--pretrained-checkpoint", str(directory)]
    assert CliRunner().invoke(app, check_base).exit_code == 0
    for words in (check, check_base):
        checked = CliRunner().invoke(app, [*words, *more])
        assert checked.exit_code == 1
        assert f"{found}{expected}" in " ".join(checked.output.split())
        lenient = ("--dist-ckpt-strictness", "log_all")  # it may lack what the model has
        assert CliRunner().invoke(app, [*words, *more, *lenient]).exit_code == 0
