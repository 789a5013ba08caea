"""What the runtime holds is what the simulator says, by category.

The memory model is the planner's own for a model of this shape in float32, with unfused attention
and no dropout. It counts parameters without the padding to multiples of 64 elements that stock's
buffers have, so layers here are large enough for that not to matter. The ledger's activations are
the most that there were while an action ran: with the layer that is computed again, and the head's.
"""

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.comparison import UNTIED, flags_for
from tests.megatron.launch import RunResult, run_ranks
from tests.megatron.plans import (
    BOTH_ENDS,
    FULL,
    LAYERED,
    LAYOUTS,
    NEIGHBOURS,
    TWO_BY_TWO,
    chunked_plan,
    expert_replica,
    hierarchical,
    in_the_host,
    plan_of,
    replica,
    split,
    tp_replica,
    with_settings,
)
from tests.unit.fake_costs import FakeComm, FakeCompute
from tests.unit.fake_tp_costs import SplitCompute
from zorse_megatron.costs.interface import JobCosts, TpRankCosts, TpShard, TpTraits
from zorse_megatron.costs.model_memory import TransformerMemory, precision_of
from zorse_megatron.inputs.cluster_yaml import parse_cluster
from zorse_megatron.inputs.lora import Lora, parse_lora
from zorse_megatron.inputs.model import USUAL, Experts, ModelShape
from zorse_megatron.plan.plan import (
    Chunk,
    Group,
    Plan,
    Recompute,
    Replica,
    Schedule,
    TpShards,
)
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.planner.inputs.cost_models import told_local_sizes
from zorse_megatron.planner.inputs.search_inputs import make_inputs
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.simulate.iteration import simulate
from zorse_megatron.simulate.memory_ledger import Category, changes_of
from zorse_megatron.simulate.result import SimulationResult

HIDDEN, SEQUENCE, VOCABULARY = 128, 64, 256
MODEL = ModelShape(
    name="small",
    num_layers=4,
    hidden_size=HIDDEN,
    ffn_hidden_size=4 * HIDDEN,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=HIDDEN // 4,
    vocab_size=VOCABULARY,
    seq_length=SEQUENCE,
    position_embedding="learned",
    max_positions=SEQUENCE,
)
MEMORY = TransformerMemory(
    model=MODEL, dtype="float32", precision=precision_of("float32"), attention="unfused"
)
PLANS = {
    "1f1b": LAYOUTS["2|1"],
    "1f1b, full recomputation, state in the host": with_settings(
        LAYOUTS["2|1"], Recompute(mode="full"), optimizer_state=True
    ),
    "full recomputation, weight gradients apart": split(
        with_settings(LAYOUTS["1|1|1|1"], Recompute(mode="full"))
    ),
    "interleaved": with_settings(TWO_BY_TWO, schedule=Schedule(name="interleaved")),
    "neighbouring chunks": NEIGHBOURS,
    "in the host": in_the_host(BOTH_ENDS),
    "layered, in the host": in_the_host(LAYERED),
    "two levels": hierarchical(LAYERED, "aab"),
}
LORA = parse_lora("rank=8,alpha=16,targets=q,k,v,o,up,down", [])
ADAPTERS = replace(MEMORY, computing=replace(USUAL, lora=LORA))
WITH_ADAPTERS = ("interleaved", "in the host")
EXPERTS = replace(
    MEMORY,
    model=replace(
        MODEL,
        linear_bias=False,
        experts=Experts(num_experts=4, per_token=2, ffn_hidden_size=2 * HIDDEN),
    ),
)
OF_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", str(2 * HIDDEN)),
    *("--disable-bias-linear", "--moe-router-load-balancing-type", "none"),
)
BESIDE_EXPERTS = replace(
    EXPERTS,
    computing=replace(USUAL, lora=parse_lora("rank=32,alpha=16,targets=q,k,v,o", [])),
)
WITH_EXPERTS = ("full recomputation, weight gradients apart", "in the host")


