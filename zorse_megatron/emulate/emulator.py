"""Trains on an emulated cluster. Without torch."""

import contextlib
import dataclasses
import json
import shutil
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zorse_megatron.costs.interface import (
    WHOLE,
    DtypeCosts,
    LayerCosts,
    ModelSection,
    TpCosts,
    TpShard,
)
from zorse_megatron.costs.process_memory import fixed_bytes
from zorse_megatron.costs.shared_experts import TokenMessages
from zorse_megatron.emulate.conductor import conducted
from zorse_megatron.emulate.emulated_job import VARIABLE, EmulatedJob, JobSharing, JobTpGroups
from zorse_megatron.emulate.link_clock import LinkModel
from zorse_megatron.emulate.rank_jobs import SERVER, ForkClient, RankJob, RanksEnd
from zorse_megatron.emulate.tiny_model import HIDDEN_SIZE, TinyTraining, training_flags
from zorse_megatron.gpus.gpu import ComputeDtype
from zorse_megatron.inputs.lora import LORA_FLAG, parse_lora
from zorse_megatron.launch.rank_environment import stock_environment
from zorse_megatron.plan.divided_replicas import replicas_of_several_ranks
from zorse_megatron.plan.plan import Plan, Replica, tp_group_of_rank
from zorse_megatron.plan.plan_file import save_plan
from zorse_megatron.planner.baselines.stock_layouts import Grid
from zorse_megatron.planner.baselines.stock_plans import layout_flags
from zorse_megatron.planner.inputs.search_inputs import Inputs
from zorse_megatron.simulate.assumptions import NO_PERTURBATION, Perturbation

CORPUS_BYTES = 200_000
_CORPUS_LIMIT_S = 120.0
# After one rank has failed the others wait for it in vain.
_GRACE_AFTER_FAILURE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class System:
    """Who trains, and on which GPUs: our runtime with a plan, or stock Megatron with its flags."""

    name: str
    gpus: tuple[int, ...]
    """Rank of the job -> global rank of its GPU in the cluster."""
    plan: Plan | None = None
    flags: tuple[str, ...] = ()
    """Further flags of Megatron's."""
    stock_layout: Plan | None = None
    """Stock's layout as a plan, which is not given to it: says what each rank has of a layer."""


@dataclass(frozen=True, kw_only=True)
class EmulatedRun:
    """What came of one job. Times in seconds of the emulated cluster."""

    system: System
    iterations_s: tuple[float, ...]
    """Empty where the job ran out of memory."""
    losses: tuple[float, ...]
    spans: tuple[tuple[tuple[str, float, float], ...], ...]
    """Rank -> (F, B or STEP, start, end) of the last iteration."""
    peak_bytes: tuple[int, ...]
    """Rank -> most that its GPU held."""
    out_of_memory: str | None
    """What the rank said that ran out of memory."""

    @property
    def iteration_s(self) -> float:
        """Median over the iterations but for the first two, or fewer if there are no more."""
        # Behind the first norm ranks tell each other once what losses there are.
        warm_up = min(2, len(self.iterations_s) - 1)
        return statistics.median(self.iterations_s[warm_up:])

    def busy_s(self, rank: int) -> float:
        """How long a rank computed in the last iteration."""
        return sum(end_s - start_s for _, start_s, end_s in self.spans[rank])


