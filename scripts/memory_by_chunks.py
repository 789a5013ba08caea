"""How memory for parameters and gradients falls with the number of chunks, and what that costs.

    python scripts/memory_by_chunks.py --json memory-by-chunks.json --png memory-by-chunks.png

Two groups of four ranks, 32 layers dealt out in turn, 1 to 8 chunks per group, in three settings:
gathered per pass (Zorse's ministages), per micro-batch (as ZeRO-3), and resident. Measured
by the runtime's ledger: a small GPT in float32, on the CPU. Simulated: the same, and Llama 7B on
the machines of examples/two-node-lab.yaml with the same plans, whether it fits there or not.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes

from zorse_megatron.costs.model_memory import TransformerMemory, precision_of
from zorse_megatron.emulate.rank_jobs import RankJob, runner_here
from zorse_megatron.errors import ZorseError
from zorse_megatron.flags.table import WITHOUT_DROPOUT, WITHOUT_EVALUATION, WITHOUT_WORKERS
from zorse_megatron.inputs.cluster_yaml import load_cluster
from zorse_megatron.inputs.model import MODELS, ModelShape
from zorse_megatron.plan.plan import (
    Chunk,
    Group,
    ModelFingerprint,
    Plan,
    Recompute,
    Replica,
    Schedule,
)
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.planner.inputs.search_inputs import Inputs, make_inputs
from zorse_megatron.plots.figures import FAINT, new_figure, save_figure
from zorse_megatron.schedule.actions import Kind
from zorse_megatron.schedule.lower import lower_plan
from zorse_megatron.simulate.iteration import simulate
from zorse_megatron.simulate.memory_ledger import Category
from zorse_megatron.simulate.result import SimulationResult

CLUSTER = Path(__file__).parents[1] / "examples" / "two-node-lab.yaml"
LARGE = MODELS["llama-7b"]
GROUPS, RANKS_PER_GROUP = 2, 4
LAYERS_PER_GROUP = LARGE.num_layers // GROUPS
MICRO_BATCHES = 8
MOST_CHUNKS = 8
HIDDEN, SEQUENCE, VOCABULARY = 64, 64, 256
SMALL = ModelShape(
    name="small",
    num_layers=LARGE.num_layers,
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
SETTINGS = {
    "per_pass": "gathered per pass",
    "per_micro_batch": "gathered per micro-batch (as ZeRO-3)",
    "resident": "resident",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan. Shares are of the fullest rank's unsharded parameters and gradients."""

    setting: str
    chunks: int
    predicted_share: float
    measured_share: float | None
    """None: not measured."""
    measured_bytes: int | None
    gathers_per_layer: float
    """In one iteration, on average."""
    reductions_per_layer: float
    large_bytes: int
    """Peak of Llama 7B's parameters and gradients, simulated."""
    large_total_bytes: int
    iteration_s: float


def plan_of(setting: str, chunks: int) -> Plan:
    """Both groups have `chunks` chunks, as equal as they can be."""
    cuts = [round(i * LAYERS_PER_GROUP / chunks) for i in range(chunks + 1)]
    listed, first = [], 0
    for number in range(chunks):
        for group in range(GROUPS):
            stop = first + cuts[number + 1] - cuts[number]
            listed.append(Chunk(group=group, layers=(first, stop)))
            first = stop
    groups = tuple(
        Group(
            replicas=tuple(
                Replica(
                    ranks=(group * RANKS_PER_GROUP + i,),
                    micro_batch_size=1,
                    num_microbatches=MICRO_BATCHES,
                    shard_weight=1.0,
                )
                for i in range(RANKS_PER_GROUP)
            ),
            recompute=Recompute(mode="full"),
        )
        for group in range(GROUPS)
    )
    return Plan(
        schema_version=2,
        global_batch_size=RANKS_PER_GROUP * MICRO_BATCHES,
        model=ModelFingerprint(num_layers=first),
        groups=groups,
        chunks=tuple(listed),
        schedule=Schedule(name="breadth_first", parameters={"parameters": setting}),
    )


def layers_peak_bytes(result: SimulationResult, rank: int) -> int:
    """The highest sum of parameters and gradients."""
    return max(
        step.by_category_bytes[Category.PARAMETERS] + step.by_category_bytes[Category.GRADIENTS]
        for step in result.memory_over_time(rank)
    )


