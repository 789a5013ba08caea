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
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.files.write import NotWritten, write_text
from zorse_megatron.schema.plan.plan import Plan
from zorse_megatron.schema.plan.plan_json import save_plan

if TYPE_CHECKING:
    from zorse_megatron.planner.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class PlanOutputs:
    """Where to write what; None: do not."""

    plan: Path | None
    used_cluster: Path | None
    """The cluster file of the GPUs that are used."""
    frontier: Path | None
    """A picture."""
    page: Path | None
    """The report page."""

    def refuse(self, *, selects: bool, inputs: list[Path | str | None]) -> None:
        """Raise before the search, which takes a while, what would go wrong after it.

        `selects`: whether the plan may be for fewer GPUs than there are.
        """
        told = Refusals()
        told.gather(lambda: self._refuse_missing(selects=selects))
        paths = {
            "--out": self.plan,
            "--used-cluster": self.used_cluster,
            "--frontier": self.frontier,
            "--html": self.page,
        }
        told.gather(lambda: refuse_unwritable(paths, inputs=inputs))
        told.raise_all()
        for option, path in {"--html": self.page, "--frontier": self.frontier}.items():
            if path is not None:
                refuse_without("plots", what=f"zorse plan {option}")

    def _refuse_missing(self, *, selects: bool) -> None:
        problems = self._missing(selects=selects)
        if problems:
            raise CommandError("the command cannot be run", problems)

    def _missing(self, *, selects: bool) -> list[Problem]:
        problems = []
        if selects and self.plan is not None and self.used_cluster is None:
            problems.append(
                Problem(
                    where="--out",
                    found="a plan that may leave GPUs out, without --used-cluster",
                    expected="a file for the cluster that the plan is for",
                    remedy="Add it, such as --used-cluster used.yaml; give that file to the other "
                    "commands.",
                )
            )
        for option, path in {
            "--used-cluster": self.used_cluster,
            "--frontier": self.frontier,
        }.items():
            if path is not None and not selects:
                problems.append(
                    Problem(
                        where=option,
                        found="a plan that uses all GPUs",
                        expected="--may-leave-out, --objective or --budget",
                        remedy=f"Add one of them, or leave out {option}.",
                    )
                )
        if self.frontier is not None and self.frontier.suffix.lower() != ".png":
            problems.append(
                Problem(
                    where="--frontier",
                    found=f"{self.frontier}",
                    expected="a name that ends in .png",
                    remedy="Pictures are PNG files.",
                )
            )
        return problems

    def not_saved(self, found: Plan, selected: Selected | None) -> NotWritten | None:
        """Write cluster file and plan; return why one could not be, for it is shown in any case."""
        try:
            if self.used_cluster is not None and selected is not None:
                write_text(self.used_cluster, selected.cluster_text)
            if self.plan is not None:
                save_plan(found, self.plan)
        except NotWritten as error:
            return error
        return None

    def draw(
        self,
        costs: WorkloadCosts,
        outcome: "Outcome",
        selected: Selected | None,
        *,
        is_silent: bool,
    ) -> None:
        """Draw after the plan, which is written and shown by then."""
        written = []
        if self.frontier is not None and selected is not None:
            from zorse_megatron.cli.selection_answer import draw_selections

            written.append(draw_selections(selected, self.frontier))
        if self.page is not None:
            from zorse_megatron.cli.plan_report import plan_page

            notes = notes_on(costs, outcome)
            page = plan_page(costs, outcome, notes, shows_progress=not is_silent)
            write_text(self.page, page)
            written.append(self.page)
        if not is_silent:
            for path in written:
                print_plain(f"written: {path}")
