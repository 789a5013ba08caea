"""The files that `zorse plan` writes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zorse_megatron.cli.console import CommandError, Refusals, print_plain
from zorse_megatron.cli.gpu_selection import Selected
from zorse_megatron.cli.plan_answer import notes_on
from zorse_megatron.cli.workload_costs import WorkloadCosts
from zorse_megatron.errors import Problem
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.target import stream_of
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.files.write import NotWritten, write_text
from zorse_megatron.schema.cluster.fewer_gpus import USED_GPUS
from zorse_megatron.schema.cluster.rank_placement import used_cluster_file
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import save_plan

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class PlanOutputs:
    """Where to write what; None: do not."""

    plan: Path | None
    page: Path | None
    """The report page."""
    may_leave_out: bool
    """Whether the plan may be for fewer GPUs than there are."""

    @property
    def used_cluster(self) -> Path | None:
        """Where the cluster file goes if GPUs are left out."""
        return used_cluster_file(self.plan) if self.plan and self.may_leave_out else None

    def refuse(self, inputs: list[Path | str | None]) -> None:
        """Raise before the search, which takes a while, what would go wrong after it."""
        told = Refusals()
        told.gather(lambda: self._refuse_unwritable(inputs))
        told.gather(self._refuse_foreign)
        told.raise_all()
        if self.page is not None:
            refuse_without("plots", what="zorse plan --html")

    def _refuse_unwritable(self, inputs: list[Path | str | None]) -> None:
        refuse_unwritable({"--out": self.plan, "--html": self.page}, inputs=inputs)
        if self.plan is not None and stream_of(self.plan) is None:
            what = f"--out {self.plan}: the cluster file beside it,"
            refuse_unwritable({what: self.used_cluster, "--html": self.page}, inputs=inputs)

    def _refuse_foreign(self) -> None:
        """Raise CommandError for a cluster file that would be replaced, and nobody would think of.

        Also for a plan that is written to a stream: nothing can be beside it.
        """
        if self.plan is None or self.used_cluster is None:
            return
        if stream_of(self.plan) is not None:
            found = "a stream, beside which there is no place for the cluster file of its GPUs"
            expected, remedy = "a file", "Write a file, or add --use-all."
        elif _is_foreign(self.used_cluster):
            found = f"{self.used_cluster}, which zorse plan has not written"
            expected = "a place for the cluster file of a plan that leaves GPUs out"
            remedy = "Choose another --out, move that file, or add --use-all."
        else:
            return
        problem = Problem(where=f"--out {self.plan}", found=found, expected=expected, remedy=remedy)
        raise CommandError("the command cannot be run", [problem])

    def written_cluster(self, selected: Selected | None) -> Path | None:
        """The cluster file of a plan that leaves GPUs out; None where there is none."""
        return self.used_cluster if selected and selected.cluster_text else None

    def not_saved(
        self, found: Plan, selected: Selected | None, *, cluster: Path
    ) -> NotWritten | None:
        """Write cluster file and plan; return why one could not be, for it is shown in any case.

        `cluster`: the file that was read, which stays.
        """
        try:
            if (path := self.written_cluster(selected)) and selected and selected.cluster_text:
                write_text(path, selected.cluster_text)
            if self.plan is not None:
                save_plan(found, self.plan)
        except NotWritten as error:
            return error
        if path is None and self.plan is not None and stream_of(self.plan) is None:
            _remove_ours(used_cluster_file(self.plan), keep=cluster)
        return None

    def draw(
        self,
        costs: WorkloadCosts,
        outcome: "Outcome",
        *,
        is_silent: bool,
    ) -> None:
        """Draw after the plan, which is written and shown by then."""
        if self.page is not None:
            from zorse_megatron.cli.plan_report import plan_page

            notes = notes_on(costs, outcome)
            page = plan_page(costs, outcome, notes, shows_progress=not is_silent)
            write_text(self.page, page)
            if not is_silent:
                print_plain(f"written: {self.page}")


def _remove_ours(path: Path, *, keep: Path) -> None:
    """Remove the cluster file of an earlier plan of that name; this one is for all GPUs."""
    if path.is_file() and not path.samefile(keep) and not _is_foreign(path):
        path.unlink(missing_ok=True)


def _is_foreign(path: Path) -> bool:
    """Whether there is a file that is none of ours."""
    try:
        with path.open("rb") as file:
            return not file.read(len(USED_GPUS) + 2).endswith(USED_GPUS.encode())
    except OSError:  # none, or one that the check of outputs refuses
        return False