@dataclass(kw_only=True)
class Emulator:
    """Runs several jobs on one emulated cluster; use `emulator` to make one."""

    inputs: Inputs
    training: TinyTraining
    directory: Path
    server: ForkClient
    perturbation: Perturbation = NO_PERTURBATION
    tell: Callable[[str], None] = lambda _phase: None
    """Takes what is being done, for people who wait."""
    timeout_s: float = 1800.0
    data: list[str] = field(default_factory=list)
    _weights: Path | None = None
    """What jobs start from."""
    _number: int = 0

    def run(self, system: System, *, ended_by: Callable[[Path], None] | None = None) -> EmulatedRun:
        """Run one job. Raises RankFailure where it fails other than by running out of memory.

        `ended_by`: runs beside it, is given the job's directory, and may end its ranks. Then the
        run is what was trained until then.
        """
        self.tell(f"{system.name}: training {self.training.iterations} iterations")
        with self._job(system) as job:
            metrics = job.directory / "metrics.jsonl"
            flags = [*self._flags(system, job), "--zorse-metrics", str(metrics)]
            with _beside(ended_by, job.directory):
                ended = self._start(job, system, flags)
            reports = [_report(job, rank) for rank in range(len(system.gpus))]
            out_of_memory = next((r["out_of_memory"] for r in reports if r["out_of_memory"]), None)
            if out_of_memory is None and ended_by is None:
                ended.check()
            return EmulatedRun(
                system=system,
                iterations_s=() if out_of_memory else _iterations_s(reports),
                losses=() if out_of_memory else _losses(metrics),
                spans=tuple(tuple(map(tuple, r["spans"])) for r in reports),
                peak_bytes=tuple(r["peak_bytes"] for r in reports),
                out_of_memory=out_of_memory,
            )

    def write_corpus(self) -> None:
        """Write the text that all jobs train on."""
        prefix = self.directory / "corpus" / "text"
        self.server.run(
            RankJob(
                name="corpus",
                entry="zorse_megatron.adapter.corpus",
                arguments=(str(prefix), str(CORPUS_BYTES)),
                world_size=1,
                directory=self.directory,
                limit_s=_CORPUS_LIMIT_S,
            )
        ).check()
        self.data = json.loads(prefix.with_suffix(".json").read_text())

    def write_weights(self) -> None:
        """Write the weights that all jobs start from: those of stock on one process.

        Stock's own layouts draw different ones from the same seed. A step at learning rate 0
        changes none of them.
        """
        directory = self.directory / "weights"
        directory.mkdir()
        small = dataclasses.replace(self.training, iterations=1, global_batch_size=1)
        flags = [*training_flags(small, self.data), "--micro-batch-size", "1"]
        still = ["--lr", "0", "--min-lr", "0", "--weight-decay", "0"]
        self.server.run(
            RankJob(
                name="weights",
                arguments=(*flags, *still, "--save", str(directory), "--save-interval", "1"),
                world_size=1,
                directory=directory,
                limit_s=self.timeout_s,
            )
        ).check()
        self._weights = directory

    @contextlib.contextmanager
    def _job(self, system: System) -> Iterator[EmulatedJob]:
        gpus, plan = system.gpus, system.plan
        layout, kinds = plan or system.stock_layout, tuple(self.inputs.kinds[gpu] for gpu in gpus)
        factors = self.perturbation.link_factors
        with conducted(LinkModel(self.inputs.comm, gpus, link_factors=factors)) as address:
            self._number += 1
            directory = self.directory / f"job_{self._number}"
            directory.mkdir()
            yield EmulatedJob(
                address=address,
                gpus=gpus,
                kinds=kinds,
                capacities_bytes=self._tensor_bytes(gpus, plan),
                host_bytes_per_s=tuple(map(self.inputs.comm.host_link_bytes_per_s, gpus)),
                costs=costs_of_ranks(self.inputs, layout, len(gpus)),
                layer_costs=layer_costs_of_ranks(self.inputs, layout, len(gpus)),
                perturbation=self.perturbation,
                sequence_length=self.training.shape.sequence_length,
                hidden_size=HIDDEN_SIZE,
                tp_groups=None if layout is None else tp_groups_of_job(self.inputs, layout, kinds),
                directory=directory,
            )
            shutil.rmtree(directory)

    def _tensor_bytes(self, gpus: Sequence[int], plan: Plan | None) -> tuple[int, ...]:
        """Rank -> what its tensors may fill; of stock, which has other communicators, the least."""
        inputs = self.inputs
        if plan is None or inputs.gpus is None:
            return tuple(inputs.tensor_capacities_bytes[gpu] for gpu in gpus)
        fixed = fixed_bytes(plan, [inputs.gpus[inputs.kinds[gpu]] for gpu in gpus])
        return tuple(
            inputs.capacities_bytes[gpu] - beside for gpu, beside in zip(gpus, fixed, strict=True)
        )

    def _start(self, job: EmulatedJob, system: System, arguments: Sequence[str]) -> RanksEnd:
        stock = stock_environment() if system.plan is None else {}
        return self.server.run(
            RankJob(
                name=system.name,
                entry="zorse_megatron.emulate.on_ranks.rank_main",
                arguments=tuple(arguments),
                world_size=len(job.gpus),
                directory=job.directory,
                limit_s=self.timeout_s,
                environment={VARIABLE: str(job.save()), **stock},
                grace_after_failure_s=_GRACE_AFTER_FAILURE_S,
            )
        )

    def _flags(self, system: System, job: EmulatedJob) -> list[str]:
        flags = [*training_flags(self.training, self.data), *self._start_flags(system)]
        flags += system.flags
        if self.training.sequence_parallel and job.tp_groups is not None:
            flags.append("--sequence-parallel")
        if system.plan is None:
            # A plan turns it on itself; said in its command, fp16 groups would have sums to scale.
            return [*flags, *self._stock_vocabulary(job), "--calculate-per-token-loss"]
        path = job.directory / "plan.json"
        save_plan(self.training.shape.plan(system.plan), path)
        return [*flags, "--micro-batch-size", "1", "--zorse-plan", str(path)]

    def _start_flags(self, system: System) -> list[str]:
        if self._weights is None:
            return []
        if LORA_FLAG in system.flags:
            return ["--pretrained-checkpoint", str(self._weights)]
        return ["--load", str(self._weights), "--finetune", "--no-load-optim", "--no-load-rng"]

    def _stock_vocabulary(self, job: EmulatedJob) -> list[str]:
        """Stock pads the vocabulary to a multiple of this times the degree of its TP groups.

        All systems are to have as many rows, and so the same loss.
        """
        if job.tp_groups is None:
            return []
        rows = self.training.shape.vocabulary_rows // len(job.tp_groups.ranks[0])
        return ["--make-vocab-size-divisible-by", str(rows)]


