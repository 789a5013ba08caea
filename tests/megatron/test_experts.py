"""Mixture of experts under any plan: losses, norms, weights and biases are one process's."""

import re
from functools import partial
from itertools import permutations, product
from pathlib import Path

import pytest
import torch

from tests.megatron.comparison import (
    BALANCED,
    BIASED,
    EXPERTS,
    LATENT,
    LLAMA,
    MASKED,
    MUON,
    NUM_LAYERS,
    OF_EACH,
    UNTIED,
    Recorded,
    assert_follows,
    flags_for,
    for_one_process,
    plan_run,
    run_recorded,
    stock_run,
)
from tests.megatron.plans import (
    FULL,
    LAYOUTS,
    NONE,
    TWO_BY_TWO,
    chunked_plan,
    expert_replica,
    in_the_host,
    plan_of,
    replica,
    split,
    tp_replica,
    with_settings,
)
from tests.megatron.stock_adapters_entry import ADAPTERS
from tests.megatron.test_checkpoints import RUNS, Saved, assert_same_rest
from tests.megatron.test_loss_scale import LOW as OVERFLOWING
from tests.megatron.test_mixed_precision import FP16_ROUNDING
from tests.megatron.test_moving import STEPS, assert_runs, both_runs
from tests.megatron.test_upstream_script import (
    EVALUATED,
    PACKED,
    tuned_on,
    write_conversations,
    write_tokenizer,
)
from tests.megatron.upstream import needs_upstream
from tests.traces import load_trace
from zorse_megatron.inputs.lora import is_adapter
from zorse_megatron.plan.plan import Plan, Replica, TpShards