def stage_bytes(plan: Plan, memory: TransformerMemory, rank: int) -> int:
    """Unsharded parameters and gradients of the rank's group."""
    chunks = plan.chunks_of_group(plan.group_of_rank(rank))
    layers = sum(stop - first for first, stop in (plan.chunks[c].layers for c in chunks))
    count = layers * memory.layer_parameters()
    count += memory.embedding_parameters() if 0 in chunks else 0
    last = len(plan.chunks) - 1
    count += memory.head_parameters(tied_on_same_rank=False) if last in chunks else 0
    return memory.parameter_bytes(count) + memory.gradient_bytes(count)


def measure(plan: Plan, work: Path, corpus: Path, tokenizer: list[str]) -> list[int]:
    """Rank -> peak parameters and gradients in bytes, by the ledger of a run of two steps."""
    save_plan(plan, work / "plan.json")
    flags: dict[str, object] = {
        "--num-layers": SMALL.num_layers,
        "--hidden-size": HIDDEN,
        "--num-attention-heads": SMALL.num_attention_heads,
        "--seq-length": SEQUENCE,
        "--max-position-embeddings": SEQUENCE,
        "--micro-batch-size": 1,
        "--global-batch-size": plan.global_batch_size,
        "--train-iters": 2,
        "--lr": 1e-3,
        "--lr-decay-style": "constant",
        "--data-path": corpus,
        "--split": "100,0,0",
        "--distributed-timeout-minutes": 2,
        "--zorse-plan": work / "plan.json",
        "--zorse-memory": work,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    words += [*WITHOUT_EVALUATION, *WITHOUT_WORKERS, *WITHOUT_DROPOUT]
    words += ["--untie-embeddings-and-output-weights", *tokenizer]
    job = RankJob(
        name="ledger",
        arguments=tuple(words),
        world_size=plan.world_size,
        directory=work,
        limit_s=420.0,
    )
    with runner_here(has_gpu=False) as run_job:
        run_job(job)
    ledgers = [work / f"memory-rank{rank}.json" for rank in range(plan.world_size)]
    peaks = [json.loads(path.read_text())["peaks"] for path in ledgers]
    return [peak["parameters and gradients"]["num_bytes"] for peak in peaks]


def row_of(setting: str, chunks: int, inputs: Inputs, measured: list[int] | None) -> Row:
    """Simulate one plan, and put beside it what was measured."""
    plan = plan_of(setting, chunks)
    small = TransformerMemory(
        model=SMALL, dtype="float32", precision=precision_of("float32"), attention="unfused"
    )
    results = [simulate(plan, replace(inputs, memory=memory)) for memory in (small, inputs.memory)]
    ranks = range(plan.world_size)
    whole = [stage_bytes(plan, small, rank) for rank in ranks]
    highest = max(ranks, key=lambda rank: layers_peak_bytes(results[0], rank) / whole[rank])
    counts: Counter[Kind] = Counter(a.kind for a in lower_plan(plan).ranks[highest])
    return Row(
        setting=setting,
        chunks=chunks,
        predicted_share=layers_peak_bytes(results[0], highest) / whole[highest],
        measured_share=None if measured is None else measured[highest] / whole[highest],
        measured_bytes=None if measured is None else measured[highest],
        gathers_per_layer=counts[Kind.UNSHARD] / chunks,
        reductions_per_layer=counts[Kind.REDUCE_GRAD] / chunks,
        large_bytes=max(layers_peak_bytes(results[1], rank) for rank in ranks),
        large_total_bytes=max(results[1].peak_memory_bytes),
        iteration_s=results[1].iteration_s,
    )


def all_rows(options: argparse.Namespace, work: Path) -> list[Row]:
    """Every setting with every number of chunks."""
    inputs = make_inputs(
        load_cluster(CLUSTER),
        LARGE,
        None,
        global_batch_size=RANKS_PER_GROUP * MICRO_BATCHES,
        dtype="float16",
    )
    corpus, tokenizer = None, []
    if options.measure:
        from zorse_megatron.adapter.corpus import tokenizer_flags, write_corpus

        corpus = write_corpus(work / "corpus" / "text", max_bytes=400_000).prefix
        tokenizer = tokenizer_flags()
    rows = []
    for setting in SETTINGS:
        for chunks in range(1, MOST_CHUNKS + 1):
            found = None
            if corpus is not None and chunks in options.measure:
                found = measure(plan_of(setting, chunks), work, corpus, tokenizer)
            rows.append(row_of(setting, chunks, inputs, found))
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


_LINE_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")


@dataclass(frozen=True, kw_only=True)
class ChunkLine:
    """One setting; entries are by `chunks`, those of `measured` by `measured_chunks`."""

    label: str
    chunks: Sequence[int]
    predicted: Sequence[float]
    """Share of the stage's unsharded parameters and gradients."""
    iteration_s: Sequence[float]
    measured_chunks: Sequence[int] = ()
    measured: Sequence[float] = ()


@dataclass(frozen=True, kw_only=True)
class Level:
    """A share that does not depend on the number of chunks, drawn as a thin line."""

    label: str
    share: float


def draw_by_chunks(
    path: Path, lines: Sequence[ChunkLine], levels: Sequence[Level], *, title: str, time_title: str
) -> Path:
    """Draw memory on the left (lines: predicted, circles: measured) and time on the right."""
    figure = new_figure(width_inches=10.5, height_inches=4.6)
    left, right = figure.subplots(1, 2)
    for line, colour in zip(lines, _LINE_COLOURS, strict=False):
        left.plot(line.chunks, line.predicted, color=colour, label=line.label)
        left.plot(line.measured_chunks, line.measured, "o", color=colour, markersize=6)
        right.plot(line.chunks, line.iteration_s, marker=".", color=colour)
    for level in levels:
        _draw_level(left, level, at=max(max(line.chunks) for line in lines))
    left.set_title(title, fontsize=10, loc="left")
    left.set_ylabel("peak parameters + gradients\n(share of the whole stage's)")
    left.set_ylim(0, 1.08)
    right.set_title(time_title, fontsize=10, loc="left")
    right.set_ylabel("iteration (s, simulated)")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("chunks per group")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    left.plot([], [], "o", color=FAINT, label="measured")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return save_figure(figure, path)


def _draw_level(axes: Axes, level: Level, *, at: int) -> None:
    axes.axhline(level.share, color=FAINT, linewidth=0.9, linestyle=":")
    axes.annotate(
        level.label,
        (at, level.share),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color=FAINT,
    )


def draw(rows: list[Row], path: Path) -> None:
    """Draw the figure of the docs."""
    lines = []
    for setting, label in SETTINGS.items():
        mine = [row for row in rows if row.setting == setting]
        seen = [(row.chunks, row.measured_share) for row in mine if row.measured_share is not None]
        lines.append(
            ChunkLine(
                label=label,
                chunks=[row.chunks for row in mine],
                predicted=[row.predicted_share for row in mine],
                iteration_s=[row.iteration_s for row in mine],
                measured_chunks=[chunks for chunks, _ in seen],
                measured=[share for _, share in seen],
            )
        )
    # ZeRO-2 and ZeRO-3 of textbooks: shards, and what one layer needs (ZeRO-3: two, one ahead).
    shard, layer = 1 / RANKS_PER_GROUP, 1 / LAYERS_PER_GROUP
    levels = [
        Level(label="ZeRO-2, by formula", share=(1 + shard + (1 - shard) * layer) / 2),
        Level(label="ZeRO-3, by formula", share=shard + (1 - shard) * 2 * layer),
    ]
    draw_by_chunks(
        path,
        lines,
        levels,
        title=f"{LARGE.num_layers} layers on {GROUPS} groups of {RANKS_PER_GROUP} ranks",
        time_title="Llama 7B on 4 A6000 and 4 V100",
    )


def main() -> int:
    """Measure, simulate, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the figure")
    parser.add_argument(
        "--measure",
        type=int,
        nargs="*",
        default=list(range(1, MOST_CHUNKS + 1)),
        metavar="CHUNKS",
        help="numbers of chunks to run, too (default: all; without a number: none)",
    )
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="zorse-chunks-") as work:
            rows = all_rows(options, Path(work))
    except ZorseError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.png is not None:
        draw(rows, options.png)
    for row in rows:
        seen = "" if row.measured_share is None else f", measured {row.measured_share:.3f}"
        print(
            f"{row.setting}, {row.chunks} chunks: {row.predicted_share:.3f} of the stage{seen}; "
            f"{row.iteration_s:.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
