"""Gradients that wait in the host between their reduction and the step change no bit.

Against the same plan with gradients on the GPUs: losses, norms, the count of zeros, weights. With
clipping, and with steps that overflow and are skipped.
"""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.examples import examples
from tests.megatron import small_pieces
from tests.megatron.comparison import (
    GLOBAL_BATCH_SIZE,
    NUM_LAYERS,
    Recorded,
    computing_in,
    plan_run,
    stock_run,
)
from tests.megatron.launch import run_ranks
from tests.megatron.ministages import LAYERED, TWO_BY_TWO, in_the_host, with_settings
from tests.megatron.test_exactness import MASKED, UNTIED, assert_equal_runs, flags_for
from tests.megatron.test_ministages import assert_same_bits
from tests.strategies import lowerable_plans
from zorse_megatron.plan.plan import Offload, Plan
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.pipeline_schedules import RESIDENT, parameters_setting
from zorse_megatron.schedule.transfer_windows import offloaded_gradients

PIECES = {"env": {small_pieces.NAME: "1000"}}
CLIPPED = ("--clip-grad", "0.1", "--log-num-zeros-in-grad")


def offloading_gradients(plan: Plan, gradients: bool) -> Plan:
    """The plan; all ranks offload gradients beside what they offload, or none does."""

    def own(offload: Offload | None) -> Offload:
        return dataclasses.replace(offload or Offload(), gradients=gradients)

    groups = [
        dataclasses.replace(
            group,
            offload=own(group.offload),
            replicas=tuple(
                dataclasses.replace(each, offload=own(each.offload)) if each.offload else each
                for each in group.replicas
            ),
        )
        for group in plan.groups
    ]
    return dataclasses.replace(plan, groups=tuple(groups))


def some_leave(plan: Plan, *, tied: bool = False) -> bool:
    """Whether any gradients would wait in the host if all ranks offloaded theirs."""
    if parameters_setting(plan) == RESIDENT:
        return False
    lists = lower_plan(offloading_gradients(plan, True), tied=tied)
    return any(map(offloaded_gradients, lists.ranks))


def assert_changes_no_bit(plan: Plan, flags: list[str], *, tied: bool) -> Recorded:
    on_gpu, in_host = (offloading_gradients(plan, each) for each in (False, True))
    assert some_leave(in_host, tied=tied), "the test needs gradients that are offloaded"
    run, other = plan_run(in_host, flags, **PIECES), plan_run(on_gpu, flags, **PIECES)
    assert_same_bits(run, other, "gradients in the host")
    assert run.steps == other.steps
    return run


@pytest.mark.parametrize("tied", [True, False])
def test_follows_stock(tied: bool, corpus: Path) -> None:
    flags = flags_for(corpus, *(() if tied else UNTIED), *MASKED, *CLIPPED)
    run = assert_changes_no_bit(in_the_host(LAYERED), flags, tied=tied)
    assert all(norm > 0.1 for norm in run.grad_norms), "the test needs clipping"
    assert_equal_runs(run, stock_run(flags))


def test_overflows_where_gradients_on_the_gpu_do(corpus: Path) -> None:
    """One group in fp16, one in bf16; the first step overflows in fp16 and is skipped."""
    scale = ("--bf16", "--initial-loss-scale", "16384", "--hysteresis", "1")
    more = (*CLIPPED, *scale, "--lr-warmup-iters", "0")
    flags = flags_for(corpus, *UNTIED, *MASKED, *more, steps=6)
    plan = computing_in(in_the_host(TWO_BY_TWO), "fp16", "bf16")
    run = assert_changes_no_bit(plan, flags, tied=False)
    skipped = [step["skipped"] for step in run.steps]
    assert skipped[0] and sum(skipped) < len(skipped) - 1, "the test needs both"


def test_gradients_in_16_bits(corpus: Path) -> None:
    """A step in parts makes fp32 copies of a part at a time, also where gradients stay."""
    flags = flags_for(corpus, *UNTIED, *MASKED, *CLIPPED, "--bf16", "--grad-reduce-in-bf16")
    run = assert_changes_no_bit(with_settings(LAYERED, optimizer_state=True), flags, tied=False)
    assert_same_bits(run, plan_run(LAYERED, flags), "all on the GPUs")


@settings(
    max_examples=examples(4),
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(
    plan=lowerable_plans(
        4,
        2,
        num_layers=NUM_LAYERS,
        global_batch_size=GLOBAL_BATCH_SIZE,
        schedule_names=("breadth_first",),
    ).filter(some_leave)
)
def test_any_plan(plan: Plan, corpus: Path) -> None:
    flags = flags_for(corpus, *UNTIED, *MASKED, *CLIPPED)
    assert_changes_no_bit(plan, flags, tied=False)


def test_the_fused_update_is_refused(corpus: Path, tmp_path: Path) -> None:
    save_plan(in_the_host(LAYERED), tmp_path / "plan.json")
    flags = [*flags_for(corpus), "--zorse-plan", str(tmp_path / "plan.json")]
    result = run_ranks([*flags, "--zorse-update", "fused"], 3, timeout_s=60)
    assert all(code not in (0, None) for code in result.returncodes)
    assert "fused, while the plan offloads gradients" in "\n".join(result.outputs)
