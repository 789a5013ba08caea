"""Groups that compute in different types: one loss scale, one set of fp32 main parameters."""

from pathlib import Path

import pytest
import torch

from tests.megatron.comparison import (
    BASE_FLAGS,
    GLOBAL_BATCH_SIZE,
    plan_run,
    run_from_norm,
    run_recorded,
)
from tests.megatron.plans import LAYOUTS, computing_in, plan_of, replica, sending_in
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.megatron.test_mixed_precision import SINGLE_SAMPLES, flags
from tests.traces import load_trace
from tests.unit.planner_cases import simulated
from zorse_megatron.flags.model_in_flags import shape_from_flags
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.plan.plan import Plan
from zorse_megatron.planner.find_plan import find_plan
from zorse_megatron.planner.inputs.search_inputs import SearchSpace, make_inputs

SAVED, STEPS = 2, 4
MAIN = "optimizer.state.fp32_param."


# So low that nothing overflows.
LOW_SCALE = ("--bf16", "--initial-loss-scale", "16")
THREE_TYPES = ("bf16", "fp16", "fp32")
IN_A_ROW = computing_in(
    plan_of(*(((replica(rank, 1, 8),), layers) for rank, layers in enumerate((1, 2, 1)))),
    *THREE_TYPES,
)
OTHERWISE = computing_in(LAYOUTS["1|2"], "fp32", "bf16")


def test_an_overflow_in_one_group_skips_the_step_in_all_and_runs_repeat_bit_for_bit(
    corpus: Path,
) -> None:
    """At this scale fp16 overflows; bf16 and fp32 would not."""
    scale = ("--bf16", "--initial-loss-scale", "4096", "--hysteresis", "1")
    command = flags(corpus, scale, 1, 6, "--clip-grad", "0")
    plan = sending_in(computing_in(SINGLE_SAMPLES["2|1|2"], *THREE_TYPES), "bf16", None, "fp16")
    run = plan_run(plan, command)
    # The second time shards are updated in one pass each, which changes no bit on a CPU where
    # nothing is clipped; only the norm is summed otherwise.
    again = plan_run(plan, [*command, "--zorse-update", "fused"])
    assert "shards are updated by torch's AdamW" in run.outputs[0]
    assert "shards are updated in one pass each" in again.outputs[0]
    skipped = [step["skipped"] for step in run.steps]
    assert 0 < sum(skipped) < len(skipped), "the test needs both"
    assert run.losses[-1] < run.losses[0] - 0.1
    for one, other in zip(run.steps, again.steps, strict=True):
        norm, its_norm = one.pop("grad_norm"), other.pop("grad_norm")
        assert norm == its_norm or norm == pytest.approx(its_norm, rel=1e-6)
        assert one == other
    for name, copies in run.final.items():
        for copy, other in zip(copies, again.final[name], strict=True):
            assert bool(copy.isfinite().all()), name
            assert torch.equal(copy, other), name
    tied = run.final["embedding.word_embeddings.weight"]
    assert {copy.dtype for copy in tied} == {torch.bfloat16}
    for copy in run.final["output_layer.weight"]:
        assert copy.dtype == torch.float32
        assert torch.equal(copy.bfloat16(), tied[0]), "both copies have the same main parameters"


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    # Every test process imports this file; what this needs of torch takes 2 s to import.
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(directory / f"iter_{SAVED:07d}")
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


def resaved(
    plan: Plan,
    source: Path,
    target: Path,
    corpus: Path,
    *more: str,
    precision: tuple[str, ...] = LOW_SCALE,
) -> dict:
    """What the plan saves when it has loaded a checkpoint and trained no step."""
    where = ("--load", str(source), "--ckpt-step", str(SAVED), "--save", str(target))
    command = flags(
        corpus,
        precision,
        1,
        SAVED,
        *where,
        "--save-interval",
        "100",
        *more,
        "--override-opt-param-scheduler",
    )
    plan_run(plan, command)
    return tensors_in(target)


