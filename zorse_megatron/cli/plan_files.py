"""The files that `zorse plan` writes: plans, and cluster files beside them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zorse_megatron.cli.console import Errors, refuse
from zorse_megatron.cli.gpu_selection import Found
from zorse_megatron.errors import Problem, ZorseError
from zorse_megatron.extras import refuse_without
from zorse_megatron.files.read_write import NotWritten, stream_of, write_text
from zorse_megatron.files.writable import refuse_unwritable
from zorse_megatron.inputs.cluster_yaml import USED_GPUS
from zorse_megatron.inputs.rank_placement import stock_plan_file, used_cluster_file
from zorse_megatron.plan.plan_file import load_plan, save_plan


@dataclass(frozen=True, kw_only=True)
class Written:
    """Files that were written; None: that one was not."""

    plan: Path | None = None
    used_cluster: Path | None = None
    """The cluster file of the GPUs that are used, where some are not."""
    stock: Path | None = None
    """Stock's best layout beside another plan."""
    stock_cluster: Path | None = None
    """The cluster file of the GPUs that it uses, where it leaves some out."""
    error: NotWritten | None = None
    """Why not all could be written."""


@dataclass(frozen=True, kw_only=True)
class PlanOutputs:
    """Where to write what; None: do not."""

    plan: Path | None
    page: Path | None
    """The report page."""
    may_leave_out: bool
    """Whether the plan may be for fewer GPUs than there are."""
    is_part: bool
    """Whether nodes of the cluster file are lost, so that the plan is for the others."""
    with_stock: bool
    """Whether stock's best layout goes beside the plan."""

    @property
    def is_stream(self) -> bool:
        """Whether the plan goes to a stream: what is written there cannot be read again."""
        return self.plan is not None and stream_of(self.plan) is not None

    @property
    def used_cluster(self) -> Path | None:
        """Where the cluster file goes if GPUs are left out or lost."""
        if self.plan is None or self.is_stream or not self._may_have_fewer:
            return None
        return used_cluster_file(self.plan)

    @property
    def _may_have_fewer(self) -> bool:
        return self.may_leave_out or self.is_part

    @property
    def stock(self) -> Path | None:
        """Where stock's best layout goes; nowhere beside a stream."""
        if self.plan is None or self.is_stream or not self.with_stock:
            return None
        return stock_plan_file(self.plan)

    @property
    def stock_cluster(self) -> Path | None:
        """Where its cluster file goes if it leaves GPUs out."""
        return used_cluster_file(self.stock) if self.stock and self._may_have_fewer else None

    def refuse(self, inputs: list[Path | str | None]) -> None:
        """Raise before the search, which takes a while, what would go wrong after it."""
        errors = Errors()
        with errors.collect():
            self._refuse_unwritable(inputs)
        with errors.collect():
            refuse(list(self._foreign_problems()))
        errors.raise_all()
        if self.page is not None:
            refuse_without("plots", what="zorse plan --html")

    def _refuse_unwritable(self, inputs: list[Path | str | None]) -> None:
        given = {"--out": self.plan, "--html": self.page}
        refuse_unwritable(given, inputs=inputs)
        start = f"--out {self.plan}: "
        beside = {
            f"{start}the cluster file beside it,": self.used_cluster,
            f"{start}stock's best layout beside it,": self.stock,
            f"{start}the cluster file of stock's best layout,": self.stock_cluster,
        }
        refuse_unwritable(beside | given, inputs=inputs)

    def _foreign_problems(self) -> Iterator[Problem]:
        """Yield files that would be replaced, and nobody would think of.

        Also a plan that is written to a stream: nothing can be beside it.
        """
        where = f"--out {self.plan}"
        if self.plan is not None and self.is_stream and self._may_have_fewer:
            found = "a stream, beside which there is no place for the cluster file of its GPUs"
            remedy = "Write a file." if self.is_part else "Write a file, or add --use-all."
            yield Problem(where=where, found=found, expected="a file", remedy=remedy)
        for path, what in (
            (self.used_cluster, "the cluster file of a plan that leaves GPUs out"),
            (self.stock, "stock Megatron's best layout"),
            (self.stock_cluster, "the cluster file of stock's best layout"),
        ):
            if path is not None and _is_foreign(path):
                is_cluster = ", or add --use-all" if path != self.stock else ""
                yield Problem(
                    where=where,
                    found=f"{path}, which zorse plan has not written",
                    expected=f"a place for {what}",
                    remedy=f"Choose another --out, or move that file{is_cluster}.",
                )

    def saved(self, found: Found, *, cluster: Path, left: str | None) -> Written:
        """Write plans and cluster files, as far as that can be done.

        `cluster`: the file that was read, which stays; `left`: the text of one without the nodes
        that are lost.
        """
        text, stock_text = found.cluster_text or left, found.stock_cluster_text or left
        used = self.used_cluster if text else None
        stock = self.stock if found.stock_plan else None
        stock_cluster = self.stock_cluster if stock and stock_text else None
        written = Written()
        try:
            if used and text:
                write_text(used, text)
            if self.plan is not None:
                save_plan(found.outcome.plan, self.plan)
            written = Written(plan=self.plan, used_cluster=used)
            if stock_cluster and stock_text:
                write_text(stock_cluster, stock_text)
            if stock and found.stock_plan:
                save_plan(found.stock_plan, stock)
        except NotWritten as error:
            return replace(written, plan=written.plan or error.kept, error=error)
        self._remove_left_over({used, stock, stock_cluster}, keep=cluster)
        return replace(written, stock=stock, stock_cluster=stock_cluster)

    def _remove_left_over(self, new: set[Path | None], *, keep: Path) -> None:
        """Remove what an earlier plan of that name had beside it, and this one has not."""
        if self.plan is None or self.is_stream:
            return
        stock = stock_plan_file(self.plan)
        for path in {used_cluster_file(self.plan), stock, used_cluster_file(stock)} - new:
            if path.is_file() and not path.samefile(keep) and not _is_foreign(path):
                path.unlink(missing_ok=True)


def _is_foreign(path: Path) -> bool:
    """Whether there is a file that is none of ours."""
    try:
        if path.suffix == ".json":
            return path.is_file() and not _is_plan(path)
        with path.open("rb") as file:
            return not file.read(len(USED_GPUS) + 2).endswith(USED_GPUS.encode())
    except OSError:  # none, or one that the check of outputs refuses
        return False


def _is_plan(path: Path) -> bool:
    try:
        load_plan(path)
    except ZorseError:
        return False
    return True