# So much that a loss by other loads shows.
OF_ALL = ("--moe-router-load-balancing-type", "global_aux_loss", "--moe-aux-loss-coeff", "0.5")
MODEL = (*LLAMA, *EXPERTS)
BREADTH_FIRST = chunked_plan(
    [(replica(0, 1, 6, 3.0), replica(1, 1, 2, 1.0)), (replica(2, 4, 2),)],
    [(0, 1), (1, 2), (0, 1)],
)
PAIRS = chunked_plan(
    [(replica(0, 2, 3, 3.0), replica(1, 2, 1, 1.0)), (replica(2, 4, 2),)],
    [(0, 1), (1, 2), (0, 1)],
)
# In tensor-parallel groups ranks have some of the experts, or none of them.
IN_TP_GROUPS = plan_of(
    ((tp_replica((0, 1), 2, 4, 1.0, TpShards(experts=(1, 3))),), 1),
    (
        (
            tp_replica((2, 3), 1, 4, 1.0, TpShards(kv_groups=(2, 0), experts=(1, 3))),
            replica(4, 2, 2, 2.0),
        ),
        2,
    ),
    ((tp_replica((5, 6), 4, 2, 1.0, TpShards(kv_groups=(0, 2), experts=(4, 0))),), 1),
)
IN_A_TP_GROUP = plan_of(
    ((tp_replica((0, 1), 2, 4, 1.0, TpShards(kv_groups=(2, 0), experts=(1, 3))),), 2),
    ((replica(2, 4, 2),), 2),
)
# Ranks with samples of their own, which share experts: of any number, as their samples, none too.
SHARED = plan_of(
    ((expert_replica((0, 1), (1, 3), (2, 1), 2), replica(2, 1, 2, 0.5)), 1),
    ((expert_replica((3, 4, 5), (2, 0, 2), (1, 1, 2), 2, 1.0, 3.0, 0.0),), 2),
    (
        (
            expert_replica((6, 7), (4, 0), (2, 0), 2),
            tp_replica((8, 9), 4, 1, 0.5, TpShards(experts=(1, 3))),
        ),
        1,
    ),
)
SHARED_BREADTH_FIRST = chunked_plan(
    [(expert_replica((0, 1, 4), (1, 3, 0), (2, 1, 0), 2), replica(2, 1, 2)), (replica(3, 4, 2),)],
    [(0, 1), (1, 2), (0, 1)],
)
SHARED_BY_THREE = plan_of(
    ((expert_replica((0, 1, 2), (1, 0, 3), (2, 2, 0), 2, 1.0, 0.0, 2.0),), 3),
    ((replica(3, 8, 1),), 1),
)
overlapped = partial(expert_replica, overlap=True)
OVERLAPPED = plan_of(
    ((overlapped((0, 1), (1, 3), (2, 2), 1), replica(2, 2, 2, 0.5)), 1),
    ((overlapped((3, 4, 5), (2, 0, 2), (2, 0, 2), 2, 1.0, 3.0, 0.0),), 2),
    (
        (
            overlapped((6, 7), (4, 0), (0, 2), 2),
            tp_replica((8, 9), 4, 1, 0.5, TpShards(experts=(1, 3))),
        ),
        1,
    ),
)
OVERLAPPED_BREADTH_FIRST = chunked_plan(
    [(overlapped((0, 1, 4), (1, 3, 0), (2, 2, 0), 1), replica(2, 1, 4)), (replica(3, 4, 2),)],
    [(0, 1), (0, 1), (1, 1), (0, 1)],  # of neighbours, one has what the other returns
)
ROWS: dict[str, tuple[Plan, tuple[str, ...]]] = {
    "bias": (LAYOUTS["2|3, idle at the end"], (*MODEL, *BIASED)),
    "bias, recomputed": (with_settings(BREADTH_FIRST, FULL), (*MODEL, *BIASED, *UNTIED)),
    "in the host": (in_the_host(BREADTH_FIRST), (*MODEL, *BALANCED)),
    "GELU, groups of experts, dense layers": (
        LAYOUTS["1|2"],
        (
            *(*EXPERTS, "--disable-bias-linear", *BIASED, "--moe-layer-freq", "([0]+[1]*2+[0])"),
            *("--moe-router-num-groups", "2", "--moe-router-group-topk", "1"),
            *("--moe-router-topk-scaling-factor", "2.5"),
        ),
    ),
    "shared experts": (
        plan_of(((replica(0, 2, 3), replica(1, 2, 1)), 3), ((replica(2, 4, 2),), 1)),
        (
            *(*MODEL, *BALANCED, "--micro-batch-size", "2", "--moe-shared-expert-gate"),
            *("--moe-shared-expert-intermediate-size", "40", "--moe-router-pre-softmax"),
            *("--moe-token-dispatcher-type", "alltoall"),
        ),
    ),
    "in TP groups": (IN_TP_GROUPS, (*MODEL, *BALANCED, "--moe-z-loss-coeff", "0.01")),
    "in TP groups, sequence parallel, weight gradients apart": (
        split(IN_TP_GROUPS),
        (*MODEL, *BIASED, *UNTIED, "--sequence-parallel"),
    ),
    "in a TP group, weight gradients apart": (split(IN_A_TP_GROUP), (*MODEL, *BIASED)),
    "shared by ranks": (SHARED, (*MODEL, *BALANCED, "--moe-z-loss-coeff", "0.01")),
    "global_aux_loss, shared by ranks": (SHARED_BY_THREE, (*MODEL, *OF_ALL)),
    "global_aux_loss of two samples, breadth first, recomputed": (
        with_settings(PAIRS, FULL),
        (
            *(*MODEL, *OF_ALL, "--micro-batch-size", "2", "--moe-router-score-function", "sigmoid"),
            *("--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", "0.02"),
        ),
    ),
    # Biases that would be others if one rank's loads counted twice.
    "shared by ranks, clipped": (
        SHARED_BY_THREE,
        (*MODEL, *BIASED, "--clip-grad", "0.1", "--log-num-zeros-in-grad"),
    ),
    "seq_aux_loss and bias, shared by ranks, recomputed, weight gradients apart": (
        with_settings(split(SHARED_BREADTH_FIRST), FULL),
        (
            *(*MODEL, *OF_EACH, *UNTIED, "--moe-layer-freq", "([0]+[1]*3)"),
            *("--moe-shared-expert-intermediate-size", "40", "--moe-shared-expert-gate"),
        ),
    ),
    "overlapped": (OVERLAPPED, (*MODEL, *BALANCED, "--moe-z-loss-coeff", "0.01")),
    "seq_aux_loss and bias, overlapped, dense layers, weight gradients apart": (
        split(OVERLAPPED_BREADTH_FIRST),
        (
            *(*MODEL, *OF_EACH, *UNTIED, "--moe-layer-freq", "([1]+[0]+[1]+[0])"),
            *("--moe-shared-expert-intermediate-size", "40", "--moe-shared-expert-gate"),
        ),
    ),
    "overlapped in one group, clipped, latent attention": (
        plan_of(((overlapped((0, 1, 2), (1, 0, 3), (2, 0, 2), 2, 1.0, 0.0, 2.0),), 4)),
        (
            *(*LATENT, *EXPERTS, *BIASED, "--clip-grad", "0.1", "--overlap-grad-reduce"),
            *("--moe-router-num-groups", "2", "--moe-router-group-topk", "1"),
        ),
    ),
    "one group, overlapping": (
        LAYOUTS["5, one idle"],
        (*MODEL, *BIASED, "--overlap-grad-reduce", "--use-distributed-optimizer"),
    ),
    "weight gradients apart": (
        split(LAYOUTS["3|2"]),
        (*MODEL, *BALANCED, "--moe-z-loss-coeff", "0.01"),
    ),
    "latent queries, shared by ranks, weight gradients apart": (
        split(SHARED_BREADTH_FIRST),
        (*LATENT, *EXPERTS, *BIASED, "--q-lora-rank", "24", "--moe-layer-freq", "([0]+[1]*3)"),
    ),
    "Muon": (
        LAYOUTS["3|2"],
        (*(*MODEL, *MUON, *BALANCED, "--moe-z-loss-coeff", "0.01"), "--clip-grad", "0.5"),
    ),
    "Muon, shared by ranks": (
        SHARED_BY_THREE,
        (
            *(*MODEL, *MUON, *BIASED, "--moe-layer-freq", "([0]+[1]*3)", "--muon-nesterov"),
            *("--moe-shared-expert-intermediate-size", "40", "--moe-shared-expert-gate"),
        ),
    ),
    "Muon, shared by ranks beside a rank, sharded": (
        SHARED_BREADTH_FIRST,
        (*MODEL, *MUON, *OF_ALL, *UNTIED),
    ),
    "latent attention, in one group recomputed": (
        with_settings(BREADTH_FIRST, FULL, NONE),
        (*LATENT, *EXPERTS, *BALANCED, *UNTIED, "--rope-type", "rope"),
    ),
}


