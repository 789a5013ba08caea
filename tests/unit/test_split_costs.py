"""Costs of ranks of tensor-parallel groups, from models, clusters and links."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.made_plans import plan_of, replica
from tests.unit.profile_samples import good
from zorse_megatron.costs.interface import WHOLE, TpShard
from zorse_megatron.costs.profiled_compute import ProfiledCompute
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import Computing, ModelShape
from zorse_megatron.inputs.profile import parse_profile
from zorse_megatron.plan.plan import Plan, TpShards
from zorse_megatron.planner.inputs.cost_models import told_local_sizes
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.planner.inputs.tensor_parallel_members import tp_collectives
from zorse_megatron.planner.simulate_plan import simulate_plan
from zorse_megatron.simulate.memory_ledger import Category

MODEL = ModelShape(
    name="small",
    num_layers=4,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    num_query_groups=8,
    kv_channels=64,
    vocab_size=32000,
    seq_length=512,
    activation="swiglu",
)
BATCH, SIZE = 8, 2


def inputs_on(path: Path, gpus: str, **computing):
    path.write_text(f"nodes:\n  - gpus: {gpus}\n")
    return make_inputs(
        load_cluster(path),
        MODEL,
        None,
        global_batch_size=BATCH,
        dtype="float16",
        computing=Computing(attention="flash", **computing),
    )


def one_tp_group(inputs, ranks: int, tp_shards: TpShards | None = None) -> Plan:
    one = replica(*range(ranks), size=SIZE, count=BATCH // SIZE, tp_shards=tp_shards)
    plan = plan_of([one], layers=MODEL.num_layers)
    return replace(plan, model=inputs.model)


@pytest.mark.parametrize("degree", [2, 4])
def test_a_tp_group_computes_its_part_and_sums_on_its_links(tmp_path, degree):
    """Four sums of an activation for each layer, one each for embedding and head, and the loss."""
    inputs = inputs_on(tmp_path / "cluster.yaml", f"{degree} x A100-40")
    result = simulate_plan(inputs, one_tp_group(inputs, degree))
    own = inputs.tp_costs.of_rank(TpShard(degree=degree), None).compute
    parts = [own.layer("A100-40", SIZE)] * MODEL.num_layers
    parts += [own.embedding("A100-40", SIZE), own.head("A100-40", SIZE)]
    ranks = tuple(range(degree))
    sum_s = inputs.comm.all_reduce_s(ranks, SIZE * MODEL.seq_length * MODEL.hidden_size * 2)
    loss_s = inputs.comm.all_reduce_s(ranks, SIZE * MODEL.seq_length * 4)
    of_micro_batch = sum(each.forward_s + each.backward_s for each in parts)
    of_micro_batch += (4 * MODEL.num_layers + 2) * sum_s + 3 * loss_s
    # Ranks with different parts own all of theirs.
    owned = MODEL.num_layers * MODEL.layer_parameters(degree)
    owned += MODEL.embedding_parameters(degree) + MODEL.head_parameters(degree)
    expected_s = BATCH / SIZE * of_micro_batch + own.step_s("A100-40", owned)
    for rank in ranks:
        assert result.usage[rank].busy_s == pytest.approx(expected_s)
        state = result.memory[rank].by_category_bytes[Category.OPTIMIZER_STATE]
        assert state == 12 * owned


def test_sequence_parallelism_makes_activations_smaller_by_the_degree(tmp_path):
    """Korthikanti et al., section 4.2.2: everything that a layer keeps is divided."""
    peaks = []
    for sequence_parallel in (False, True):
        name = tmp_path / f"cluster{sequence_parallel}.yaml"
        inputs = inputs_on(name, "2 x A100-40", sequence_parallel=sequence_parallel)
        result = simulate_plan(inputs, one_tp_group(inputs, 2))
        peaks.append(result.memory[0].by_category_bytes[Category.ACTIVATIONS])
        alone = inputs.memory.activation_bytes(SIZE, "none", "A100-40")
    assert peaks[1] == MODEL.num_layers * alone // 2
    norms = 4 * SIZE * MODEL.seq_length * MODEL.hidden_size * 2  # what only the sequence cuts
    assert peaks[0] - peaks[1] == MODEL.num_layers * norms // 2


@given(st.data())
def test_parts_of_all_ranks_make_the_whole(data):
    degree = data.draw(st.integers(2, 4))

    def counts(total):
        cuts = [0, *sorted(data.draw(st.integers(0, total)) for _ in range(degree - 1)), total]
        return tuple(b - a for a, b in pairwise(cuts))

    tp_shards = TpShards(
        kv_groups=counts(8),
        mlp_columns=counts(4096),
        vocabulary_rows=counts(32000),
    )
    locals_ = [
        told_local_sizes(MODEL, TpShard(degree=degree, tp_shards=tp_shards, index=index))
        for index in range(degree)
    ]
    whole = MODEL.layer_parameters() - MODEL.attention_parameters - MODEL.mlp_parameters
    held = [each.layer_parameters(degree) for each in locals_]
    assert sum(each - whole for each in held) + whole == MODEL.layer_parameters()
    assert sum(e.table_parameters(degree) for e in locals_) == MODEL.table_parameters()


def test_equal_numbers_are_equal_parts(tmp_path):
    inputs = inputs_on(tmp_path / "cluster.yaml", "2 x A100-40")
    given_ = TpShards(kv_groups=(4, 4), mlp_columns=(2048, 2048), vocabulary_rows=(16000, 16000))
    named, plain = (
        simulate_plan(inputs, one_tp_group(inputs, 2, parts)) for parts in (given_, None)
    )
    assert named.iteration_s == plain.iteration_s
    assert named.peak_memory_bytes == plain.peak_memory_bytes


def test_unequal_parts_suit_unequal_gpus(tmp_path):
    """An A100 and a T4: a TP group of halves waits for the T4, one of three quarters hardly
    does."""
    inputs = inputs_on(tmp_path / "cluster.yaml", "[A100-40, T4]")
    tp_shards = TpShards(kv_groups=(6, 2), mlp_columns=(3072, 1024), vocabulary_rows=(24000, 8000))
    equal = simulate_plan(inputs, one_tp_group(inputs, 2))
    uneven = simulate_plan(inputs, one_tp_group(inputs, 2, tp_shards))
    assert uneven.iteration_s < 0.8 * equal.iteration_s
    assert uneven.peak_memory_bytes[0] > equal.peak_memory_bytes[0]
    assert uneven.peak_memory_bytes[1] < equal.peak_memory_bytes[1]


def test_a_rank_that_holds_nothing_takes_no_time_and_no_memory_of_layers(tmp_path):
    """A TP group in which one rank has it all is that rank alone, and the TP group's
    collectives."""
    inputs = inputs_on(tmp_path / "cluster.yaml", "2 x A100-40")
    all_to_one = TpShards(kv_groups=(8, 0), mlp_columns=(4096, 0), vocabulary_rows=(32000, 0))
    alone = replace(inputs, kinds=inputs.kinds[:1])
    whole, found = (
        simulate_plan(alone, one_tp_group(alone, 1)),
        simulate_plan(inputs, one_tp_group(inputs, 2, all_to_one)),
    )
    tokens = SIZE * MODEL.seq_length
    inside_s = [
        times.forward_s + times.backward_s
        for times in (
            tp_collectives(inputs).of(part, (0, 1), tokens * MODEL.hidden_size * 2, tokens)
            for part in ("embedding", *("layer",) * MODEL.num_layers, "head")
        )
    ]
    expected_s = whole.iteration_s + BATCH // SIZE * sum(inside_s)
    # Norm and report are summed over two ranks.
    assert expected_s < found.iteration_s < expected_s + 1e-4
    has = [each.by_category_bytes[Category.PARAMETERS] for each in found.memory]
    norms = (2 * MODEL.num_layers + 1) * MODEL.norm_parameters
    biases = MODEL.num_layers * 2 * MODEL.hidden_size  # added after the sums
    assert has[0] == whole.memory[0].by_category_bytes[Category.PARAMETERS]
    assert has[1] == 2 * (norms + biases)


def test_a_rank_that_holds_nothing_beside_what_was_measured():
    kind, profile = "T4", parse_profile(json.dumps(good()).encode())
    model = profile.models[0]
    nothing = replace(model, num_attention_heads=0, num_query_groups=0, ffn_hidden_size=0)
    compute, other = (
        ProfiledCompute(profile, shape, dtype="float16", tensor_parallel=2)
        for shape in (nothing, model)
    )
    mine, theirs = compute.layer_in_two(kind, 2), other.layer_in_two(kind, 2)
    assert mine.attention.forward_s <= theirs.attention.forward_s
    assert mine.mlp.backward_s <= theirs.mlp.backward_s
    assert compute.recompute_s(kind, 2, "selective") == 0
    assert compute.head(kind, 2).forward_s == pytest.approx(other.head(kind, 2).forward_s)


def test_parts_are_like_the_measured_model_whatever_their_size(tmp_path):
    """Not like another one that has as many parameters as a part: that one was measured fast."""
    inputs = inputs_on(tmp_path / "cluster.yaml", "2 x T4")
    other = replace(MODEL, name="other", ffn_hidden_size=2048)
    profile = good()
    profile["models"] = [
        {"activation": each.activation}
        | {name: getattr(each, name) for name in profile["models"][0]}
        for each in (MODEL, other)
    ]
    profile["memory"] = []
    (like,) = profile["times"]
    analytic = inputs.compute.analytic.layer("T4", SIZE)
    profile["times"] = [
        {**like, "model": name, "seq_length": MODEL.seq_length, "micro_batch_sizes": [SIZE]}
        | {"forward_s": [factor * analytic.forward_s], "backward_s": [analytic.backward_s]}
        for name, factor in ((MODEL.name, 3.0), (other.name, 0.1))
    ]
    measured = make_inputs(
        load_cluster(tmp_path / "cluster.yaml"),
        MODEL,
        parse_profile(json.dumps(profile).encode()),
        global_batch_size=BATCH,
        dtype="float16",
        computing=Computing(attention="flash"),
    )
    for parts in (
        None,
        TpShards(kv_groups=(6, 2)),
        TpShards(kv_groups=(6, 2), mlp_columns=(96, 4000)),
    ):
        for index in (0, 1):
            part = TpShard(degree=2, tp_shards=parts, index=index if parts else 0)
            found, formula = (
                each.tp_costs.of_rank(part, None).compute.layer("T4", SIZE)
                for each in (measured, inputs)
            )
            assert found.forward_s == pytest.approx(3.0 * formula.forward_s)
            assert found.backward_s == pytest.approx(formula.backward_s)


def test_costs_of_a_rank_alone_are_those_of_the_job(tmp_path):
    inputs = inputs_on(tmp_path / "cluster.yaml", "2 x A100-40")
    alone = inputs.tp_costs.of_rank(WHOLE, None)
    assert alone.memory == inputs.memory
    assert alone.compute.layer("A100-40", SIZE) == inputs.compute.layer("A100-40", SIZE)
    assert not alone.compute.includes_collectives("A100-40", "layer")
    assert told_local_sizes(MODEL, TpShard(degree=4)) == MODEL


def test_halves_of_a_layer_take_what_their_parts_take(tmp_path):
    """Three quarters of the KV groups, and as many columns as the other rank."""
    compute = [
        inputs_on(tmp_path / "cluster.yaml", "2 x A100-40")
        .tp_costs.of_rank(
            TpShard(degree=2, tp_shards=TpShards(kv_groups=(6, 2)), index=index), None
        )
        .compute
        for index in (0, 1)
    ]
    many, few = (each.layer_in_two("A100-40", 16) for each in compute)
    wholes = [each.layer("A100-40", 16) for each in compute]
    for whole, halves in zip(wholes, (many, few), strict=True):
        assert halves.attention.forward_s + halves.mlp.forward_s == pytest.approx(whole.forward_s)
        assert halves.attention.backward_s + halves.mlp.backward_s == pytest.approx(
            whole.backward_s
        )
    assert many.mlp.forward_s == pytest.approx(few.mlp.forward_s)
    more_s = many.attention.forward_s - few.attention.forward_s
    assert more_s == pytest.approx(wholes[0].forward_s - wholes[1].forward_s)
    assert more_s > few.attention.forward_s / 3
