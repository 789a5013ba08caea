"""Where checks train, and what two runs differ by."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from pydantic import TypeAdapter

from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.doctor.report import Finding, Machine, failed, passed
from zorse_megatron.emulate.rank_jobs import RankJob, RunJob
from zorse_megatron.errors import OutOfTime, RankFailure
from zorse_megatron.flags.torch_builds import StartError, unusable_gpus
from zorse_megatron.launch.rank_environment import SHARE_GPUS
from zorse_megatron.plan.plan import Plan
from zorse_megatron.plan.plan_file import save_plan

NO_CUDA = "no CUDA device"
_LONGEST_NAME = 100
"""Of a directory; file systems have a limit of 255."""
T = TypeVar("T")
ON_RANKS = "zorse_megatron.doctor.on_ranks"
_CORPUS_BYTES = 200_000
_CONNECTION_LIMIT_S = 60.0
_LEAST_S = 1.0
"""With less left, nothing is begun."""


CANNOT_SHARE = "NCCL runs no two ranks on one GPU here"


class CannotShare(RankFailure):
    """More ranks than GPUs, where NCCL refuses to have several on one."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run wrote: iteration -> value."""

    losses: Mapping[int, float]
    grad_norms: Mapping[int, float]
    elapsed_s: Mapping[int, float]
    directory: Path
    around_s: float | None = None
    """What its job took beside the iterations after the first: start, first iteration, end."""