def test_checkpoints_cross_between_types(corpus: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    save = ("--save", str(there), "--save-interval", str(SAVED))
    uninterrupted = plan_run(IN_A_ROW, flags(corpus, LOW_SCALE, 1, STEPS, *save))
    from_there = ("--load", str(there), "--ckpt-step", str(SAVED))
    command = flags(corpus, LOW_SCALE, 1, STEPS, *from_there)
    resumed = plan_run(IN_A_ROW, command)
    assert resumed.steps == uninterrupted.steps[SAVED:]
    # Other groups in other types hold the same state, to the bit.
    saved = tensors_in(there)
    states = {name for name in saved if name.startswith("optimizer.state.")}
    assert len(states) > 20
    back = resaved(OTHERWISE, there, tmp_path / "otherwise", corpus)
    for name in states:
        assert saved[name].dtype == torch.float32
        assert torch.equal(saved[name], back[name]), name
    # Without the optimizer's state, main parameters are the saved parameters, to the bit.
    weights = resaved(OTHERWISE, there, tmp_path / "weights", corpus, "--no-load-optim")
    main = {name for name in states if name.startswith(MAIN)}
    assert {name.removeprefix(MAIN) for name in main} <= saved.keys()
    for name in main:
        assert torch.equal(saved[name.removeprefix(MAIN)], weights[name]), name
    # Stock reads it as one of its own.
    stock = run_recorded(command, 1)
    assert stock.losses[0] == pytest.approx(uninterrupted.losses[SAVED], abs=5e-3)


@pytest.mark.parametrize("dtypes", [("fp32", "bf16"), ("fp32", "fp32")])
def test_a_run_in_fp32_goes_on_in_any_types(
    dtypes: tuple[str, str], corpus: Path, tmp_path: Path
) -> None:
    """Its checkpoint has no main parameters: they are the weights, to the bit."""
    there = tmp_path / "there"
    save = ("--save", str(there), "--save-interval", str(SAVED))
    run_recorded(flags(corpus, (), 1, SAVED, *save), 1)
    saved = tensors_in(there)
    weights = [name for name in saved if not name.startswith("optimizer.")]
    states = [name for name in saved if name.startswith("optimizer.state.exp_avg")]
    assert len(states) == 2 * len(weights) > 20 and not any(MAIN in name for name in saved)
    plan = computing_in(LAYOUTS["1|2"], *dtypes)
    back = resaved(plan, there, tmp_path / "back", corpus, precision=())
    main = "" if set(dtypes) == {"fp32"} else MAIN
    for mine, its in [(f"{main}{name}", name) for name in weights] + [(s, s) for s in states]:
        assert torch.equal(back[mine], saved[its]), mine


CLUSTER = b"""
nodes:
  - {name: new, gpus: 1 x A100-40, nics: 1 Gb/s}
  - {name: old, gpus: 2 x T4, nics: 1 Gb/s}
"""


def test_what_the_planner_writes_for_two_generations_runs(corpus: Path, tmp_path: Path) -> None:
    """Unchanged, under a command that says no type; `test_loss_scale` says how exactly."""
    inputs = make_inputs(
        parse_cluster(CLUSTER),
        shape_from_flags([*BASE_FLAGS, *TOKENIZER_FLAGS]),
        None,
        global_batch_size=GLOBAL_BATCH_SIZE,
        dtype="auto",
        space=SearchSpace(max_micro_batch_size=2),
    )
    plan = find_plan(inputs).plan
    types = {group.ranks: group.compute_dtype for group in plan.groups}
    assert types == {(1, 2): "fp16", (0,): "bf16"}
    command = flags(corpus, ("--initial-loss-scale", "16"), 1, STEPS)
    run = plan_run(plan, [*command, "--zorse-trace", str(tmp_path)])
    # Within one rounding to bf16, and so trained on the same samples from the same weights.
    assert run.losses == pytest.approx(run_recorded(command, 1).losses, rel=2**-8)
    assert not any(step["skipped"] for step in run.steps)
    result = simulated(inputs, plan)
    for rank in range(plan.world_size):
        _, spans = load_trace(tmp_path / f"trace-rank{rank}.json")
        planned = [span.action for span in result.spans(rank)]
        assert run_from_norm(spans, 1) == planned
    dtypes = {copy.dtype for copies in run.final.values() for copy in copies}
    assert dtypes == {torch.float16, torch.bfloat16}
