"""The status of a run: a file, lines of the log, and scalars of Megatron's own writers."""

import threading
import time
from pathlib import Path

import torch.distributed as dist
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

from zorse_megatron.errors import OutputError
from zorse_megatron.files.write import write_text
from zorse_megatron.log import complain, say
from zorse_megatron.rebalance.balancer import Counts
from zorse_megatron.rebalance.iteration_times import IterationTimes
from zorse_megatron.rebalance.run_status import RunStatus
from zorse_megatron.schema.plan.plan_json import dump_plan
from zorse_megatron.schema.status.status import RUNNING_PLAN_NAME, STATUS_NAME, Status
from zorse_megatron.schema.status.status_json import dump_status

_EVERY_S = 5.0


class StatusReporter:
    """Rank 0 writes the file and the log, the last rank the scalars: both follow all ranks."""

    def __init__(self, status: RunStatus, *, directory: Path | None) -> None:
        self.status = status
        self.directory = directory if dist.get_rank() == 0 else None
        self._written_s = float("-inf")
        self._thread: threading.Thread | None = None
        self._complained = False
        self._wrote_plan = False

    def take(self, ranks: tuple[IterationTimes, ...]) -> None:
        """One iteration's times of all ranks."""
        self.status.take(ranks)
        for line in self.status.news():
            say(line)
        self._chart(self.status.first_iteration + ranks[0].number + 1)
        if time.monotonic() - self._written_s >= _EVERY_S:
            self._write()

    def change(self, number: int, counts: Counts) -> None:
        """Other counts are in force from an iteration on."""
        self.status.change(number, counts)

    def close(self, *, ended: bool) -> None:
        """Write what is known at the end; `ended`: of the training, and not by a failure."""
        self.status.ended = ended
        if self._thread is not None:
            self._thread.join()
        self._write()
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        """In a thread, as a file system may take its time; none after one that still writes."""
        if self.directory is None or (self._thread is not None and self._thread.is_alive()):
            return
        self._written_s = time.monotonic()
        now = self.status.now(written_s=time.time())
        self._thread = threading.Thread(target=self._put, args=(self.directory, now))
        self._thread.start()

    def _put(self, directory: Path, now: Status) -> None:
        try:
            if not self._wrote_plan:  # before a status that names it
                text = dump_plan(self.status.plan)
                write_text(directory / RUNNING_PLAN_NAME, text, parents=True)
                self._wrote_plan = True
            write_text(directory / STATUS_NAME, dump_status(now), parents=True)
        except OutputError as error:
            if not self._complained:  # no reason to lose the training
                complain(str(error))
            self._complained = True

    def _chart(self, iteration: int) -> None:
        if iteration % get_args().tensorboard_log_interval:
            return
        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        scalars = self.status.scalars() if board or wandb else {}
        for name, value in scalars.items() if board else ():
            board.add_scalar(name, value, iteration)
        if wandb and scalars:
            wandb.log(dict(scalars), iteration)