def assert_settled(alone: Recorded) -> None:
    """Rounding cannot choose other experts; `pytest -rP` shows how near they come."""
    print(f"scores of experts: {alone.smallest_gap:.1e} apart at least")
    assert alone.num_close_choices == 0, "another seed: rounding may choose other experts"


@pytest.mark.parametrize("name", ROWS)
def test_follows_one_process(name: str, corpus: Path) -> None:
    plan, more = ROWS[name]
    flags = flags_for(corpus, *more)
    alone = stock_run(for_one_process(flags))
    assert_settled(alone)
    assert_follows(plan_run(plan, flags), alone)


@pytest.mark.parametrize("plant", ["expert", "bias", "share"])
def test_a_planted_mistake_is_seen(plant: str, corpus: Path) -> None:
    """Where three ranks share experts: one counted twice in the norm, a bias that moves more than
    once a step, and gradients divided by the number of these ranks."""
    plan, more = ROWS["shared by ranks, clipped"]
    flags = flags_for(corpus, *more)
    how = {"entry": "tests.megatron.planted_entry", "env": {"ZORSE_TEST_PLANT": plant}}
    run = plan_run(plan, flags, **how)
    with pytest.raises(AssertionError):
        assert_follows(run, stock_run(for_one_process(flags)))


def test_uneven_routing_follows_one_process(corpus: Path) -> None:
    """Biases that change by 5 send nearly all tokens of every other step to those that had few."""
    flags = flags_for(corpus, *MODEL, *BIASED, "--moe-router-bias-update-rate", "5")
    alone = stock_run(for_one_process(flags))
    assert_settled(alone)
    loads = torch.stack([chosen.sum(dim=0) for chosen in alone.choices]).double()
    busiest = loads.max(dim=1).values / loads.mean(dim=1)  # of 4 experts, two per token: at most 2
    assert (busiest > 1.9).double().mean() > 0.2
    assert_follows(plan_run(SHARED_BY_THREE, flags), alone)


