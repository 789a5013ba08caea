"""Published training runs as plans, to validate the simulator against."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic.dataclasses import dataclass as checked_dataclass

from scripts.import_profile import Kind, Number, Positive, columns_of, read_rows
from zorse_megatron.errors import Problem, ProfileError
from zorse_megatron.plan.plan import Chunk, Group, ModelFingerprint, Plan, Replica, Schedule


@checked_dataclass(frozen=True, kw_only=True)
class RunRow:
    """A row of the table.

    `layers_per_stage`: first-last entry of each stage, joined by a bar; entry 0 is the embedding,
    the last one the head.
    """

    model: str
    gpu: Kind
    num_nodes: Positive
    pipeline_stages: Positive
    data_parallel: Positive
    tensor_parallel: Positive
    layers_per_stage: str
    micro_batch_size: Positive
    global_batch_size: Positive
    iteration_s: Number
    max_memory_bytes: Number


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One run: its layout, and what was measured. Entry 0 is the embedding, the last the head."""

    model: str
    gpu_kind: str
    num_nodes: int
    data_parallel: int
    tensor_parallel: int
    entries: tuple[tuple[int, int], ...]
    """Stage -> its first and its last entry."""
    micro_batch_size: int
    global_batch_size: int
    iteration_s: float
    max_memory_bytes: float
    """On the fullest GPU."""

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return len(self.entries) * self.data_parallel * self.tensor_parallel

    @property
    def layout(self) -> str:
        """For people: stages x replicas x ranks of each, micro-batches."""
        stages, replicas = len(self.entries), self.data_parallel
        return (
            f"PP {stages} DP {replicas} TP {self.tensor_parallel}, "
            f"{self._num_microbatches} x {self.micro_batch_size}"
        )

    def plan(self) -> Plan:
        """Equal stages of equal replicas, each of one rank, which stands for a TP group of
        neighbours.

        The ranks of a TP group run the same actions at the same times; collectives within a TP
        group are in the times of its layers, as these were measured.
        """
        last = self.entries[-1][1]
        return Plan(
            schema_version=2,
            global_batch_size=self.global_batch_size,
            model=ModelFingerprint(num_layers=last - 1),
            groups=tuple(
                Group(replicas=tuple(self._replicas(s))) for s in range(len(self.entries))
            ),
            chunks=tuple(
                Chunk(group=stage, layers=(max(first, 1) - 1, min(stop, last - 1)))
                for stage, (first, stop) in enumerate(self.entries)
            ),
            schedule=Schedule(name="1f1b"),
        )

    @property
    def _num_microbatches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    def _replicas(self, stage: int) -> Iterator[Replica]:
        for index in range(self.data_parallel):
            yield Replica(
                ranks=(stage * self.data_parallel + index,),
                micro_batch_size=self.micro_batch_size,
                num_microbatches=self._num_microbatches,
                shard_weight=1.0,
            )


def read_runs(name: str, data: bytes) -> tuple[MeasuredRun, ...]:
    """Read a table of runs. Raises ProfileError with every problem."""
    return tuple(_run(row, name) for row in read_rows(RunRow, data, name))


def _run(row: RunRow, name: str) -> MeasuredRun:
    run = MeasuredRun(
        model=row.model,
        gpu_kind=row.gpu,
        num_nodes=row.num_nodes,
        data_parallel=row.data_parallel,
        tensor_parallel=row.tensor_parallel,
        entries=tuple(_stages(row.layers_per_stage, name)),
        micro_batch_size=row.micro_batch_size,
        global_batch_size=row.global_batch_size,
        iteration_s=row.iteration_s,
        max_memory_bytes=row.max_memory_bytes,
    )
    rules = {
        "pipeline_stages": len(run.entries) == row.pipeline_stages,
        "layers_per_stage": _is_whole(run.entries),
        "global_batch_size": run.global_batch_size % (run.micro_batch_size * run.data_parallel)
        == 0,
        "iteration_s": run.iteration_s > 0,
        "max_memory_bytes": run.max_memory_bytes > 0,
    }
    for column, holds in rules.items():
        if not holds:
            raise _error(name, f"{column} {getattr(row, column)}", _EXPECTED[column])
    return run


_EXPECTED = {
    "pipeline_stages": "as many stages as layers_per_stage has",
    "layers_per_stage": "stages that follow each other from 0, with three entries or more",
    "global_batch_size": "a multiple of micro_batch_size x data_parallel",
    "iteration_s": "a time above 0",
    "max_memory_bytes": "a size above 0",
}


def _stages(text: str, name: str) -> Iterator[tuple[int, int]]:
    for stage in text.split("|"):
        first, _, last = stage.partition("-")
        if not (first.isdecimal() and last.isdecimal()):
            expected = "first-last of each stage, as 0-15|16-33"
            raise _error(name, f"layers_per_stage {stage!r}", expected)
        yield int(first), int(last)


def _is_whole(entries: Sequence[tuple[int, int]]) -> bool:
    follows = all(before[1] + 1 == after[0] for before, after in pairwise(entries))
    ascends = all(first <= last for first, last in entries)
    # Every stage has a transformer layer: more than the embedding or the head alone.
    has_layers = entries[0][1] > 0 and entries[-1][0] < entries[-1][1]
    return entries[0][0] == 0 and entries[-1][1] > 1 and follows and ascends and has_layers


def _error(name: str, found: str, expected: str) -> ProfileError:
    remedy = f"The columns are {', '.join(columns_of(RunRow))}."
    problem = Problem(where=name, found=found, expected=expected, remedy=remedy)
    return ProfileError(f"{name} cannot be read", [problem])