@contextlib.contextmanager
def emulator(
    inputs: Inputs,
    training: TinyTraining,
    *,
    perturbation: Perturbation = NO_PERTURBATION,
    tell: Callable[[str], None] = lambda _phase: None,
) -> Iterator[Emulator]:
    """An emulated cluster, with Megatron imported and a corpus written."""
    tell("importing Megatron")
    with (
        tempfile.TemporaryDirectory(prefix="zorse-emulate-") as directory,
        contextlib.closing(ForkClient(SERVER)) as server,
    ):
        made = Emulator(
            inputs=inputs,
            training=training,
            directory=Path(directory),
            server=server,
            perturbation=perturbation,
            tell=tell,
        )
        made.write_corpus()
        yield made


@contextlib.contextmanager
def _beside(watch: Callable[[Path], None] | None, directory: Path) -> Iterator[None]:
    """Run `watch` in a thread; ranks are forked by a process without threads."""
    thread = None if watch is None else threading.Thread(target=watch, args=(directory,))
    if thread is not None:
        thread.start()
    yield
    if thread is not None:
        thread.join()


_EMPTY: dict[str, Any] = {
    "norms_s": [],
    "spans": [],
    "peak_bytes": 0,
    "out_of_memory": None,
}


def _report(job: EmulatedJob, rank: int) -> dict[str, Any]:
    """What a rank has reported; one that was ended early may have said nothing."""
    path = job.report(rank)
    return dict(json.loads(path.read_text())) if path.exists() else _EMPTY


def _iterations_s(reports: Sequence[dict[str, Any]]) -> tuple[float, ...]:
    """From one norm, which all ranks wait for, to the next; the first one from the start."""
    # A rank that was killed may have reported one less than another.
    norms_s = [min(norms) for norms in zip(*(r["norms_s"] for r in reports), strict=False)]
    return tuple(end - start for start, end in zip([0.0, *norms_s], norms_s, strict=False))


def _losses(metrics: Path) -> tuple[float, ...]:
    lines = metrics.read_text().splitlines()
    return tuple(json.loads(line)["lm loss"] for line in lines)


# What each rank of an emulated job costs, alone or in a tensor-parallel group.


_SECTIONS: tuple[ModelSection, ...] = ("embedding", "layer", "head")


def costs_of_ranks(costs: LayerCosts, plan: Plan | None, world_size: int) -> tuple[DtypeCosts, ...]:
    """Each rank's costs, for its part and in its group's dtype; without a plan, in the job's."""
    if plan is None:
        return (_whole(costs, None),) * world_size
    return tuple(_of_rank(costs, plan, rank) for rank in range(world_size))


def layer_costs_of_ranks(
    inputs: Inputs, plan: Plan | None, world_size: int
) -> tuple[tuple[DtypeCosts, ...], ...]:
    """The same of each layer, where there are two kinds of them."""
    if inputs.layer_kinds is None:
        return ()
    layers = [costs_of_ranks(each, plan, world_size) for each in _each_layer(inputs)]
    return tuple(zip(*layers, strict=True))


def _each_layer(inputs: Inputs) -> list[LayerCosts]:
    return [inputs.mean(layer, layer + 1) for layer in range(inputs.num_layers)]