DOCUMENTS = ("--dataloader-inter-document-masking", *MASKED)
PACKED_ROWS: dict[str, tuple[Plan, tuple[str, ...]]] = {
    "aux_loss of two samples, breadth first, recomputed": (
        with_settings(PAIRS, FULL),
        (
            *(*DOCUMENTS, *BALANCED, "--micro-batch-size", "2", "--moe-aux-loss-coeff", "0.5"),
            *("--moe-z-loss-coeff", "0.01"),
        ),
    ),
    "seq_aux_loss and bias, in a TP group, sequence parallel": (
        IN_A_TP_GROUP,
        (*DOCUMENTS, *OF_EACH, "--sequence-parallel"),
    ),
    "global_aux_loss, in a TP group": (IN_A_TP_GROUP, (*DOCUMENTS, *OF_ALL)),
    "conversations, shared by ranks": (SHARED_BY_THREE, (*BALANCED, "--moe-z-loss-coeff", "0.01")),
    "conversations, shared by ranks, recomputed, weight gradients apart": (
        with_settings(split(SHARED_BREADTH_FIRST), FULL),
        (*BIASED, "--moe-layer-freq", "([0]+[1]*3)"),
    ),
}


@needs_upstream
@pytest.mark.parametrize("name", PACKED_ROWS)
def test_follows_one_process_on_packed_samples(name: str, corpus: Path, tmp_path: Path) -> None:
    plan, more = PACKED_ROWS[name]
    if DOCUMENTS[0] in more:
        flags = flags_for(corpus, *MODEL, *more)
    else:
        write_conversations(tmp_path / "talk.jsonl")
        write_tokenizer(tmp_path / "tokenizer")
        flags = tuned_on(tmp_path, tmp_path / "tokenizer", *MODEL, *EVALUATED, *more)
    alone = stock_run(for_one_process(flags), **PACKED)
    assert_settled(alone)
    assert_follows(plan_run(plan, flags, **PACKED), alone)


BOTH_LOSSES = (*BALANCED, "--moe-z-loss-coeff", "0.01")
ADAPTED_ROWS: dict[str, tuple[Plan, tuple[str, ...]]] = {
    "aux_loss, unequal groups": (LAYOUTS["3|2"], BOTH_LOSSES),
    "bias, recomputed": (
        with_settings(BREADTH_FIRST, FULL),
        (*BIASED, *UNTIED, "--moe-layer-freq", "([0]+[1]*3)"),
    ),
    "in the host": (in_the_host(BREADTH_FIRST), BOTH_LOSSES),
    "in a TP group, sequence parallel": (IN_A_TP_GROUP, (*BOTH_LOSSES, "--sequence-parallel")),
    "global_aux_loss, shared by ranks": (
        SHARED_BREADTH_FIRST,
        (
            *(*OF_ALL, "--moe-shared-expert-intermediate-size", "40"),
            "--moe-shared-expert-gate",
        ),
    ),
}


@pytest.mark.parametrize("name", ADAPTED_ROWS)
def test_adapters_follow_one_process(name: str, corpus: Path) -> None:
    """All else stays, the experts' bias too; losses of routers reach adapters before them."""
    plan, more = ADAPTED_ROWS[name]
    flags = flags_for(corpus, *MODEL, *more)
    alone = stock_run(for_one_process(flags), entry="tests.megatron.stock_adapters_entry")
    assert_settled(alone)
    run = plan_run(plan, (*flags, "--zorse-lora", ADAPTERS))
    assert_follows(run, alone)
    for before, after in zip(run.initial, run.of_ranks, strict=True):
        for weight, value in before.items():
            changed = not torch.equal(value, after[weight])
            assert changed == is_adapter(weight) or not value.numel(), weight


