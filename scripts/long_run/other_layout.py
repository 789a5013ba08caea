"""How far two replicas of stock are from one process of it, in the training of the long run.

    python -m scripts.long_run.other_layout --out DIR

DIR is that of `scripts.long_run.run`, whose stock losses it reads. Prints the largest relative
difference of the losses in every twenty iterations.
"""

import argparse
import json
import tempfile
from pathlib import Path

from scripts.long_run.machines import WORKLOAD, Machines
from zorse_megatron.emulate.jobs.emulator import emulator
from zorse_megatron.emulate.jobs.tiny_model import TinyTraining, training_flags

EVERY = 20


def losses_of_two(iterations: int) -> list[float]:
    """Train with stock Megatron as two replicas."""
    training = TinyTraining(model=WORKLOAD.model, global_batch_size=128, iterations=300)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with emulator(Machines.without(["t4"]).inputs, training, tell=print) as made:
            metrics = directory / "metrics.jsonl"
            flags = [
                *training_flags(training, made.data),
                *("--micro-batch-size", "1", "--calculate-per-token-loss"),
                *("--exit-interval", str(iterations), "--zorse-metrics", str(metrics)),
            ]
            ended = made.server.run(
                flags,
                world_size=2,
                job_file=directory,
                directory=directory,
                timeout_s=7200,
                entry="zorse_megatron.pretrain",
            )
            if not ended.succeeded:
                raise ended.failure()
            return [json.loads(line)["lm loss"] for line in metrics.read_text().splitlines()]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=60, help="default: 60")
    args = parser.parse_args()
    one = json.loads((args.out / "long-run.json").read_text())["stock_losses"]
    two = losses_of_two(args.iterations)
    apart = [abs(mine / theirs - 1) for mine, theirs in zip(two, one, strict=False)]
    for first in range(0, len(apart), EVERY):
        print(f"from iteration {first + 1}: {max(apart[first : first + EVERY]):.1e}")


if __name__ == "__main__":
    main()