def run(
    plan: Plan, corpus: Path, work: Path, *more: str, entry: str = "zorse_megatron.pretrain"
) -> RunResult:
    save_plan(plan, work / "plan.json")
    flags = [*flags_for(corpus, *UNTIED, steps=2)]
    for name, value in (("--hidden-size", HIDDEN), ("--seq-length", SEQUENCE)):
        flags[flags.index(name) + 1] = str(value)
    flags[flags.index("--max-position-embeddings") + 1] = str(SEQUENCE)
    flags += ["--zorse-plan", str(work / "plan.json"), *more]
    return run_ranks(flags, plan.world_size, entry=entry, timeout_s=120)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *((name, MEMORY) for name in PLANS),
        *((name, ADAPTERS) for name in WITH_ADAPTERS),
        *((name, EXPERTS) for name in WITH_EXPERTS),
        *((name, BESIDE_EXPERTS) for name in ("1f1b", "in the host")),
    ],
)
def test_peaks_are_those_of_the_simulator(
    name: str, memory: TransformerMemory, corpus: Path, tmp_path: Path
) -> None:
    plan, more = PLANS[name], () if memory.model.experts is None else OF_EXPERTS
    trained = memory.computing.lora
    lora = () if trained is None else ("--zorse-lora", str(trained))
    run(plan, corpus, tmp_path, "--zorse-memory", str(tmp_path), *more, *lora).check()
    predicted = simulate(
        plan,
        JobCosts(
            compute=FakeCompute(),
            memory=memory,
            comm=FakeComm(host_bytes_per_s=1e12),  # here a copy is done when it has been started
            kinds=["kind"] * plan.world_size,
            sequence_length=SEQUENCE,
        ),
    )
    for rank in range(plan.world_size):
        found: dict[str, Any] = json.loads((tmp_path / f"memory-rank{rank}.json").read_text())
        peaks = {category: peak["num_bytes"] for category, peak in found["peaks"].items()}
        expected = predicted.memory[rank].by_category_bytes
        assert peaks["parameters"] == pytest.approx(expected[Category.PARAMETERS], rel=0.01)
        assert peaks["optimizer state"] == pytest.approx(
            expected[Category.OPTIMIZER_STATE], rel=0.01
        )
        # When a sum arrives is not in the runtime's hands: until then two chunks have gradients.
        most = most_gradient_bytes(plan, rank, memory)
        assert 0.99 * expected[Category.GRADIENTS] <= peaks["gradients"] <= 1.01 * most
        late = max(0, most - expected[Category.GRADIENTS])
        residency = predicted.timeline.program.tracks[rank].residency
        in_host = sum(map(residency.shard_of_gradients, residency.gradients_in_host))
        assert peaks.get("gradients in the host", 0) == pytest.approx(in_host, rel=0.01)
        # In float32 stock's loss makes the softmax and the gradient in the place of the logits; the
        # model has room for a copy, as other losses need it.
        head = expected[Category.LOGITS]
        copies = logits_bytes(plan, rank) if head else 0
        activations = most_activation_bytes(predicted, rank, copies)
        assert peaks["activations"] == pytest.approx(activations, rel=0.05)
        total = predicted.memory[rank].total_bytes
        assert 0.95 * total <= peaks["total"] <= 1.05 * (total + late)


def unlike(tp_shards: TpShards | None) -> Plan:
    """A rank and a TP group of two in one group."""
    pair = tp_replica((1, 2), 2, 2, 3.0, tp_shards)
    return Plan(
        schema_version=2,
        model=LAYOUTS["2|1"].model,
        global_batch_size=LAYOUTS["2|1"].global_batch_size,
        groups=(Group(replicas=(tp_replica((0,), 2, 2), pair)),),
        chunks=tuple(Chunk(group=0, layers=(first, first + 1)) for first in range(4)),
        schedule=Schedule(name="breadth_first"),
    )


@dataclass(frozen=True, kw_only=True)
class FakeTpCosts:
    memory: TransformerMemory
    traits: TpTraits

    def of_rank(self, part: TpShard, dtype: str | None) -> TpRankCosts:
        memory = replace(
            self.memory,
            model=told_local_sizes(self.memory.model, part),
            tensor_parallel=part.degree,
            sequence_parallel=self.traits.sequence_parallel,
        )
        return TpRankCosts(compute=SplitCompute(), memory=memory)

    def cut_parameters(self, part: str) -> dict[str, int]:
        model = self.memory.model
        if part != "layer":
            return {"vocabulary_rows": model.table_parameters()}
        mlp = "mlp_columns" if model.experts is None else "experts"
        return {"kv_groups": model.attention_parameters, mlp: model.mlp_parameters}