def test_the_trace_has_the_bytes_that_ranks_send_to_experts(corpus: Path, tmp_path: Path) -> None:
    """Of each exchange; rows are counted from the choices of one process of stock."""
    flags = flags_for(corpus, *MODEL, *BALANCED)
    alone = stock_run(for_one_process(flags))
    assert_settled(alone)
    plan_run(SHARED_BY_THREE, (*flags, "--zorse-trace", str(tmp_path)))
    experts, samples, layers, copies = ((0,), (), (1, 2, 3)), (2, 2, 0), 3, 2
    first = (0, 2, 4)  # of each rank's samples in a micro-batch of 4
    traces = [load_trace(tmp_path / f"trace-rank{rank}.json")[1] for rank in range(4)]

    def rows(step: int, number: int, layer: int) -> list[list[int]]:
        """[source][target] of a micro-batch."""
        found = [[0] * 3 for _ in experts]
        for source, target in permutations(range(3), 2):
            start = step * 8 + number * 4 + first[source]
            for sample in range(start, start + samples[source]):
                chosen = alone.choices[sample * NUM_LAYERS + layer]
                is_there = chosen[:, list(experts[target])].any(dim=1)
                found[source][target] += int(is_there.sum())
        return found

    for step, number, rank in product(range(len(alone.steps)), range(2), range(3)):
        spans = {span.action: span for span in traces[rank] if span.step == step}
        tokens = samples[rank] * 32
        told = [tokens * copies * 4 * (other != rank) for other in range(3)]
        forward, backward = [], []
        for layer in range(layers):
            sent = rows(step, number, layer)
            there = [32 * 4 * count for count in sent[rank]]
            back = [32 * 4 * of_source[rank] for of_source in sent]
            weights = [2 * each for each in told]  # in fp64, as the router
            forward += [told, there, weights, back]
            others = [samples[other] * 32 * copies * 8 * (other != rank) for other in range(3)]
            backward[:0] = [there, back, others]
        assert spans[f"0F{number}"].sent_bytes == forward
        assert spans[f"0B{number}"].sent_bytes == backward
    assert not any(span.sent_bytes for span in traces[3])


def test_the_first_rank_of_a_tp_group_chooses_experts(corpus: Path) -> None:
    """Here others compute other scores, as another kind of GPU does where it rounds otherwise."""
    flags = flags_for(corpus, *MODEL, *BIASED, "--sequence-parallel")
    run = plan_run(
        IN_A_TP_GROUP,
        flags,
        entry="tests.megatron.planted_entry",
        env={"ZORSE_TEST_PLANT": "routers"},
    )
    assert_follows(run, stock_run(for_one_process(flags)))


def test_loss_scales_reach_the_losses_of_routers(corpus: Path) -> None:
    """In fp16 the loss is divided before its backward, which these losses dominate here."""
    kinds = ("--moe-router-load-balancing-type", "aux_loss", "global_aux_loss")
    heavy = (*kinds, "--moe-aux-loss-coeff", "10", "10")
    flags = flags_for(corpus, *MODEL, *heavy, "--fp16", "--initial-loss-scale", "64")
    command = tuple(flag for flag in flags if flag != "--calculate-per-token-loss")
    run, alone = plan_run(LAYOUTS["3|2"], command), stock_run(command)
    assert run.losses == pytest.approx(alone.losses, rel=FP16_ROUNDING)
    assert run.grad_norms == pytest.approx(alone.grad_norms, rel=0.01)
    light = plan_run(LAYOUTS["3|2"], (*command, "--moe-aux-loss-coeff", "0", "0"))
    assert light.grad_norms[0] < 0.8 * run.grad_norms[0], "the losses do not matter"


def test_layers_in_halves_are_watched_after_skipped_steps(corpus: Path) -> None:
    """On the rank that has samples, of two that share experts."""
    flags = flags_for(corpus, *MODEL, *BIASED, *OVERFLOWING)
    run = plan_run(
        plan_of(((overlapped((0, 1), (1, 3), (4, 0), 2),), 4)),
        tuple(flag for flag in flags if flag != "--calculate-per-token-loss"),
        entry="tests.megatron.planted_entry",
        env={"ZORSE_TEST_PLANT": "large 0"},
    )
    assert all(step["skipped"] for step in run.steps)
    named = [re.findall(r"on rank (\d): the output of layer (\d)", out) for out in run.outputs]
    assert named == [[("0", "0")], []]


def test_norms_of_halves_are_recomputed(corpus: Path) -> None:
    """Each of its own half."""
    modules = ("--recompute-granularity", "selective", "--recompute-modules", "layernorm", "mlp")
    flags = flags_for(corpus, *MODEL, *BIASED, *modules, "--moe-layer-freq", "([1]+[0]+[1]*2)")
    how = {"entry": "tests.megatron.planted_entry", "env": {"ZORSE_TEST_PLANT": "engine"}}
    alone = run_recorded(for_one_process(flags), 1, **how)
    assert_settled(alone)
    assert_follows(plan_run(OVERLAPPED_BREADTH_FIRST, flags, **how), alone)


