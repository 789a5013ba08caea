"""Whether two versions of this project find the same plans, to the byte.

    python scripts/same_plans.py --json before.json
    ... change the code ...
    python scripts/same_plans.py --against before.json

Plans random models on random clusters, and examples/*.yaml, with `zorse plan` alone, so that all
inside may change. Two processes must start from the same examples.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from typer.testing import CliRunner

from zorse_megatron.cli.main import app

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
KINDS = ("A100-40", "A6000", "V100-16", "T4")
STRATEGIES = ("zorse", "zorse", "zorse", "zorse-paper", "cephalo", "stock")


def random_cluster(draw: random.Random) -> str:
    """A cluster file: up to three nodes, up to eight GPUs."""
    lines = ["nodes:"]
    for node in range(draw.randint(1, 3)):
        kind, count = draw.choice(KINDS), draw.choice((1, 1, 2, 2, 3))
        nics = draw.choice(("10 Gb/s", "50 Gb/s", "100 Gb/s"))
        lines.append(f"  - {{name: n{node}, gpus: {count} x {kind}, nics: {nics}}}")
    return "\n".join(lines) + "\n"


def random_flags(draw: random.Random) -> list[str]:
    """A model and a batch as Megatron's command says them."""
    hidden = draw.choice((512, 1024, 2048, 4096))
    sequence = draw.choice((256, 512, 1024))
    words = {
        "--num-layers": draw.randint(2, 16),
        "--hidden-size": hidden,
        "--num-attention-heads": hidden // 64,
        "--seq-length": sequence,
        "--max-position-embeddings": sequence,
        "--vocab-size": draw.choice((8000, 32000)),
        "--global-batch-size": draw.choice((8, 12, 32, 64)),
    }
    flags = [word for pair in words.items() for word in map(str, pair)]
    untied = ["--untie-embeddings-and-output-weights"] if draw.random() < 0.5 else []
    return [*flags, "--tokenizer-type", "NullTokenizer", *untied, "--fp16"]


def cases(number: int) -> dict[str, tuple[str, list[str]]]:
    """Name -> text of the cluster file, and words for `zorse plan`."""
    found: dict[str, tuple[str, list[str]]] = {}
    for seed in range(number):
        draw = random.Random(seed)
        cluster, flags = random_cluster(draw), random_flags(draw)
        found[f"random {seed}"] = cluster, ["--strategy", draw.choice(STRATEGIES), "--", *flags]
    for path in sorted(EXAMPLES.glob("*.yaml")):
        words = ["--model", "llama-3b", "--seq-length", "512", "--global-batch-size", "128"]
        found[path.name] = path.read_text(encoding="utf-8"), words
    return found


def answer_of(cluster: str, words: list[str]) -> str:
    """The plan file, or why there is none."""
    with tempfile.TemporaryDirectory() as work:
        file, plan = Path(work, "cluster.yaml"), Path(work, "plan.json")
        file.write_text(cluster, encoding="utf-8")
        given = ["plan", "--cluster", str(file), "--out", str(plan), *words]
        result = CliRunner().invoke(app, given)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if plan.exists():
            return plan.read_text(encoding="utf-8")
        return result.output.replace(work, "DIR")


def main() -> int:
    """Plan all cases; compare, or write them down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200, help="random ones (default: 200)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=Path, metavar="FILE", help="write the plans")
    what.add_argument("--against", type=Path, metavar="FILE", help="compare with these plans")
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against else {}
    found, others = {}, []
    for name, (cluster, words) in cases(options.cases).items():
        found[name] = answer_of(cluster, words)
        if options.against and found[name] != before.get(name):
            others.append(name)
            print(f"{name}: another plan", file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    plans = sum(answer.startswith("{") for answer in found.values())
    print(f"{len(found)} cases, {plans} with a plan, {len(others)} differ")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
