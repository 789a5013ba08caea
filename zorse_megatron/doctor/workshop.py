"""Where checks train: jobs that several of them look at are run once."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zorse_megatron.doctor.connection import Taken, read_taken
from zorse_megatron.doctor.machine import Machine
from zorse_megatron.doctor.plans import CASES
from zorse_megatron.doctor.rank_jobs import RankJob, Runner
from zorse_megatron.doctor.small_gpt import training_flags
from zorse_megatron.errors import Problem, RankFailure
from zorse_megatron.launch.shared_gpus import SHARE_GPUS
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import save_plan

ITERATIONS = 3
SAVE_EVERY = 2
CORPUS_BYTES = 200_000
STAGED = "zorse_megatron.doctor.on_ranks.staged_main"
CONNECTED = CASES[0].plan
"""The plan whose communicators are made to see whether NCCL connects ranks."""
_CONNECTION_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run wrote: iteration -> value."""

    losses: Mapping[int, float]
    grad_norms: Mapping[int, float]
    elapsed_s: Mapping[int, float]
    directory: Path


@dataclass(kw_only=True)
class Workshop:
    """Runs jobs in one directory, on one machine, until one deadline."""

    machine: Machine
    runner: Runner
    directory: Path
    ends_s: float
    """Of `time.monotonic`: no job goes on after that."""
    data: tuple[str, ...] | None = None
    """Flags of the corpus, once it is written."""
    connection: tuple[Taken, ...] | RankFailure | None = None
    """What came of connecting a plan's ranks over NCCL, once that was tried."""
    _runs: dict[str, Trained | RankFailure] = field(default_factory=dict)
    _check_ends_s: float = float("inf")

    def limit_s(self) -> float:
        """How long a job may still take. Raises RankFailure once the time is up."""
        left_s = min(self.ends_s, self._check_ends_s) - time.monotonic()
        if left_s <= 1:
            raise RankFailure("The time is up", [_TIME_IS_UP])
        return left_s

    def allow(self, limit_s: float) -> None:
        """Let the next check take so long."""
        self._check_ends_s = time.monotonic() + limit_s

    def run(self, job: RankJob) -> None:
        """Run a job, in a directory that is made for it. Raises RankFailure."""
        job.directory.mkdir(parents=True, exist_ok=True)
        self.runner.run(job)

    def connected(self) -> tuple[Taken, ...]:
        """Connect the ranks of `CONNECTED` over NCCL, or look at what came of it before.

        Raises RankFailure where NCCL connects no such ranks here.
        """
        if self.connection is None:
            limit_s = min(_CONNECTION_LIMIT_S, self.limit_s())
            try:
                self.connection = self._connect(limit_s)
            except RankFailure as failure:
                self.connection = failure  # it would fail again
        if isinstance(self.connection, RankFailure):
            raise self.connection
        return self.connection

    def _connect(self, limit_s: float) -> tuple[Taken, ...]:
        directory = self.directory / "communicators"
        directory.mkdir(parents=True, exist_ok=True)
        answer, plan = directory / "answer.json", directory / "plan.json"
        save_plan(CONNECTED, plan)
        self.run(
            RankJob(
                name="communicators",
                entry="zorse_megatron.doctor.on_ranks.communicators_main",
                arguments=(str(answer), str(plan)),
                world_size=CONNECTED.world_size,
                directory=directory,
                limit_s=limit_s,
                environment=self.environment(CONNECTED.world_size),
            )
        )
        return read_taken(answer)

    def is_staged(self, world_size: int) -> bool:
        """Whether so many ranks talk through host memory, as they share GPUs and NCCL refuses."""
        if not self.machine.shares_gpus(world_size):
            return False
        try:
            self.connected()
        except RankFailure:
            return True
        return False

    def entry(self, world_size: int) -> str:
        """The module that trains."""
        return STAGED if self.is_staged(world_size) else "zorse_megatron.pretrain"

    def environment(self, world_size: int) -> dict[str, str]:
        """What ranks need to share GPUs, where they have to."""
        return {SHARE_GPUS: "1"} if self.machine.shares_gpus(world_size) else {}

    def trained(
        self,
        name: str,
        plan: Plan | None,
        flags: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        base: Callable[[Path, list[str]], list[str]] | None = None,
    ) -> Trained:
        """Train, or look at what was trained under that name; stock on one rank without a plan.

        `base`: gets prefix and tokenizer flags of the corpus, returns the model's flags (default:
        the small GPT's). Raises RankFailure.
        """
        if name not in self._runs:
            try:
                found = self._train(name, plan, flags, environment or {}, base or _small_gpt)
            except RankFailure as failure:
                self._runs[name] = failure  # it would fail again
                raise
            self._runs[name] = found
        known = self._runs[name]
        if isinstance(known, RankFailure):
            raise known
        return known

    def _train(
        self,
        name: str,
        plan: Plan | None,
        flags: Sequence[str],
        environment: Mapping[str, str],
        base: Callable[[Path, list[str]], list[str]],
    ) -> Trained:
        directory = self.directory / "".join(c if c.isalnum() else "-" for c in name)
        directory.mkdir(parents=True, exist_ok=True)
        metrics = directory / "metrics.jsonl"
        words = [*self._model(base), *flags, "--zorse-metrics", str(metrics)]
        world_size = 1
        if plan is not None:
            save_plan(plan, directory / "plan.json")
            words += ["--zorse-plan", str(directory / "plan.json")]
            world_size = plan.world_size
        self.run(
            RankJob(
                name=name,
                entry=self.entry(world_size),
                arguments=tuple(words),
                world_size=world_size,
                directory=directory,
                limit_s=self.limit_s(),
                environment={**self.environment(world_size), **environment},
            )
        )
        return read_metrics(metrics)

    def _model(self, base: Callable[[Path, list[str]], list[str]]) -> list[str]:
        if self.data is None:
            self.data = self._write_corpus()
        prefix, tokenizer = Path(self.data[1]), list(self.data[4:])
        return base(prefix, tokenizer)

    def _write_corpus(self) -> tuple[str, ...]:
        prefix = self.directory / "corpus" / "text"
        self.run(
            RankJob(
                name="corpus",
                entry="zorse_megatron.emulate.on_ranks.corpus_main",
                arguments=(str(prefix), str(CORPUS_BYTES)),
                world_size=1,
                directory=prefix.parent,
                limit_s=self.limit_s(),
            )
        )
        return tuple(json.loads(prefix.with_suffix(".json").read_text()))


def _small_gpt(prefix: Path, tokenizer: list[str]) -> list[str]:
    return training_flags(prefix, tokenizer=tokenizer, num_iterations=ITERATIONS)


def read_metrics(path: Path) -> Trained:
    """Read what `--zorse-metrics` wrote."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Trained(
        losses={r["iteration"]: _number(r["lm loss"]) for r in records},
        grad_norms={r["iteration"]: _number(r["grad_norm"]) for r in records},
        elapsed_s={r["iteration"]: r["elapsed_s"] for r in records if r["elapsed_s"] is not None},
        directory=path.parent,
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


_TIME_IS_UP = Problem(
    where="zorse doctor",
    found="no time left for this check",
    expected="all checks to be done by then",
    remedy="Give it more with --time-limit, or select fewer with --check.",
)