def tp_groups_of_job(inputs: Inputs, plan: Plan, kinds: tuple[str, ...]) -> JobTpGroups | None:
    """What ranks need to know of others of their replicas; None where there are none.

    `kinds`: of each rank's GPU.
    """
    tp_costs = inputs.tp_costs
    if tp_costs is None or not any(replicas_of_several_ranks(plan)):
        return None
    ranks, trained, layers = range(plan.world_size), inputs.model.lora, _each_layer(inputs)
    lora = None if trained is None else parse_lora(trained, [])
    return JobTpGroups(
        ranks=tuple(tp_group_of_rank(plan, rank) for rank in ranks),
        memories=tuple(_whole(inputs, _place(plan, rank)[1]).memory for rank in ranks),
        measured=tuple(_measured(tp_costs, kinds, *_place(plan, rank)) for rank in ranks),
        cut_parameters={
            "embedding": dict(tp_costs.cut_parameters("embedding")),
            "head": dict(tp_costs.cut_parameters("head")),
            **{
                number: dict((each.tp_costs or tp_costs).cut_parameters("layer"))
                for number, each in enumerate(layers)
            },
        },
        layer_parameters=tuple(each.memory.layer_parameters() for each in layers),
        sequence_length=inputs.sequence_length,
        adapter_share=0.0 if lora is None else lora.rank / (inputs.model.hidden_size or 1),
        sharing=tuple(_sharing(inputs, *_place(plan, rank)) for rank in ranks),
    )


def _sharing(inputs: Inputs, replica: Replica, dtype: ComputeDtype | None) -> JobSharing | None:
    """Of a rank of the replica."""
    shared, size = replica.expert_parallel, replica.micro_batch_size
    if shared is None:
        return None
    assert inputs.tp_costs is not None
    messages = TokenMessages.of(
        replica,
        size // shared.parts,
        tp_costs=inputs.tp_costs,
        boundary_bytes=_whole(inputs, dtype).memory.boundary_bytes,
        sequence_length=inputs.sequence_length,
    )
    return JobSharing(ranks=replica.ranks, size=size, parts=shared.parts, messages=messages)


def _place(plan: Plan, rank: int) -> tuple[Replica, ComputeDtype | None]:
    """The rank's replica, and the type that its group computes in."""
    number, index = plan.replica_of_rank(rank)
    group = plan.groups[number]
    return group.replicas[index], group.compute_dtype


def _whole(costs: LayerCosts, dtype: ComputeDtype | None) -> DtypeCosts:
    """Costs of a rank that has all of each layer."""
    if dtype is None:
        return DtypeCosts(compute=costs.compute, memory=costs.memory)
    return costs.by_dtype[dtype]


def _of_rank(costs: LayerCosts, plan: Plan, rank: int) -> DtypeCosts:
    replica, dtype = _place(plan, rank)
    part = TpShard.of(replica, rank)
    if part == WHOLE:
        return _whole(costs, dtype)
    assert costs.tp_costs is not None
    return costs.tp_costs.of_rank(part, dtype)


def _measured(
    tp_costs: TpCosts, kinds: tuple[str, ...], replica: Replica, dtype: ComputeDtype | None
) -> frozenset[ModelSection]:
    """Sections of the model whose collectives are in the times of all ranks of a TP group."""
    if len(replica.ranks) == 1:
        return frozenset()
    computes = {
        rank: tp_costs.of_rank(TpShard.of(replica, rank), dtype).compute for rank in replica.ranks
    }
    return frozenset(
        section
        for section in _SECTIONS
        if all(each.includes_collectives(kinds[rank], section) for rank, each in computes.items())
    )


# Megatron's flags for a layout of stock, on the tiny model that is trained in emulation.


# Stock's default: buckets of this many parameters (`DistributedDataParallel.__init__`).
_BUCKET_PARAMETERS = 40_000_000
_TINY_LAYER_PARAMETERS = 12 * HIDDEN_SIZE**2 + 13 * HIDDEN_SIZE


def flags_of_grid(inputs: Inputs, grid: Grid) -> tuple[str, ...]:
    """The layout's own flags; buckets of gradients are cut where those of the real model are."""
    scale = _TINY_LAYER_PARAMETERS / inputs.memory.layer_parameters()
    bucket = max(1, round(_BUCKET_PARAMETERS * scale))
    return *layout_flags(grid), "--ddp-bucket-size", str(bucket)
