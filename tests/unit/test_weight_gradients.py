"""Weight gradients as a computation of their own: its place, its time and its memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from tests.action_words import parse_action_lists
from tests.examples import examples
from tests.strategies import lowerable_plans, plans
from tests.unit.fake_costs import FakeCompute, FakeMemory
from tests.unit.made_plans import dealt_out, even_plan, with_groups
from tests.unit.simulation import run
from zorse_megatron.costs.analytic_compute import AnalyticCompute, shares_of
from zorse_megatron.costs.model_memory import TransformerMemory, delayed_elements, precision_of
from zorse_megatron.gpus.known_gpus import GPU_KINDS
from zorse_megatron.inputs.model import MODELS, USUAL
from zorse_megatron.plan.plan import Plan
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.schedule.validate import ScheduleError, check_executable
from zorse_megatron.simulate.memory_ledger import Category


def equal_stages(stages: int, count: int, *, turns: int = 1, name: str = "1f1b") -> Plan:
    """One rank per stage, `turns` layers dealt out to each, `count` micro-batches; all split."""
    parameters = {"parameters": "resident"} if name == "breadth_first" else {}
    plan = dealt_out(even_plan(stages, 1, count), turns, schedule=name, **parameters)
    return with_groups(plan, split_backward=True)


def unsplit(plan: Plan) -> Plan:
    return with_groups(plan, split_backward=None)


@pytest.mark.parametrize(("stages", "rounds"), [(1, 1), (2, 1), (2, 3), (3, 2), (4, 3), (5, 2)])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (3.0, 4.0, 2.0), (2.0, 2.5, 1.5)])
@pytest.mark.parametrize("turns", [1, 2])
def test_equal_stages_take_what_the_closed_form_says(stages, rounds, times, turns):
    """m (F + B + W) + (p - 1) (F + B - W): Qi et al. 2024, table 2; F, B and W of a chunk."""
    forward_s, backward_s, weights_s = times
    count = stages * rounds
    plan = equal_stages(stages, count, turns=turns, name="interleaved" if turns > 1 else "1f1b")
    compute = FakeCompute(
        forward_s=forward_s, backward_s=backward_s + weights_s, weights_s=weights_s
    )
    work_s = count * turns * sum(times)
    bubble_s = (stages - 1) * (forward_s + backward_s - weights_s)
    assert run(plan, compute=compute).iteration_s == pytest.approx(work_s + bubble_s)
    whole_s = work_s + (stages - 1) * sum(times)
    assert run(unsplit(plan), compute=compute).iteration_s == pytest.approx(whole_s)


def test_a_breadth_first_plan_gains_while_it_drains():
    """Each of the two visits of the last group makes its gradients of inputs W sooner."""
    plan = equal_stages(3, 12, turns=2, name="breadth_first")
    compute = FakeCompute(forward_s=1.0, backward_s=2.0, weights_s=1.0)
    before, after = (run(each, compute=compute).iteration_s for each in (unsplit(plan), plan))
    assert (before, after) == (78.0, 76.0)


def test_all_stages_hold_as_many_micro_batches():
    """The first stage p of them for their backward, the last p - 1 for their weight gradients."""
    plan = equal_stages(4, 16)
    memory = FakeMemory(saved={"none": 1000}, delayed=1000)
    peaks = [
        each.by_category_bytes[Category.ACTIVATIONS] for each in run(plan, memory=memory).memory
    ]
    assert peaks == [4000] * 4


def test_a_plan_may_let_fewer_weight_gradients_wait():
    """The last stage with one sample, so it drains with p - 2 weight gradients less."""
    plan = equal_stages(4, 16)
    groups = tuple(
        replace(
            group,
            replicas=tuple(replace(each, max_delayed_wgrad=1) for each in group.replicas),
        )
        for number, group in enumerate(plan.groups)
    )
    less = replace(plan, groups=groups)
    memory = FakeMemory(saved={"none": 1000}, delayed=1000)
    found = run(less, memory=memory)
    peaks = [each.by_category_bytes[Category.ACTIVATIONS] for each in found.memory]
    assert peaks == [4000, 4000, 3000, 2000]
    whole_s, full_s = (run(each).iteration_s for each in (unsplit(plan), plan))
    assert full_s < found.iteration_s < whole_s


def test_what_a_backward_leaves_is_held_until_its_weight_gradients():
    """A single rank: 1000 bytes from the forward, and 1500 in place of them until the W."""
    plan = equal_stages(1, 1)
    found = run(plan, memory=FakeMemory(saved={"none": 1000}, delayed=1500))
    assert found.memory[0].by_category_bytes[Category.ACTIVATIONS] == 1500
    less = run(plan, memory=FakeMemory(saved={"none": 1000}, delayed=500))
    assert less.memory[0].by_category_bytes[Category.ACTIVATIONS] == 1000


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(100))
@given(plan=plans() | lowerable_plans())
def test_every_backward_of_a_split_group_has_its_weight_gradients(plan):
    lists = lower_plan(plan)
    check_executable(lists)
    for rank, actions in enumerate(lists.ranks):
        at = {str(action): place for place, action in enumerate(actions)}
        split = plan.groups[plan.group_of_rank(rank)].split_backward
        backwards = [action for action in actions if action.kind is Kind.BACKWARD]
        weights = [action for action in actions if action.kind is Kind.WEIGHT_GRADIENT]
        assert len(weights) == (len(backwards) if split else 0)
        for action in weights:
            word = f"{action.chunk}{{}}{action.micro_batch}"
            assert at[word.format("B")] < at[word.format("W")] < at[f"{action.chunk}REDUCE_GRAD"]
        for chunk in {action.chunk for action in weights}:
            order = [action.micro_batch for action in backwards if action.chunk == chunk]
            assert order == [action.micro_batch for action in weights if action.chunk == chunk]


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(50))
@given(plan=plans() | lowerable_plans())
def test_splitting_changes_no_evaluation(plan):
    assert lower_plan(plan, forward_only=True) == lower_plan(unsplit(plan), forward_only=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("0F0 0W0 0B0 0REDUCE_GRAD", "0W0 before its backward"),
        ("0F0 0B0 0W0 0W0 0REDUCE_GRAD", "0W0 before its backward, or twice"),
        ("0F0 0F1 0B0 0W0 0B1 0REDUCE_GRAD 0W1", "0REDUCE_GRAD before all gradients of weights"),
        ("0F0 0F1 0B0 0W0 0B1", r"lacks weight gradients of .* \{\(0, 1\)\}"),
    ],
)
def test_lists_with_misplaced_weight_gradients_are_refused(words, said):
    with pytest.raises(ScheduleError, match=said):
        check_executable(parse_action_lists(f"rank 0: {words}"))


def test_weight_gradients_take_their_products_part_of_a_backward():
    """On an A100: 2 operations per token and parameter of a matrix, at the share of its peak."""
    model, kind = replace(MODELS["llama-7b"], seq_length=2048), "A100-80"
    compute = AnalyticCompute(model, dtype="bfloat16")
    matrices = 4 * 4096 * 4096 + 3 * 4096 * 11008
    peak = GPU_KINDS[kind].peak.of("bfloat16") * shares_of([kind], "bfloat16")[0].backward
    expected_s = 4 * 2048 * 2 * matrices / peak
    found_s = compute.weight_gradients_s(kind, 4)
    assert found_s == pytest.approx(expected_s)
    assert 0.3 < found_s / compute.layer(kind, 4).backward_s < 0.5


def test_inputs_and_output_gradients_of_four_matrices_are_kept():
    """GPT with hidden size h: inputs h, h, h, 4h and output gradients 3h, h, 4h, h per token."""
    model = replace(
        MODELS["llama-7b"],
        activation="gelu",
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=4,
        kv_channels=16,
        ffn_hidden_size=256,
        seq_length=10,
    )
    assert delayed_elements(model) == 10 * 64 * 16
    # In a TP group of 2 what is whole stays: 2 inputs and 2 output gradients of width h.
    assert delayed_elements(model, tensor_parallel=2) == 10 * 64 * (4 + 6)
    assert delayed_elements(model, tensor_parallel=2, splits_inputs=True) == 10 * 64 * (3 + 6)


@pytest.mark.parametrize(("is_local", "inputs"), [(True, 1), (False, 2)])
def test_layers_of_transformer_engine_keep_the_inputs_that_they_have_gathered(is_local, inputs):
    model = MODELS["llama-7b"]
    memory = TransformerMemory(
        model=model,
        dtype="bfloat16",
        precision=precision_of("bfloat16"),
        computing=replace(USUAL, is_local=is_local),
        tensor_parallel=2,
        sequence_parallel=True,
    )
    parts = 2 * 4096 + inputs * 4096 + (4096 + 11008 + 3 * 4096 + 2 * 11008) // 2
    assert memory.delayed_bytes(3) == 3 * 2 * model.seq_length * parts
