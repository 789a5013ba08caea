"""How much each system loses where the profile is wrong, from two runs of `zorse compare`.

    python scripts/compare_sensitivity.py compared perturbed

The directories have `compare.json`: of the cluster as profiled, and of the same with, for example,
`--slow 2=1.5 --jitter 0.1`. Prints a line for each system, with its tokens/s of both, and how
many times as fast ours is under the perturbation.
"""

import argparse
import json
from pathlib import Path

OURS = "zorse"


def tokens_per_s(directory: Path) -> dict[str, float]:
    """System -> what it reached, of those that ran."""
    rows = json.loads((directory / "compare.json").read_text(encoding="utf-8"))
    return {row["system"]: row["tokens_per_s"] for row in rows if row["tokens_per_s"]}


def main() -> None:
    """Read both and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("compared", type=Path)
    parser.add_argument("perturbed", type=Path)
    arguments = parser.parse_args()
    before, after = map(tokens_per_s, (arguments.compared, arguments.perturbed))
    for system, rate in after.items():
        if system in before:
            print(
                f"{system}: {before[system]:,.0f} -> {rate:,.0f} tokens/s, "
                f"{100 * (rate / before[system] - 1):+.1f} %; {OURS} is {after[OURS] / rate:.2f} x"
            )


if __name__ == "__main__":
    main()
