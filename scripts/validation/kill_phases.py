"""Kill a rank at random instants of each phase of a training, and see what is lost.

    python -m scripts.validation.kill_phases
    python -m scripts.validation.kill_phases --kills 2 --phase save --phase move

A job of three ranks on the CPU trains 4 iterations and saves; it is started again to go on to the
8th, saving every second one, and a random rank is killed with SIGKILL within the phase. Then the
same command is started once more. All ranks of the killed job must end by themselves, with an
error, rank 0 must name the rank that was killed, the last job must end well, and each loss that was
logged, also of iterations that were trained twice, is compared with one process of stock Megatron.
Prints a table; the exit status is 1 if anything of that is not so, or more is lost than may be. It
runs on what the tests run on (`tests/megatron`), so from a checkout.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.megatron.comparison import BASE_FLAGS
from tests.megatron.launch import default_server, run_ranks
from tests.megatron.plans import LAYOUTS
from tests.megatron.small_run import TOKENIZER_FLAGS
from tests.megatron.test_checkpoints import MAX_DIFFERENCE
from zorse_megatron.live.checkpoint_choice import newest_saved
from zorse_megatron.plan.plan_file import save_plan

BEFORE, STEPS, SAVED_EVERY = 4, 8, 2
PLAN, NEXT_PLAN = LAYOUTS["2|1"], LAYOUTS["1|2"]
ENTRY = "tests.megatron.killed_entry"
GRACE_S = 60.0
"""By then ranks that are left are ended, and it counts as a hang."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Where a rank is killed."""

    pattern: str
    """Of what a rank says that it does (`WatchedRank.enter`)."""
    occurrences: int
    """One of the first so many, at random."""
    longest_s: float = 0.01
    """The kill comes at most so long after the phase's begin, at random, and not after its end."""
    skips: int = 0
    moves: bool = False


def action(kind: str) -> str:
    """Pattern of the actions of a kind."""
    return rf"at \d*{kind}[\d,]* \(action"


PHASES: dict[str, Phase] = {
    "start": Phase(pattern="while the ranks meet", occurrences=1, longest_s=0.5),
    "load": Phase(pattern="while it sets up", occurrences=1, longest_s=1.0),
    "forward": Phase(pattern=action("F"), occurrences=6),
    "backward": Phase(pattern=action("B"), occurrences=6),
    "reduce": Phase(pattern=action("REDUCE_GRAD"), occurrences=4),
    "norm": Phase(pattern=action("NORM"), occurrences=4),
    "step": Phase(pattern=action("STEP"), occurrences=4),
    "save": Phase(pattern="in the save", occurrences=2, longest_s=0.1),
    "after a save": Phase(pattern="after the save", occurrences=2),
    "move": Phase(pattern="before another plan", occurrences=1, longest_s=0.1, moves=True),
    # The second time that this run sets up anything.
    "move, the new plan": Phase(
        pattern="while it sets up", occurrences=1, skips=1, longest_s=1.0, moves=True
    ),
}


@dataclass(frozen=True, kw_only=True)
class Death:
    """What came of one kill."""

    phase: str
    """What the rank said."""
    ended_s: float
    """From the kill to the end of the last rank."""
    lost: int
    """Whole iterations that were trained again."""
    difference: float
    """Largest difference of a loss from stock's."""
    problems: tuple[str, ...]


def flags_of(directory: Path, *more: str) -> list[str]:
    """The user's command."""
    saved = str(directory / "checkpoints")
    return [
        *BASE_FLAGS,
        *("--train-iters", str(STEPS), "--mock-data", "--split", "90,5,5", *TOKENIZER_FLAGS),
        *("--clip-grad", "0.5", "--save-interval", str(SAVED_EVERY)),
        *("--save", saved, "--load", saved),
        *("--zorse-metrics", str(directory / "metrics.jsonl"), *more),
    ]


def curve(path: Path) -> list[tuple[int, float]]:
    """(iteration, loss) of each line."""
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    return [(step["iteration"], step["lm loss"]) for step in steps]


