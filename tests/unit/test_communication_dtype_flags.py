"""Which training commands a plan's `gradient_wire` goes with, before Megatron is imported."""

import dataclasses
from argparse import Namespace

import pytest

from tests.unit.plan_samples import good, load
from zorse_megatron.errors import FlagError
from zorse_megatron.flags.rules import command_problems
from zorse_megatron.pretrain_command import split_command

PLAN = load(good())


class Command(Namespace):
    """Parsed arguments; every flag that is not given is off."""

    def __getattr__(self, name):
        return None


def problems(comm_dtype, groups_in=(None, None, None), **flags):
    """Problems of a command whose second group has this comm_dtype; `groups_in`: compute types."""
    groups = [
        dataclasses.replace(group, compute_dtype=dtype)
        for group, dtype in zip(PLAN.groups, groups_in, strict=True)
    ]
    groups[1] = dataclasses.replace(groups[1], gradient_wire=comm_dtype)
    args = Command(**flags)
    return command_problems(args, dataclasses.replace(PLAN, groups=tuple(groups)))


KEPT_IN_FP32 = {"fp16": True, "accumulate_allreduce_grads_in_fp32": True}


@pytest.mark.parametrize(
    ("comm_dtype", "flags"),
    [
        (None, {"fp16": True}),
        ("bf16", {}),
        ("bf16", {"bf16": True}),
        ("bf16", KEPT_IN_FP32),
        ("fp16", KEPT_IN_FP32),
    ],
)
def test_accepted(comm_dtype, flags):
    assert problems(comm_dtype, **flags) == []


@pytest.mark.parametrize("flags", [{}, {"bf16": True}])
def test_fp16_messages_need_a_loss_scale(flags):
    (problem,) = problems("fp16", **flags)
    assert problem.where == "groups[1].gradient_wire"
    assert "loss scale" in problem.expected


@pytest.mark.parametrize("comm_dtype", ["bf16", "fp16"])
def test_gradients_must_be_kept_in_fp32(comm_dtype):
    (problem,) = problems(comm_dtype, fp16=True)
    assert problem.where == "groups[1].gradient_wire"
    assert "--accumulate-allreduce-grads-in-fp32" in problem.remedy


def test_a_group_in_fp16_gives_the_job_a_loss_scale_and_fp32_gradients():
    assert problems("fp16", groups_in=("fp16", None, None), bf16=True) == []
    assert problems("bf16", groups_in=("bf16", None, None), fp16=True) == []
    assert len(problems("fp16", groups_in=("bf16", None, None))) == 1


@pytest.mark.parametrize(
    "flag", ["fp16_lm_cross_entropy", "fp32_residual_connection", "grad_reduce_in_bf16"]
)
def test_flags_that_presume_one_type(flag):
    assert problems(None, **{flag: True}) == []
    (problem,) = problems(None, groups_in=("bf16", None, None), **{flag: True})
    assert problem.where == "--" + flag.replace("_", "-")


def test_the_update_of_shards_is_one_of_three():
    plan = ["--zorse-plan", "plan.json"]
    assert split_command(plan).update == "auto"
    assert split_command([*plan, "--zorse-update", "fused"]).update == "fused"
    with pytest.raises(FlagError, match="--zorse-update: found 'quick'"):
        split_command([*plan, "--zorse-update", "quick"])
