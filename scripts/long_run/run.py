"""Train 300 iterations on an emulated cluster that changes, and compare with one stock process.

    python -m scripts.long_run.run --out DIR

On mini-b without its T4 node (llama-3b, 128 samples of 1024 tokens, float16): an A10G slows down
and recovers, with `--zorse-rebalance on` and the moves that `zorse plan --from-status` proposes;
both ranks of the L4 node are killed in an iteration; the rest goes on from the newest checkpoint
under a new plan; then the T4 node comes. All of it is trained through Megatron's loop, saves and
loads included, on the emulated clock. A move is emulated as a save and a load, which have the same
bits. Pauses between two starts are not emulated: that of a move is what `zorse plan --from-status`
says, those of a failure and of a start are options.

Writes `long-run.json` and `long-run.png`, and prints what is in them.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.long_run.killing import Killing
from scripts.long_run.machines import SAMPLES, WORKLOAD, Machines
from scripts.long_run.next_plan import next_plan
from scripts.long_run.parts import Part, all_losses, spans
from scripts.long_run.picture import draw
from zorse_megatron.emulate.emulator import System, emulator
from zorse_megatron.emulate.rank_jobs import RankJob
from zorse_megatron.emulate.tiny_model import TinyTraining, training_flags
from zorse_megatron.plan.plan import Plan
from zorse_megatron.simulate.assumptions import Perturbation, SlowSpell

ITERATIONS = 300
SAVE_INTERVAL = 20
SLOW_RANK, FACTOR = 2, 1.5
SLOW_FROM, SLOW_TO = 31, 100
LOOKS = (60, 130)
"""Iterations after which it is planned again."""
DEATH = 163
"""In the iteration after it."""
ARRIVAL = 220
"""After it."""


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """Of what is not emulated, in seconds."""

    failure_s: float
    """From a death to the next step, without the search."""
    start_s: float


@dataclass(kw_only=True)
class Training:
    """The parts, one after the other."""

    directory: Path
    jitter: float
    pauses: Pauses
    oracle_s: dict[bool, float]
    """Whether the GPU is slow -> what the best plan for the machines that there are takes."""

    @property
    def saved(self) -> Path:
        """Where checkpoints are."""
        return self.directory / "saved"

    @property
    def status(self) -> Path:
        """Of the part that runs."""
        return self.directory / "status"

    def newest(self) -> int:
        """The iteration to go on from."""
        tracker = self.saved / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def part(
        self,
        machines: Machines,
        plan: Plan,
        label: str,
        *,
        pause_s: float,
        last: int | None = None,
        killing: Killing | None = None,
    ) -> Part:
        """Start the job, and let it train to its end, or to iteration `last`."""
        done = self.newest()
        slow = machines.plan.world_size > SLOW_RANK and done < SLOW_TO
        spell = SlowSpell(
            rank=SLOW_RANK,
            factor=FACTOR,
            first_iteration=max(1, SLOW_FROM - done),
            last_iteration=SLOW_TO - done,
        )
        perturbation = Perturbation(jitter=self.jitter, seed=done, spells=(spell,) if slow else ())
        flags = ["--save", str(self.saved), "--save-interval", str(SAVE_INTERVAL)]
        flags += ["--load", str(self.saved), "--zorse-rebalance", "on"]
        flags += ["--zorse-status", str(self.status)]
        flags += [] if last is None else ["--exit-interval", str(last)]
        with emulator(machines.inputs, tiny(), perturbation=perturbation, tell=_tell) as made:
            gpus = tuple(range(plan.world_size))
            system = System(name=label, gpus=gpus, plan=plan, flags=tuple(flags))
            run = made.run(system, ended_by=killing)
        was_slow = [
            SLOW_FROM <= done + number <= SLOW_TO for number in range(1, len(run.iterations_s) + 1)
        ]
        return Part(
            label=label,
            first_iteration=done + 1,
            iterations_s=run.iterations_s,
            losses=run.losses[: len(run.iterations_s)],
            pause_s=pause_s,
            oracle_s=tuple(self.oracle_s[each] for each in was_slow),
        )

    def first_machines(self, machines: Machines) -> list[Part]:
        """Until the node dies."""
        knowing = machines.best_plan({SLOW_RANK: FACTOR})
        self.oracle_s = {
            False: machines.iteration_s(machines.plan, {}),
            True: machines.iteration_s(knowing, {SLOW_RANK: FACTOR}),
        }
        plan, parts, pause_s, label = machines.plan, [], 0.0, "A100, A10G, L4"
        for last in LOOKS:
            parts.append(self.part(machines, plan, label, pause_s=pause_s, last=last))
            answer = next_plan(
                machines, self.directory / "next", self.status, plan, iterations=ITERATIONS
            )
            _tell(answer.said)
            label = "the same, moved" if answer.pause_s else label
            plan, pause_s = answer.plan, answer.pause_s
        ranks = [gpu for gpu, kind in enumerate(machines.inputs.kinds) if kind == "L4"]
        killing = Killing(ranks=ranks, after_iterations=DEATH - self.newest())
        parts.append(self.part(machines, plan, label, pause_s=pause_s, killing=killing))
        if len(killing.killed) < len(ranks):
            raise RuntimeError(f"killed {killing.killed}; expected processes of ranks {ranks}")
        return parts

    def other_machines(self, lost: list[str], label: str, last: int | None, wait_s: float) -> Part:
        """After nodes have gone or come."""
        machines = Machines.without(lost)
        best_s = machines.iteration_s(machines.plan, {})
        self.oracle_s = {False: best_s, True: best_s}
        pause_s = wait_s + machines.planned_in_s
        return self.part(machines, machines.plan, label, pause_s=pause_s, last=last)


def tiny() -> TinyTraining:
    """What is trained in place of the real model."""
    return TinyTraining(model=WORKLOAD.model, global_batch_size=SAMPLES, iterations=ITERATIONS)


def train(directory: Path, jitter: float, pauses: Pauses) -> list[Part]:
    """Train all of it."""
    training = Training(directory=directory, jitter=jitter, pauses=pauses, oracle_s={})
    parts = training.first_machines(Machines.without(["t4"]))
    wait_s = pauses.failure_s
    parts.append(training.other_machines(["t4", "l4"], "A100, A10G", ARRIVAL, wait_s))
    parts.append(training.other_machines(["l4"], "A100, A10G, T4", None, pauses.start_s))
    return parts


def stock_losses(
    machines: Machines, directory: Path, *flags_beyond: str, ranks: int = 1
) -> list[float]:
    """Those of one process of stock Megatron, or of so many replicas."""
    metrics = directory / "stock.jsonl"
    with emulator(machines.inputs, tiny(), tell=_tell) as made:
        flags = [*training_flags(tiny(), made.data), "--micro-batch-size", "1"]
        flags += ["--calculate-per-token-loss", "--zorse-metrics", str(metrics), *flags_beyond]
        job = RankJob(
            name="stock",
            arguments=tuple(flags),
            world_size=ranks,
            directory=directory,
            limit_s=7200.0,
        )
        made.server.run(job).check()
    return [json.loads(line)["lm loss"] for line in metrics.read_text().splitlines()]


def main() -> None:
    """Train, compare, draw."""
    arguments = _arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    pauses = Pauses(failure_s=arguments.failure_pause, start_s=arguments.start_pause)
    with tempfile.TemporaryDirectory(prefix="long-run-") as directory:
        parts = train(Path(directory), arguments.jitter, pauses)
        if arguments.stock is None:
            stock = stock_losses(Machines.without(["t4"]), Path(directory))
        else:
            stock = json.loads(arguments.stock.read_text())["stock_losses"]
    found = {"parts": [asdict(part) for part in parts], "stock_losses": stock}
    (arguments.out / "long-run.json").write_text(json.dumps(found))
    _print(parts, stock)
    draw(arguments.out / "long-run.png", parts, tokens=SAMPLES * WORKLOAD.model.seq_length)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jitter", type=float, default=0.05)
    parser.add_argument(
        "--failure-pause",
        type=float,
        default=46.8,
        help="seconds from a death to the next step without the search",
    )
    parser.add_argument("--start-pause", type=float, default=21.4, help="seconds of a start")
    parser.add_argument(
        "--stock", type=Path, help="a long-run.json with the losses of stock, not trained again"
    )
    return parser.parse_args()


def _print(parts: list[Part], stock: list[float]) -> None:
    off = max(abs(loss / stock[iteration - 1] - 1) for iteration, loss in all_losses(parts))
    trained = sum(len(part.losses) for part in parts)
    print(f"{trained} iterations trained, {trained - len(stock)} of them twice")
    print(f"losses are within {off:.2g} of one stock process, of {len(stock)} iterations")
    for part in parts:
        mean_s = sum(part.iterations_s) / len(part.iterations_s)
        best_s = sum(part.oracle_s) / len(part.oracle_s)
        print(
            f"{part.label}: from iteration {part.first_iteration} after {part.pause_s:.1f} s, "
            f"{len(part.losses)} iterations of {mean_s:.3f} s on average (oracle {best_s:.3f} s)"
        )
    # Of iterations that were trained twice the oracle trains the first.
    needed = {
        part.first_iteration + n: each for part in parts for n, each in enumerate(part.oracle_s)
    }
    total_s = list(spans(parts))[-1].end_s
    print(f"in all {total_s:,.0f} s, the oracle {sum(needed.values()):,.0f} s")


def _tell(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    main()
