"""Whether two versions of this project find the same plans, to the byte, and price them the same.

    python scripts/same_plans.py --json before.json
    ... change the code ...
    python scripts/same_plans.py --against before.json

Plans random models on random clusters, and examples/*.yaml, with the commands alone, so that all
inside may change. Of each plan, what its ranks do is compared, too, and its simulated time and
peaks. Seeds decide everything: 40 cases take a few minutes, 300 an hour. Two processes must start
from the same examples.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from zorse_megatron.cli.main import app
from zorse_megatron.flags.table import WITHOUT_DROPOUT

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
KINDS = ("A100-40", "A6000", "V100-16", "T4", "A10G", "L4", "H100-NVL")
STRATEGIES = ("zorse",) * 8 + ("zorse-paper", "cephalo", "stock")
LARGE = {7: (3, 8), 27: (8, 8)}
"""Of every 40 cases those with this number have so many nodes with so many GPUs each."""
PART_WORK = {"layer": 1.0, "embedding": 0.05, "head": 0.8}


def _maybe(draw: random.Random, chance: float, *words: str) -> list[str]:
    return list(words) if draw.random() < chance else []


def random_nodes(draw: random.Random, number: int) -> list[tuple[str, int]]:
    """(kind, GPUs) of each node: mostly one to three nodes with up to eight GPUs together."""
    if number % 40 in LARGE:
        nodes, each = LARGE[number % 40]
        kinds = [draw.choice(KINDS) for _ in range(3)]
        return [(draw.choice(kinds), each) for _ in range(nodes)]
    nodes = draw.choice((1, 2, 2, 3))
    return [(draw.choice(KINDS), draw.choice((1, 1, 2, 2, 3))) for _ in range(nodes)]


def random_cluster(draw: random.Random, nodes: list[tuple[str, int]]) -> str:
    """A cluster file: regions, switches, host memory, links and kinds of its own at random."""
    regions = draw.choice((1, 1, 2)) if len(nodes) > 1 else 1
    switched, own = regions == 1 and draw.random() < 0.4, draw.random() < 0.15
    lines = ["nodes:"]
    for number, (kind, count) in enumerate(nodes):
        parts = [f"name: n{number}", f"gpus: {count} x {'own' if own and not number else kind}"]
        parts.append(f"nics: {draw.choice(('10 Gb/s', '50 Gb/s', '100 Gb/s', '2 x 100 Gb/s'))}")
        if draw.random() < 0.3:
            parts.append(f"link: {draw.choice(('PCIe 6 GB/s', 'NVSwitch 220 GB/s'))}")
        if draw.random() < 0.4:
            parts.append(f"host_memory: {draw.choice(('4GiB', '16GiB', '64GiB', '1TiB'))}")
        if draw.random() < 0.2:
            parts.append("host_link: 3 GB/s")
        if regions > 1:
            parts.append(
                f"region: r{number % 2 if draw.random() < 0.2 else 2 * number // len(nodes)}"
            )
        if switched:
            parts.append(f"switch: s{number % 2}")
        lines.append(f"  - {{{', '.join(parts)}}}")
    if own:
        lines.append(f"gpu_kinds:\n  - {{name: own, like: {nodes[0][0]}, memory: 10GB}}")
    if regions > 1:
        speed = draw.choice(("1 Gb/s", "5 Gb/s", "20 Gb/s"))
        lines.append(f"between_regions:\n  - {{bandwidth: {speed}, latency: 20 ms}}")
    if switched:
        used = ("s0", "s1")[: len(nodes)]
        lines.append("switches:\n  - {name: top}")
        lines += [f"  - {{name: {name}, uplink: {{to: top, bandwidth: 40 Gb/s}}}}" for name in used]
    return "\n".join(lines) + "\n"


def random_model(draw: random.Random, *, is_large: bool) -> dict[str, Any]:
    """A model's shape as a profile says it."""
    hidden = draw.choice((512, 1024, 2048, 4096))
    heads = hidden // 64
    return {
        "name": "random",
        "num_layers": draw.randint(2, 8 if is_large else 12),
        "hidden_size": hidden,
        "ffn_hidden_size": draw.choice((4, 3)) * hidden,
        "num_attention_heads": heads,
        "num_query_groups": draw.choice((heads, heads, heads // 4)),
        "kv_channels": 64,
        "vocab_size": draw.choice((8000, 32000)),
        "seq_length": draw.choice((256, 512, 1024, 2048)),
        "tied_embeddings": draw.random() < 0.5,
        "activation": draw.choice(("gelu", "swiglu")),
        "norm": draw.choice(("layernorm", "rmsnorm")),
        "position_embedding": "rope",
        "linear_bias": draw.random() < 0.5,
    }


def flags_of(draw: random.Random, model: dict[str, Any], batch: int) -> list[str]:
    """A model and a batch as Megatron's command says them, and what else counts."""
    words = {
        "--num-layers": model["num_layers"],
        "--hidden-size": model["hidden_size"],
        "--ffn-hidden-size": model["ffn_hidden_size"],
        "--num-attention-heads": model["num_attention_heads"],
        "--seq-length": model["seq_length"],
        "--max-position-embeddings": model["seq_length"],
        "--vocab-size": model["vocab_size"],
        "--global-batch-size": batch,
        "--tokenizer-type": "NullTokenizer",
        "--position-embedding-type": "rope",
        "--normalization": {"rmsnorm": "RMSNorm"}.get(model["norm"], "LayerNorm"),
    }
    flags = [word for pair in words.items() for word in map(str, pair)]
    if model["num_query_groups"] != model["num_attention_heads"]:
        groups = str(model["num_query_groups"])
        flags += ["--group-query-attention", "--num-query-groups", groups]
    flags += [] if model["tied_embeddings"] else ["--untie-embeddings-and-output-weights"]
    flags += ["--swiglu"] if model["activation"] == "swiglu" else []
    flags += [] if model["linear_bias"] else ["--disable-bias-linear"]
    flags += _maybe(draw, 0.5, *WITHOUT_DROPOUT)
    flags += _maybe(draw, 0.2, "--transformer-impl", "local")
    flags += _maybe(draw, 0.7, "--accumulate-allreduce-grads-in-fp32")
    flags += _maybe(draw, 0.8, "--no-gradient-accumulation-fusion")
    return flags + _maybe(draw, 0.2, "--tensor-model-parallel-size", "2", "--sequence-parallel")


def random_profile(draw: random.Random, model: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    """Times and memory of some of the kinds, as made-up as the model."""
    about = {"model": "random", "source": "made up", "tensor_parallel": 1}
    about["seq_length"] = model["seq_length"]
    sizes, times = (1, 2, 4, 8), []
    for kind in kinds:
        sample_s = draw.uniform(0.001, 0.01)
        for part, work in PART_WORK.items():
            forward_s = [work * sample_s * (0.3 + size) for size in sizes]
            entry = {"part": part, "gpu_kind": kind, "dtype": "float16", "forward_s": forward_s}
            entry["backward_s"] = [2.1 * each for each in forward_s]
            times.append({**about, **entry, "micro_batch_sizes": list(sizes)})
    boundary = model["seq_length"] * model["hidden_size"]
    measured = {"layer": 14, "head": 4, "embedding": 1} if draw.random() < 0.5 else {}
    return {
        "schema_version": 1,
        "sources": [{"name": "made up", "kind": "analytic"}],
        "models": [model],
        "times": times,
        "memory": [
            {
                **about,
                "part": part,
                "parameters": 12 * model["hidden_size"] ** 2,
                "activation_elements": kept * boundary,
                "output_elements": boundary,
            }
            for part, kept in measured.items()
        ],
        "processes": [
            {"gpu_kind": kind, "context_bytes": 500_000_000, "source": "made up"} for kind in kinds
        ],
    }


def options_of(draw: random.Random, *, dtypes: tuple[str, ...], is_large: bool) -> list[str]:
    """Words of `zorse plan` before the model's."""
    words = ["--strategy", draw.choice(STRATEGIES)]
    words += _maybe(draw, 0.7, "--use-all")
    words += _maybe(draw, 0.3, "--no-split-backward")
    words += _maybe(draw, 0.3, "--grad-reduce-dtype", draw.choice(dtypes))
    words += _maybe(draw, 0.25, "--even-tp")
    words += _maybe(draw, 0.15, "--tp-across-nodes")
    words += _maybe(draw, 0.15, "--activation-offload")
    words += _maybe(draw, 0.2, "--margin", "0.2")
    return words + _maybe(draw, 0.8 if is_large else 0.4, "--max-tp", draw.choice("112"))


def random_case(number: int) -> dict[str, Any]:
    """Files by name, words for `zorse plan`, and those of them that describe the model."""
    draw = random.Random(number)
    is_large = number % 40 in LARGE
    nodes, model = random_nodes(draw, number), random_model(draw, is_large=is_large)
    files = {"cluster.yaml": random_cluster(draw, nodes)}
    flags = flags_of(draw, model, draw.choice((32, 64) if is_large else (8, 12, 32, 64)))
    about: list[str] = []
    if draw.random() < 0.4:
        kinds = sorted({kind for kind, _ in nodes})
        profile = random_profile(draw, model, kinds[: draw.randint(1, len(kinds))])
        files["profile.json"] = json.dumps(profile)
        about += ["--profile", "profile.json"]
    kind = draw.choice(("auto", "", "--fp16", "--fp16", "--fp16", "--bf16"))
    flags += [kind] if kind.startswith("--") else []
    words = options_of(draw, dtypes=("bf16", "fp16")[: 1 + (kind == "--fp16")], is_large=is_large)
    words += ["--dtype", "auto"] if kind == "auto" else []
    return {"files": files, "words": words, "about": about, "flags": flags}


def cases(number: int, first: int) -> dict[str, dict[str, Any]]:
    """Name -> case."""
    found = {f"random {seed}": random_case(seed) for seed in range(first, first + number)}
    about = ["--model", "llama-3b", "--seq-length", "512", "--global-batch-size", "128"]
    for path in [] if first else sorted(EXAMPLES.glob("*.yaml")):
        files = {"cluster.yaml": path.read_text(encoding="utf-8")}
        found[path.name] = {"files": files, "words": [], "about": about, "flags": []}
    return found


def output_of(work: str, words: list[str]) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output.replace(work, "DIR")


def answer_of(case: dict[str, Any]) -> dict[str, Any]:
    """All files that were written, what the plan's ranks do, its time and peaks; or why there is
    no plan."""
    with tempfile.TemporaryDirectory() as work:
        given = {name: Path(work, name) for name in case["files"]}
        for name, path in given.items():
            path.write_text(case["files"][name], encoding="utf-8")
        about = [str(given.get(word, word)) for word in case["about"]]
        about += ["--", *case["flags"]] if case["flags"] else []
        plan = Path(work, "plan.json")
        words = ["plan", "--cluster", str(given["cluster.yaml"]), "--out", str(plan)]
        said = output_of(work, [*words, *case["words"], *about])
        if not plan.exists():
            return {"refused": said}
        files = sorted(set(Path(work).iterdir()) - set(given.values()))
        used = Path(work, "plan.cluster.yaml")
        cluster = used if used.exists() else given["cluster.yaml"]
        said = output_of(work, ["check", str(plan), "--actions"]).splitlines(keepends=True)
        lists = "".join(line for line in said if line.startswith("rank "))
        words = ["explain", str(plan), "--json", "--cluster", str(cluster), *about]
        told = json.loads(output_of(work, words))
        refused = [each["where"] for each in told.get("problems", ())]
        if not lists or any(where.startswith("zorse ") for where in refused):
            raise RuntimeError(f"expected lists and a simulation; found {said} {told}")
        return {
            "files": {path.name: path.read_text(encoding="utf-8") for path in files},
            "actions": hashlib.sha256(lists.encode()).hexdigest(),
            "simulated": {name: told.get(name) for name in ("iteration_s", "ranks", "problems")},
        }


def main() -> int:
    """Plan all cases; compare, or write them down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=40, help="random ones (default: 40)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: 0)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--json", type=Path, metavar="FILE", help="write the plans")
    what.add_argument("--against", type=Path, metavar="FILE", help="compare with these plans")
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against else {}
    found, others = {}, []
    for name, case in cases(options.cases, options.first).items():
        found[name] = answer_of(case)
        other = [
            each for each, value in before.get(name, {}).items() if found[name].get(each) != value
        ]
        if options.against and (other or name not in before):
            others.append(name)
            print(f"{name}: other {', '.join(other) or 'case'}", file=sys.stderr, flush=True)
        if options.json:  # as far as it has come
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    plans = sum("files" in answer for answer in found.values())
    print(f"{len(found)} cases, {plans} with a plan, {len(others)} differ")
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
