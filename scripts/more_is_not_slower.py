"""Whether allowing more ever makes a plan slower: an option, memory, bandwidth, a GPU, more effort.

    python -m scripts.more_is_not_slower --pairs 300 --json pairs.json

Plans random models on random clusters (those of `scripts.same_plans`) in pairs: once with less, and
once with more of one thing. Prints each pair whose plan with more takes over 0.2 % longer, or that
has a plan with less alone, and ends with 1 if there is one. 300 pairs take about an hour.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.same_plans import flags_of, output_of, random_cluster, random_model, random_nodes

OPTIONS = (
    (["--no-split-backward"], []),
    (["--max-tp", "1"], []),
    (["--even-tp"], []),
    (["--use-all"], []),
    (["--margin", "0.2"], []),
    ([], ["--activation-offload"]),
    ([], ["--grad-reduce-dtype", "fp16"]),
    ([], ["--tp-across-nodes"]),
    ([], ["--effort", "high"]),
)
"""Words with less, and with more."""
TOLERANCE = 1.002


def with_one_more_gpu(cluster: str) -> str:
    """The first node has one more."""
    before, _, after = cluster.partition("gpus: ")
    count, _, rest = after.partition(" x ")
    return f"{before}gpus: {int(count) + 1} x {rest}"


def with_faster_nics(cluster: str) -> str:
    """All have twice the bandwidth."""
    for gb_per_s in (100, 50, 10):  # so that none is doubled twice
        for many in ("", "2 x "):
            old, new = (f"nics: {many}{each} Gb/s" for each in (gb_per_s, 2 * gb_per_s))
            cluster = cluster.replace(old, new)
    return cluster


def with_more_host_memory(cluster: str) -> str:
    """Nodes that say how much they have got 1 TiB."""
    for size in ("4GiB", "16GiB", "64GiB"):
        cluster = cluster.replace(f"host_memory: {size}", "host_memory: 1TiB")
    return cluster


CHANGES = (with_one_more_gpu, with_faster_nics, with_more_host_memory)


def iteration_s(cluster: str, words: list[str], flags: list[str]) -> float | None:
    """Of the plan; None where there is none."""
    with tempfile.TemporaryDirectory() as work:
        path = Path(work, "cluster.yaml")
        path.write_text(cluster, encoding="utf-8")
        said = output_of(work, ["plan", "--cluster", str(path), *words, "--json", "--", *flags])
    answer: dict[str, Any] = json.loads(said)
    return answer["iteration_s"] if answer["ok"] else None


def pair(number: int) -> dict[str, Any]:
    """What has more of what, and the seconds with less and with more."""
    draw = random.Random(10_000 + number)
    cluster = random_cluster(draw, random_nodes(draw, 1))
    model = random_model(draw, is_large=False)
    flags = [*flags_of(draw, model, draw.choice((8, 12, 32, 64))), "--fp16"]
    kind = number % (len(OPTIONS) + len(CHANGES))
    less, more, larger = [], [], cluster
    if kind < len(OPTIONS):
        less, more = OPTIONS[kind]
        what = " ".join(more or ["without", *less])
    else:
        change = CHANGES[kind - len(OPTIONS)]
        what, larger = change.__name__.replace("_", " "), change(cluster)
    seconds = iteration_s(cluster, less, flags), iteration_s(larger, more, flags)
    return {"pair": number, "more": what, "less_s": seconds[0], "more_s": seconds[1]}


def is_slower(found: dict[str, Any]) -> bool:
    """Whether more made it slower."""
    less_s, more_s = found["less_s"], found["more_s"]
    return less_s is not None and (more_s is None or more_s > TOLERANCE * less_s)


def main() -> int:
    """Plan all pairs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=36, help="how many (default: 36)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write them all to this file")
    options = parser.parse_args()
    found = []
    for number in range(options.first, options.first + options.pairs):
        found.append(pair(number))
        if is_slower(found[-1]):
            print(found[-1], file=sys.stderr, flush=True)
        if options.json:  # as far as it has come
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    slower, planned = sum(map(is_slower, found)), sum(each["less_s"] is not None for each in found)
    print(f"{planned} pairs with a plan, {slower} slower with more")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