@pytest.mark.parametrize(
    ("memory", "tp_shards", "more"),
    [
        (MEMORY, None, ()),
        (EXPERTS, TpShards(experts=(3, 1)), ()),
        (EXPERTS, TpShards(kv_groups=(0, 4), experts=(4, 0)), ("--sequence-parallel",)),
    ],
)
def test_peaks_of_a_tp_group_beside_a_rank(
    memory: TransformerMemory,
    tp_shards: TpShards | None,
    more: tuple[str, ...],
    corpus: Path,
    tmp_path: Path,
) -> None:
    """Gradients of one chunk have gone when those of the next one are made."""
    plan, more = unlike(tp_shards), (*more, *(OF_EXPERTS if memory is EXPERTS else ()))
    run(plan, corpus, tmp_path, "--zorse-memory", str(tmp_path), *more).check()
    predicted = simulate(
        plan,
        JobCosts(
            compute=SplitCompute(),
            memory=memory,
            comm=FakeComm(),
            kinds=["kind"] * 3,
            sequence_length=SEQUENCE,
            tp_costs=FakeTpCosts(
                memory=memory, traits=TpTraits(sequence_parallel="--sequence-parallel" in more)
            ),
        ),
    )
    for rank, degree in enumerate((1, 2, 2)):
        found: dict[str, Any] = json.loads((tmp_path / f"memory-rank{rank}.json").read_text())
        peaks = {category: peak["num_bytes"] for category, peak in found["peaks"].items()}
        expected = predicted.memory[rank].by_category_bytes
        for name in (Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.GRADIENTS):
            assert peaks[name.label] == pytest.approx(expected[name], rel=0.01), (rank, name)
        copies = 2 * SEQUENCE * VOCABULARY * 4 // degree
        activations = most_activation_bytes(predicted, rank, copies)
        assert peaks["activations"] == pytest.approx(activations, rel=0.05), rank


# Ranks that share experts: each with samples and experts of its own, or with none of either.
SHARED = plan_of(
    ((expert_replica((0, 1), (1, 3), (2, 1), 2), replica(2, 1, 2, 0.5)), 2),
    ((expert_replica((3, 4, 5), (2, 0, 2), (2, 2, 0), 2, 1.0, 3.0, 0.0),), 2),
)
IN_HALVES = plan_of(
    ((expert_replica((0, 1), (1, 3), (4, 2), 1, overlap=True), replica(2, 1, 2, 0.5)), 2),
    ((expert_replica((3, 4, 5), (2, 0, 2), (2, 2, 0), 2, 1.0, 3.0, 0.0, overlap=True),), 2),
)
IN_HALVES_BREADTH_FIRST = chunked_plan(
    [
        (expert_replica((0, 1, 4), (1, 3, 0), (2, 2, 0), 1, overlap=True), replica(2, 1, 4)),
        (replica(3, 4, 2),),
    ],
    [(0, 1), (1, 2), (0, 1)],
)


@pytest.mark.parametrize(
    ("plan", "dense"),
    [
        pytest.param(SHARED, (), id="1f1b"),
        pytest.param(with_settings(SHARED, FULL), (1, 3), id="dense layers, recomputed"),
        pytest.param(split(with_settings(SHARED, FULL)), (), id="recomputed, apart"),
        pytest.param(split(SHARED), (0, 3), id="dense layers, weight gradients apart"),
        pytest.param(IN_HALVES, (1, 3), id="dense layers, overlapped"),
        pytest.param(split(IN_HALVES), (), id="overlapped, weight gradients apart"),
        pytest.param(IN_HALVES_BREADTH_FIRST, (), id="overlapped, breadth first"),
    ],
)
def test_peaks_of_ranks_that_share_experts(
    plan: Plan, dense: tuple[int, ...], corpus: Path, tmp_path: Path
) -> None:
    """Routing is even, as the simulator takes it to be. Nothing is kept but what it counts."""
    assert EXPERTS.model.experts is not None
    model, frequency = replace(EXPERTS.model, dense_layers=dense), [1] * 4
    for layer in dense:
        frequency[layer] = 0
    flags = (*OF_EXPERTS, "--moe-layer-freq", str(frequency).replace(" ", ""))
    entry = "tests.megatron.even_routers_entry"
    run(plan, corpus, tmp_path, "--zorse-memory", str(tmp_path), *flags, entry=entry).check()
    predicted = simulate(plan, replace(costs_of_parts(plan, model), comm=FakeComm()))
    for rank in range(plan.world_size):
        found: dict[str, Any] = json.loads((tmp_path / f"memory-rank{rank}.json").read_text())
        peaks = {category: peak["num_bytes"] for category, peak in found["peaks"].items()}
        expected = predicted.memory[rank].by_category_bytes
        for name in (Category.PARAMETERS, Category.OPTIMIZER_STATE, Category.GRADIENTS):
            assert peaks[name.label] == pytest.approx(expected[name], rel=0.01), (rank, name)
        copies = logits_bytes(plan, rank) if expected[Category.LOGITS] else 0
        activations = most_activation_bytes(predicted, rank, copies)
        small = small_bytes(plan, rank)
        assert activations <= peaks["activations"] <= activations + small, rank
        # Exchanges of unlike replicas come and go while an action runs.
        assert peaks["total"] <= 1.01 * predicted.memory[rank].total_bytes + small, rank


