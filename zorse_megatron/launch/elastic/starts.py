"""How the starts of one run went, so that it ends once another start would change nothing.

torchrun itself only counts failures: those after new checkpoints, and those of bad input too.
"""

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zorse_megatron.errors import LaunchError, Problem
from zorse_megatron.files.write import NotWritten, append_line
from zorse_megatron.launch.elastic.nodes_left import what_is_saved
from zorse_megatron.launch.elastic.saved import latest_named, newest_saved
from zorse_megatron.log import say

BAD_INPUT = "2"


class GivenUp(LaunchError):
    """Another start would not help."""


@dataclass(frozen=True, kw_only=True)
class Starts:
    """A line of JSON for each start, in the directory of `--plans`, and how the last one ended."""

    directory: Path
    run: str
    """As torchrun calls it (`--rdzv-id`)."""
    save: str | None
    max_failures: int
    """In a row without a new checkpoint."""

    @property
    def outcome(self) -> Path:
        """Where ranks note an end that torchrun cannot tell from others; see `note_outcome`."""
        return self.directory / f"{self.run}.outcome"

    def begin(self, nodes: Sequence[str], *, is_first: bool) -> None:
        """Note a start on these nodes; `is_first`: what there is of this run is of an older job.

        Raises GivenUp where it was bad input on the same nodes, or too many starts have failed; the
        batch script finds that in `outcome`, too.
        """
        log = self.directory / f"{self.run}.jsonl"
        if is_first:
            with contextlib.suppress(OSError):
                log.unlink()
        before, ended = _lines(log), self._take_outcome()
        latest = latest_named(self.save)
        failures = 0
        for start in reversed(before):
            if start.get("latest") != latest:
                break
            failures += 1
        if ended == BAD_INPUT and before and not is_first and before[-1].get("nodes") == [*nodes]:
            self._give_up("bad input, which the last start has said", "other input")
        if failures > self.max_failures:
            found = f"{failures} failures in a row without a new checkpoint"
            self._give_up(found, f"at most {self.max_failures} (MAX_RESTARTS)")
        entry = {"time_s": round(time.time(), 3), "nodes": [*nodes], "latest": latest}
        try:
            append_line(log, json.dumps(entry))
        except NotWritten as error:
            say(f"note: {error}")

    def _take_outcome(self) -> str:
        try:
            found = self.outcome.read_text(encoding="utf-8")
            self.outcome.unlink()
        except OSError:
            return ""
        return found

    def _give_up(self, found: str, expected: str) -> None:
        with contextlib.suppress(OSError):
            self.outcome.write_text(BAD_INPUT, encoding="utf-8")
        problem = Problem(
            where=self.run,
            found=found,
            expected=expected,
            remedy=f"{what_is_saved(newest_saved(self.save))} Start the job again once what ended "
            "it is mended.",
        )
        raise GivenUp("the job ends", [problem])


def _lines(log: Path) -> list[dict[str, object]]:
    try:
        found = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []
    return [start for start in found if isinstance(start, dict)]