@dataclass(kw_only=True)
class Trial:
    """One kill, and the start after it, in a directory with the first checkpoints."""

    directory: Path
    phase: Phase
    victim: int
    occurrence: int
    after_s: float

    def start(self, *more: str, **env: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Start the job; returns how its ranks ended, and what they printed."""
        plan = self.directory / "plan.json"
        save_plan(PLAN, plan)
        flags = flags_of(self.directory, "--zorse-plan", str(plan), *self._flags(), *more)
        found = run_ranks(
            flags,
            PLAN.world_size,
            entry=ENTRY,
            timeout_s=120,
            env=env,
            grace_after_failure_s=GRACE_S,
        )
        return found.returncodes, found.outputs

    def _flags(self) -> tuple[str, ...]:
        return ("--zorse-status", str(self.directory / "status")) if self.phase.moves else ()

    def kill(self) -> tuple[tuple[int, ...], tuple[str, ...], Mapping[str, float | str]]:
        """Start the job with the kill in it."""
        report = self.directory / "killed.json"
        told = {
            "rank": self.victim,
            "phase": self.phase.pattern,
            "occurrence": self.occurrence,
            "after_s": self.after_s,
            "report": str(report),
        }
        env = {"ZORSE_TEST_KILL": json.dumps(told)}
        if self.phase.moves:
            status, other = self.directory / "status", self.directory / "next.json"
            status.mkdir()
            save_plan(NEXT_PLAN, other)
            env["ZORSE_TEST_REQUEST"] = f"{status}:{other}"
        codes, outputs = self.start(**env)
        if not report.exists():
            raise SystemExit(f"no rank was killed; rank 0 ended so:\n{outputs[0][-3000:]}")
        return codes, outputs, json.loads(report.read_text())

    def run(self, expected: Mapping[int, float]) -> Death:
        """Kill, start again, and compare with stock's losses."""
        codes, outputs, killed = self.kill()
        ended_s = time.time() - float(killed["killed_s"])
        reached = self._trained()
        again, more = self.start()
        found = curve(self.directory / "metrics.jsonl")
        resumed_at = next((step for step, _ in found[len(reached) :]), STEPS + 1)
        differences = [abs(loss - expected[step]) for step, loss in found]
        problems = [
            *(f"rank {r} ended with status 0" for r, code in enumerate(codes) if code == 0),
            *([] if f"rank {self.victim} (" in outputs[0] else ["rank 0 does not name the rank"]),
            *([] if not any(again) else [f"the last job ended with {again}: {more[0][-600:]}"]),
            *([] if newest_saved(self._saved) == STEPS else ["the last step is not saved"]),
            *([] if {s for s, _ in found} == set(range(1, STEPS + 1)) else ["steps are missing"]),
        ]
        lost = max((step for step, _ in reached), default=BEFORE) + 1 - resumed_at
        if ended_s > GRACE_S:
            problems.append("ranks hung")
        if lost > SAVED_EVERY:
            problems.append(f"{lost} iterations were lost")
        worst = max(differences)
        if not worst <= MAX_DIFFERENCE:
            problems.append(f"a loss differs by {worst}")
        return Death(
            phase=str(killed["phase"]),
            ended_s=ended_s,
            lost=lost,
            difference=worst,
            problems=tuple(problems),
        )

    @property
    def _saved(self) -> str:
        return str(self.directory / "checkpoints")

    def _trained(self) -> list[tuple[int, float]]:
        return curve(self.directory / "metrics.jsonl")


def trials(scratch: Path, names: list[str], kills: int, seed: int) -> dict[str, list[Death]]:
    """Run all of them. Phase -> what came of its kills."""
    stock, first = scratch / "stock", scratch / "first"
    run_ranks(flags_of(stock), 1, timeout_s=120).check()
    expected = dict(curve(stock / "metrics.jsonl"))
    save_plan(PLAN, scratch / "plan.json")
    flags = flags_of(first, "--zorse-plan", str(scratch / "plan.json"))
    run_ranks([*flags, "--exit-interval", str(BEFORE)], PLAN.world_size, timeout_s=120).check()
    found: dict[str, list[Death]] = {}
    for name in names:
        phase, draw = PHASES[name], random.Random(f"{seed} {name}")
        for number in range(kills):
            directory = scratch / f"trial-{name}-{number}"
            shutil.copytree(first, directory)
            trial = Trial(
                directory=directory,
                phase=phase,
                victim=draw.randrange(PLAN.world_size),
                occurrence=phase.skips + draw.randint(1, phase.occurrences),
                after_s=draw.uniform(0, phase.longest_s),
            )
            death = trial.run(expected)
            found.setdefault(name, []).append(death)
            said = "; ".join(death.problems) or "as it should be"
            print(f"{name}, rank {trial.victim}, {death.phase}: {said}", file=sys.stderr)
            shutil.rmtree(directory)
    return found


def table(found: Mapping[str, list[Death]]) -> list[str]:
    """A row for each phase."""
    rows = [
        "| Killed in, on CPU | Kills | Others ended after | Iterations trained again | "
        "Largest difference |"
    ]
    rows.append("|---|---|---|---|---|")
    for name, deaths in found.items():
        ended = sorted(death.ended_s for death in deaths)
        lost = sorted({death.lost for death in deaths})
        cells = (
            name,
            str(len(deaths)),
            f"{median(ended):.1f} s, at most {ended[-1]:.1f} s",
            f"{' or '.join(map(str, lost))}",
            f"{max(death.difference for death in deaths):.1e}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="in each phase (default: 10)")
    parser.add_argument("--phase", action="append", choices=PHASES, help="repeatable; default: all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    default_server()
    with tempfile.TemporaryDirectory() as name:
        found = trials(Path(name), args.phase or list(PHASES), args.kills, args.seed)
    print("\n".join(table(found)))
    problems = [each for deaths in found.values() for death in deaths for each in death.problems]
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
