"""How far two replicas of stock are from one process of it, in the training of the long run.

    python -m scripts.long_run.other_layout --out DIR

DIR is that of `scripts.long_run.run`, whose stock losses it reads. Prints the largest relative
difference of the losses in every twenty iterations.
"""

import argparse
import json
import tempfile
from pathlib import Path

from scripts.long_run.machines import Machines
from scripts.long_run.run import stock_losses

EVERY = 20


def main() -> None:
    """Train, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=60, help="default: 60")
    args = parser.parse_args()
    one = json.loads((args.out / "long-run.json").read_text())["stock_losses"]
    ends = ("--exit-interval", str(args.iterations))
    with tempfile.TemporaryDirectory() as directory:
        two = stock_losses(Machines.without(["t4"]), Path(directory), *ends, ranks=2)
    apart = [abs(mine / theirs - 1) for mine, theirs in zip(two, one, strict=False)]
    for first in range(0, len(apart), EVERY):
        print(f"from iteration {first + 1}: {max(apart[first : first + EVERY]):.1e}")


if __name__ == "__main__":
    main()