def costs_of_parts(plan: Plan, model: ModelShape, lora: Lora | None = None) -> JobCosts:
    """Those of ranks that may share experts; routing is even."""
    return make_inputs(
        parse_cluster(f"nodes: [{{name: a, gpus: {plan.world_size} x A100-40}}]".encode()),
        model,
        None,
        global_batch_size=plan.global_batch_size,
        dtype="float32",
        computing=replace(USUAL, attention="unfused", lora=lora),
    )


def small_bytes(plan: Plan, rank: int) -> int:
    """At most: what layers keep that the memory model does not count, of all micro-batches.

    Of each token mean and deviation in two norms of each layer, a row of a mask in each chunk, and
    at the ends its number, its position, its label and its loss; of each layer tokens by expert. A
    mask of no samples is a part of that of one.
    """
    replica, chunks = replica_of(plan, rank), plan.chunks_of_group(plan.group_of_rank(rank))
    bounds = [plan.chunks[chunk].layers for chunk in chunks]
    layers = sum(stop - first for first, stop in bounds)
    per_token = 2 * 2 * 4 * layers + 64
    masks = max(1, samples_of(replica, rank)) * SEQUENCE * SEQUENCE * len(chunks)
    tokens = samples_of(replica, rank) * SEQUENCE
    return replica.num_microbatches * (tokens * per_token + masks + 64 * layers)


def replica_of(plan: Plan, rank: int) -> Replica:
    """The one that the rank is in."""
    (found,) = (r for g in plan.groups for r in g.replicas if rank in r.ranks)
    return found


def samples_of(replica: Replica, rank: int) -> int:
    """The rank's own of a micro-batch."""
    shared = replica.expert_parallel
    if shared is None:
        return replica.micro_batch_size
    return shared.samples[replica.ranks.index(rank)]


def logits_bytes(plan: Plan, rank: int) -> int:
    """One matrix of a micro-batch's logits in float32."""
    return samples_of(replica_of(plan, rank), rank) * SEQUENCE * VOCABULARY * 4


def most_activation_bytes(predicted: SimulationResult, rank: int, copies: int) -> int:
    """The highest of what layers keep, with the head's part in forwards only, less these copies.

    Changes at one moment count one after the other, as in `peak_memory`.
    """
    track, times = predicted.timeline.program.tracks[rank], predicted.timeline.times
    forwards_s = {
        times.start_s[track.first_task(position)]
        for position, action in enumerate(track.actions)
        if action.kind is Kind.FORWARD
    }
    held = head = highest = 0
    for time_s, category, num_bytes in changes_of(predicted.timeline, rank)[1]:
        if category is Category.ACTIVATIONS:
            held += num_bytes
        elif category is Category.LOGITS:
            head = max(0, num_bytes - copies)
        highest = max(highest, held + (head if time_s in forwards_s else 0))
    return highest


def most_gradient_bytes(plan: Plan, rank: int, memory: TransformerMemory) -> int:
    """Unsharded gradients of all chunks, or of two neighbours and shards of the others."""
    number = plan.group_of_rank(rank)
    last = len(plan.chunks) - 1
    sizes = []
    for chunk in plan.chunks_of_group(number):
        first, stop = plan.chunks[chunk].layers
        count = (stop - first) * memory.layer_parameters()
        count += memory.embedding_parameters() if chunk == 0 else 0
        count += memory.head_parameters(tied_on_same_rank=False) if chunk == last else 0
        sizes.append(memory.gradient_bytes(count))
    if plan.schedule.name != "breadth_first":
        return sum(sizes)
    weights = {r.ranks[0]: r.shard_weight for r in plan.groups[number].replicas}
    share = weights[rank] / sum(weights.values())
    rest = [a + b for a, b in pairwise(sizes)] or sizes
    return max(int(two + share * (sum(sizes) - two)) for two in rest)


def test_a_rank_over_its_limit_says_what_would_help(corpus: Path, tmp_path: Path) -> None:
    result = run(LAYOUTS["2|1"], corpus, tmp_path, "--zorse-memory-limit", "0.004")
    assert all(code not in (0, None) for code in result.returncodes)
    said = "\n".join(result.outputs)
    assert "A rank needs more memory than it has" in said
    assert "expected 4,000,000 bytes" in said
    assert "Most of it is" in said and "(chunk 1)" in said


def test_a_limit_that_is_no_number_is_refused(corpus: Path, tmp_path: Path) -> None:
    result = run(LAYOUTS["2|1"], corpus, tmp_path, "--zorse-memory-limit", "plenty")
    assert set(result.returncodes) == {2}
    assert "--zorse-memory-limit: found 'plenty'" in result.outputs[0]