def test_what_halves_have_exchanged_is_let_go(corpus: Path) -> None:
    """After each of four layers but the last, only what experts are returning of either half."""
    run = plan_run(
        plan_of(((overlapped((0, 1), (1, 3), (2, 2), 2),), 4)),
        flags_for(corpus, *MODEL, *BIASED, steps=1),
        entry="tests.megatron.planted_entry",
        env={"ZORSE_TEST_PLANT": "rows"},
    )
    for output in run.outputs:
        assert re.findall(r"exchanged: (\d+)", output) == ["2", "2", "2", "0"] * 2


def test_biases_stay_alike_in_16_bits(corpus: Path) -> None:
    """Also where a replica has no micro-batch; unlike stock's, loads are counted in fp32."""
    flags = flags_for(corpus, *MODEL, *BIASED, "--bf16", steps=3)
    run = plan_run(LAYOUTS["2|3, idle at the end"], flags)
    biases = {name: found for name, found in run.final.items() if name.endswith("expert_bias")}
    loads = [found for name, found in run.final.items() if name.endswith("tokens_per_expert")]
    assert len(biases) == len(loads) == 4
    assert all(copy.dtype == torch.float32 for copies in loads for copy in copies)
    for copies in biases.values():
        assert all(torch.equal(copy, copies[0]) for copy in copies)
        assert all(copy.dtype == torch.float32 for copy in copies) and bool(copies[0].any())


def _logged(output: str) -> list[tuple[str, ...]]:
    """Losses of routers in each line of the log."""
    lines = [line for line in output.splitlines() if " iteration " in line]
    return [tuple(re.findall(r"(\w+_loss: [^ ]+)", line)) for line in lines]


def test_logs_what_one_process_logs(corpus: Path) -> None:
    """Under a plan whose last rank, which prints, does not hold the last layers."""
    kinds = ("--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss", "global_aux_loss")
    losses = (*kinds, "--moe-aux-loss-coeff", "0.02", "0.01", "0.03", "--moe-z-loss-coeff", "0.01")
    flags = flags_for(corpus, *MODEL, *losses, "--micro-batch-size", "2", "--log-interval", "2")
    plan = plan_of(
        ((replica(3, 4, 2),), 1),
        ((replica(0, 8, 1),), 2),
        ((replica(1, 4, 1), replica(2, 2, 2)), 1),
    )
    run, alone = plan_run(plan, flags), stock_run(for_one_process(flags))
    assert_follows(run, alone)
    logged = _logged(alone.outputs[0])
    assert [len(line) for line in logged] == [4, 4]
    assert _logged(run.outputs[-1]) == logged


RUNS["in TP groups"] = IN_TP_GROUPS
RUNS["shared by ranks"] = SHARED_BY_THREE
RUNS["shared, sharded"] = SHARED_BREADTH_FIRST


# That checkpoints are the same to the bit, `test_expert_checkpoints` shows.
@pytest.mark.parametrize(
    ("by", "then"),
    [
        *(("stock", "2x2 in the host"), ("in TP groups", "shared by ranks")),
        *(("shared by ranks", "stock"), ("stock", "in TP groups")),
    ],
)
def test_resumes(by: str, then: str, corpus: Path) -> None:
    saved = Saved(corpus)
    directory, uninterrupted = saved.by(by, *MODEL, *BIASED)
    assert_same_rest(saved.resume(then, directory, *MODEL, *BIASED), uninterrupted)


def test_resumes_with_muon(corpus: Path) -> None:
    """What ranks that share experts own of a momentum goes to others that do."""
    saved, flags = Saved(corpus), (*MODEL, *MUON, *BIASED)
    directory, uninterrupted = saved.by("shared by ranks", *flags)
    assert_same_rest(saved.resume("shared, sharded", directory, *flags), uninterrupted)


@pytest.mark.parametrize(
    "pair",
    [
        tp_replica((0, 2), 2, 4, 1.0, TpShards(experts=(1, 3))),
        expert_replica((0, 2), (1, 3), (4, 0), 2, 1.0, 2.0),
    ],
    ids=["in a TP group", "shared by ranks"],
)
def test_moves(pair: Replica, corpus: Path, tmp_path: Path) -> None:
    flags = [*Saved(corpus).flags(*MODEL, *BIASED), "--train-iters", str(STEPS)]
    then = plan_of(((pair,), 2), ((replica(1, 8, 1),), 2))
    runs = both_runs(in_the_host(TWO_BY_TWO), then, tmp_path, flags)
    assert_runs(runs, TWO_BY_TWO.world_size)
