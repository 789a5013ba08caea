"""Costs of ranks of tensor-parallel sets, from models, clusters and links."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zorse_megatron.costs.interface import WHOLE, RankPart
from zorse_megatron.planner.evaluate.simulate_plan import simulate_plan
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.planner.inputs.split_costs import told_local_sizes
from zorse_megatron.schema.cluster.cluster_yaml import load_cluster
from zorse_megatron.schema.model.computing import Computing
from zorse_megatron.schema.model.model_shape import ModelShape
from zorse_megatron.schema.plan.plan import Chunk, Group, Parts, Plan, Replica, Schedule
from zorse_megatron.simulate.ledger import Category

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


def one_set(inputs, ranks: int, parts: Parts | None = None) -> Plan:
    replica = Replica(
        ranks=tuple(range(ranks)),
        micro_batch_size=SIZE,
        num_microbatches=BATCH // SIZE,
        shard_weight=1.0,
        parts=parts,
    )
    return Plan(
        schema_version=1,
        model=inputs.model,
        global_batch_size=BATCH,
        groups=(Group(replicas=(replica,)),),
        chunks=(Chunk(group=0, layers=(0, MODEL.num_layers)),),
        schedule=Schedule(name="1f1b"),
    )


@pytest.mark.parametrize("degree", [2, 4])
def test_a_set_computes_its_part_and_sums_on_its_links(tmp_path, degree):
    """Four sums of an activation for each layer, one each for embedding and head, and the loss."""
    inputs = inputs_on(tmp_path / "cluster.yaml", f"{degree} x A100-40")
    result = simulate_plan(inputs, one_set(inputs, degree))
    own = inputs.sets.of_rank(RankPart(degree=degree), None).compute
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
        state = result.memory[rank].by_category[Category.OPTIMIZER_STATE].num_bytes
        assert state == 12 * owned


def test_sequence_parallelism_makes_activations_smaller_by_the_degree(tmp_path):
    """Korthikanti et al., section 4.2.2: everything that a layer keeps is divided."""
    peaks = []
    for sequence_parallel in (False, True):
        name = tmp_path / f"cluster{sequence_parallel}.yaml"
        inputs = inputs_on(name, "2 x A100-40", sequence_parallel=sequence_parallel)
        result = simulate_plan(inputs, one_set(inputs, 2))
        peaks.append(result.memory[0].by_category[Category.ACTIVATIONS].num_bytes)
        alone = inputs.memory.activation_bytes(SIZE, "none", "A100-40")
    assert peaks[1] == MODEL.num_layers * alone // 2
    norms = 4 * SIZE * MODEL.seq_length * MODEL.hidden_size * 2  # what only the sequence cuts
    assert peaks[0] - peaks[1] == MODEL.num_layers * norms // 2


@given(st.data())
def test_parts_of_all_ranks_make_the_whole(data):
    degree = data.draw(st.integers(2, 4))

    def counts(total, least):
        cuts = [0, *sorted(data.draw(st.integers(0, total)) for _ in range(degree - 1)), total]
        found = tuple(b - a for a, b in pairwise(cuts))
        return found if min(found) >= least else None

    parts = Parts(
        kv_groups=counts(8, 1),
        mlp_columns=counts(4096, 0) or (4096,) + (0,) * (degree - 1),
        vocabulary_rows=counts(32000, 1),
    )
    kv, rows = parts.kv_groups, parts.vocabulary_rows
    locals_ = [
        told_local_sizes(MODEL, RankPart(degree=degree, parts=parts, index=index))
        for index in range(degree)
    ]
    if (kv is None and 8 % degree) or (rows is None and 32000 % degree):
        return  # no such plan
    whole = MODEL.layer_parameters() - MODEL.attention_parameters - MODEL.mlp_parameters
    held = [each.layer_parameters(degree) for each in locals_]
    assert sum(each - whole for each in held) + whole == MODEL.layer_parameters()
    assert sum(e.table_parameters(degree) for e in locals_) == MODEL.table_parameters()


def test_equal_numbers_are_equal_parts(tmp_path):
    inputs = inputs_on(tmp_path / "cluster.yaml", "2 x A100-40")
    given_ = Parts(kv_groups=(4, 4), mlp_columns=(2048, 2048), vocabulary_rows=(16000, 16000))
    named, plain = (simulate_plan(inputs, one_set(inputs, 2, parts)) for parts in (given_, None))
    assert named.iteration_s == plain.iteration_s
    assert named.peak_memory_bytes == plain.peak_memory_bytes


def test_unequal_parts_suit_unequal_gpus(tmp_path):
    """An A100 and a T4: a set of halves waits for the T4, one of three quarters hardly does."""
    inputs = inputs_on(tmp_path / "cluster.yaml", "[A100-40, T4]")
    parts = Parts(kv_groups=(6, 2), mlp_columns=(3072, 1024), vocabulary_rows=(24000, 8000))
    equal = simulate_plan(inputs, one_set(inputs, 2))
    uneven = simulate_plan(inputs, one_set(inputs, 2, parts))
    assert uneven.iteration_s < 0.8 * equal.iteration_s
    assert uneven.peak_memory_bytes[0] > equal.peak_memory_bytes[0]
    assert uneven.peak_memory_bytes[1] < equal.peak_memory_bytes[1]


def test_costs_of_a_rank_alone_are_those_of_the_job(tmp_path):
    inputs = inputs_on(tmp_path / "cluster.yaml", "2 x A100-40")
    alone = inputs.sets.of_rank(WHOLE, None)
    assert alone.memory == inputs.memory
    assert alone.compute.layer("A100-40", SIZE) == inputs.compute.layer("A100-40", SIZE)
    assert not alone.compute.includes_collectives("A100-40", "layer")
    assert told_local_sizes(MODEL, RankPart(degree=4)) == MODEL


def test_halves_of_a_layer_take_what_their_parts_take(tmp_path):
    """Three quarters of the KV groups, and as many columns as the other rank."""
    compute = [
        inputs_on(tmp_path / "cluster.yaml", "2 x A100-40")
        .sets.of_rank(RankPart(degree=2, parts=Parts(kv_groups=(6, 2)), index=index), None)
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