def read_metrics(path: Path) -> Trained:
    """Read what `--zorse-metrics` wrote."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    values = {
        key: {r["iteration"]: float("nan") if r[key] is None else r[key] for r in records}
        for key in ("lm loss", "grad_norm")
    }
    return Trained(
        losses=values["lm loss"],
        grad_norms=values["grad_norm"],
        elapsed_s={r["iteration"]: r["elapsed_s"] for r in records if r["elapsed_s"] is not None},
        directory=path.parent,
    )


def compared(plan: Trained, stock: Trained, limits: Mapping[str, float]) -> Finding:
    """Compare all iterations of `plan`, up to the last of `stock`, with the same ones of that."""
    steps = tuple(plan.losses)
    if not steps or not set(steps) <= set(stock.losses) or max(steps) != max(stock.losses):
        return failed(f"iterations {list(steps)} and {list(stock.losses)} cannot be compared")
    losses = [(plan.losses[step], stock.losses[step]) for step in steps]
    norms = [(plan.grad_norms[step], stock.grad_norms[step]) for step in steps]
    found = {
        "abs_loss": _largest(abs(mine - theirs) for mine, theirs in losses),
        "relative_loss": _largest(_apart(mine, theirs) for mine, theirs in losses),
        "relative_grad_norm": _largest(_apart(mine, theirs) for mine, theirs in norms),
    }
    missed = [
        f"{name} differs by {found[name]:.3e}, expected at most {limit:.0e}"
        for name, limit in limits.items()
        if not found[name] <= limit
    ]
    if missed:
        return failed(f"{'; '.join(missed)}: the plan does not train as stock does", **found)
    what = f"{len(steps)} iterations: losses differ by at most {found['abs_loss']:.1e}"
    return passed(f"{what}, gradient norms by {found['relative_grad_norm']:.1e}", **found)


def _largest(values: Iterable[float]) -> float:
    """The largest; NaN if one is, which `max` may pass over."""
    listed = list(values)
    return math.nan if any(map(math.isnan, listed)) else max(listed)


def _apart(mine: float, theirs: float) -> float:
    return abs(mine - theirs) / abs(theirs) if theirs else abs(mine)


def machine_here(run_job: RunJob, directory: Path, *, limit_s: float = 120.0) -> Machine:
    """Look at this machine, in a process of its own.

    A process that has asked CUDA keeps hundreds of megabytes of each GPU, so this one never does.
    Raises RankFailure where even that fails, StartError where there are GPUs that torch cannot use.
    """
    answer = directory / "machine.json"
    run_job(
        RankJob(
            name="machine",
            entry=ON_RANKS,
            arguments=("machine", str(answer)),
            world_size=1,
            directory=directory,
            limit_s=limit_s,
        )
    )
    machine = TypeAdapter(Machine).validate_json(answer.read_bytes())
    if machine.unusable_gpus is not None:
        problem = unusable_gpus("this machine", machine.unusable_gpus, machine.torch)
        raise StartError([problem], is_of_one_rank=False)
    return machine


@dataclass(kw_only=True)
class DoctorRun:
    """Runs jobs in one directory, on one machine, until one deadline."""

    machine: Machine
    run_job: RunJob
    directory: Path
    ends_s: float
    """Of `time.monotonic`: no job goes on after that."""
    data: tuple[str, ...] | None = None
    """Flags of the corpus, once it is written."""
    _check_ends_s: float = float("inf")
    _done: dict[str, Any] = field(default_factory=dict)
    """What came of each job that more than one check looks at; of some a RankFailure."""

    def allow(self, limit_s: float) -> None:
        """Let the next check take so long."""
        self._check_ends_s = time.monotonic() + limit_s

    @property
    def is_time_up(self) -> bool:
        """Whether there is none left for any check."""
        return time.monotonic() + _LEAST_S >= self.ends_s

    def place(self, name: str) -> Path:
        """The directory of a job, which is made for it."""
        safe = "".join(c if c.isalnum() else "-" for c in name)
        if len(safe) > _LONGEST_NAME:  # such as all flags of a case
            safe = f"{safe[:_LONGEST_NAME]}-{crc32(name.encode()):08x}"
        directory = self.directory / safe
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def run(
        self,
        name: str,
        entry: str,
        arguments: Sequence[str],
        *,
        world_size: int = 1,
        environment: Mapping[str, str] | None = None,
        limit_s: float = float("inf"),
    ) -> None:
        """Run a job in its place, while there is time. Raises RankFailure."""
        left_s = min(self.ends_s, self._check_ends_s) - time.monotonic()
        if left_s <= _LEAST_S:
            raise OutOfTime.of(
                "The time is up",
                where="zorse doctor",
                found="no time left for this check's next job",
                expected="the jobs before it to take less",
                remedy="Make this check alone (--check), with nothing else on this machine",
            )
        share = {SHARE_GPUS: "1"} if self.machine.shares_gpus(world_size) else {}
        self.run_job(
            RankJob(
                name=name,
                entry=entry,
                arguments=tuple(arguments),
                world_size=world_size,
                directory=self.place(name),
                limit_s=min(left_s, limit_s),
                environment={**share, **(environment or {})},
            )
        )

    def answer(
        self, check: str, *arguments: str, world_size: int = 1, limit_s: float = float("inf")
    ) -> Any:
        """Run a check's own ranks (`on_ranks`); returns rank 0's answer. Raises RankFailure."""
        path = self.place(check) / "answer.json"
        words = (check, str(path), *arguments)
        self.run(check, ON_RANKS, words, world_size=world_size, limit_s=limit_s)
        return json.loads(path.read_text())

    def connected(self) -> list[dict[str, Any]]:
        """Connect the ranks of `UNEVEN_PLAN` over NCCL, or look at what came of it before.

        Returns what each communicator took on each of its ranks. Raises RankFailure where NCCL
        connects no such ranks here.
        """

        def connect() -> list[dict[str, Any]]:
            plan = self.place("communicators") / "plan.json"
            save_plan(UNEVEN_PLAN, plan)
            ranks = UNEVEN_PLAN.world_size
            limit_s = _CONNECTION_LIMIT_S
            return self.answer("communicators", str(plan), world_size=ranks, limit_s=limit_s)

        return self._once("communicators", connect)

    def trained(
        self,
        name: str,
        plan: Plan | None,
        flags: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> Trained:
        """Train, or look at what was trained under that name; stock on one rank without a plan.

        `flags`: Megatron's and ours, but for data and plan. Raises RankFailure, CannotShare.
        """

        def train() -> Trained:
            metrics, own = self.place(name) / "metrics.jsonl", []
            world_size = 1 if plan is None else plan.world_size
            if self.machine.shares_gpus(world_size):
                try:
                    self.connected()
                except RankFailure as failure:
                    if self.is_time_up:
                        raise
                    raise CannotShare(CANNOT_SHARE, failure.problems) from failure
            if plan is not None:
                own = ["--zorse-plan", str(metrics.with_name("plan.json"))]
                save_plan(plan, Path(own[1]))
            words = (*self._corpus(), *flags, *own, "--zorse-metrics", str(metrics))
            began_s = time.monotonic()
            entry = "zorse_megatron.pretrain"
            self.run(name, entry, words, world_size=world_size, environment=environment)
            job_s, trained = time.monotonic() - began_s, read_metrics(metrics)
            return replace(trained, around_s=job_s - sum(trained.elapsed_s.values()))

        return self._once(name, train)

    def _corpus(self) -> tuple[str, ...]:
        if self.data is None:
            prefix = self.place("corpus") / "text"
            words = (str(prefix), str(_CORPUS_BYTES))
            self.run("corpus", "zorse_megatron.adapter.corpus", words)
            self.data = tuple(json.loads(prefix.with_suffix(".json").read_text()))
        return self.data

    def _once(self, name: str, make: Callable[[], T]) -> T:
        if name not in self._done:
            try:
                self._done[name] = make()
            except RankFailure as failure:
                self._done[name] = failure  # it would fail again
        found: T = self._done[name]
        if isinstance(found, RankFailure):
            raise found
        return found
