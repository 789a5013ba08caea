"""Every command in README and docs runs, or is listed here with the reason why it does not.

docs/cli.md and docs/tutorial.md have tests of their own, which run all of theirs. Put in place of
what is printed: Megatron's flags for MEGATRON_FLAGS, and a small cluster where the text has none.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from tests.printed import each_search_once, run_zorse, words_of
from tests.unit.checkpoint_folders import save
from tests.unit.test_docs import DOCUMENTS, ROOT, commands_in
from tests.unit.test_hugging_face import LLAMA_3_2_1B
from zorse_megatron.doctor.plans import UNEVEN_PLAN
from zorse_megatron.plan.plan_file import dump_plan

pytestmark = pytest.mark.slow

WITH_THEIR_OWN_TEST = {
    "docs/cli.md": "tests/unit/test_cli_docs.py",
    "docs/tutorial.md": "tests/megatron/test_tutorial.py",
}
# How a command begins -> why it is not run here, and what runs in its place.
NOT_RUN = {
    "make demo": "minutes, most for the installation; tests/megatron/test_demo.py runs the demo",
    "make test": "these are the tests",
    "torchrun --nproc-per-node 5 -m zorse_megatron.pretrain": "tests/megatron/test_readme.py",
    "torchrun --nnodes": "two nodes; tests/slurm and tests/megatron/test_readme.py",
    "torchrun --nproc-per-node 8 --nnodes 4": "four nodes; tests/megatron/test_measure.py",
    "torchrun --nproc-per-node 5 pretrain_gpt.py": "tests/megatron/test_patched_script.py",
    "srun ": "Slurm; tests/slurm, tests/megatron/test_measure.py and test_measure_layers.py",
    "zorse compare ": "minutes; tests/megatron/test_emulation.py compares less",
    "zorse emulate ": "a minute; tests/megatron/test_emulation.py emulates less",
    "zorse plan --cluster examples/two-sites.yaml": "a minute; tests/unit/test_selection.py",
    "zorse plan --from-status": "a run with --zorse-status; tests/unit/test_from_status.py",
    "zorse move ": "a run with --zorse-status; tests/unit/test_move.py",
    "zorse launch plan.json --cluster cluster.yaml --slurm train.sh --elastic": "a plan for two "
    "nodes; tests/unit/test_elastic_slurm.py",
    "zorse launch plan.json --cluster cluster.yaml --torchrun --elastic": "the same; "
    "tests/unit/test_elastic_torchrun.py",
    "zorse profile measure --out": "five minutes on a CPU; tests/megatron/test_measure.py",
    "zorse profile correct ": "a run with --zorse-status; tests/unit/test_from_status.py",
    "zorse import-hf ": "a downloaded model; tests/megatron/test_weights.py",
    "zorse export-hf ": "what was trained from it; tests/megatron/test_weights.py",
    "zorse plan --cluster cluster.yaml --model Llama-3.1-8B": "the same",
    "zorse plan --cluster examples/fine-tuning-lab.yaml": "the same, and a minute",
    "zorse doctor": "a minute; tests/megatron/test_doctor.py runs it",
    "python -m scripts.time_on_gpu": "a GPU; with --tiny it takes three minutes on a CPU",
    "python -m scripts.launch_order.check": "minutes; tests/unit/test_launch_order.py checks less",
    "python -m scripts.bench_stock": "half an hour of searches; tests/unit/test_bench_stock.py",
    "python -m pytest": "it is among these tests",
    "python scripts/bench_kernels.py": "its times are of GPUs; tests/kernels/test_bench.py",
    "python -m scripts.bench_grouped_gemm": "its times too; tests/kernels/test_bench.py",
    "python -m scripts.bench_executor_overhead": "minutes of timing",
    "python -m scripts.import_profile": "a checkout; tests/unit/test_profile.py",
    "python -m scripts.validation.step_counts": "a minute; tests/megatron/test_step_counts.py",
    "python scripts/check_patches.py": "a checkout of Megatron-LM; tests/unit/test_patches.py",
    "python -m scripts.validation.sailor": "tables of others; tests/unit/test_measured.py",
    "python scripts/compare_": "minutes of training",
    "python scripts/memory_by_chunks.py": "tests/megatron/test_memory_by_chunks.py",
    "git apply": "a checkout of Megatron-LM; tests/unit/test_patches.py",
    "pip install": "the network",
}
# Where the search takes 9 to 15 s, another strategy reads the same files and prices the same.
QUICKER = {
    "--cluster examples/mini-b.yaml --model llama-3b": ("--strategy", "cephalo"),
    "--profile profile.json --out plan.json -- --num-layers 32": ("--strategy", "cephalo"),
}
FLAGS = (
    "--num-layers 6 --hidden-size 96 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --vocab-size 1023 --tokenizer-type NullTokenizer "
    "--global-batch-size 24 --fp16 --lr 1e-3 --train-iters 2 --eval-interval 1000"
)
NODES = "nodes:\n  - {{name: new, gpus: {}, nics: 100 Gb/s}}\n"
UNEQUAL = NODES.format("[1 x A6000, 1 x V100-16]")
CLUSTERS = {
    "docs/profile-file.md": NODES.format("2 x A100-80"),
    "docs/elastic.md": NODES.format("1 x A6000")
    + "  - {name: old, gpus: 1 x V100-16, nics: 100 Gb/s}\n",
}


def commands() -> list[tuple[str, str]]:
    return [
        (document, line)
        for document in DOCUMENTS
        if document not in WITH_THEIR_OWN_TEST
        for line in commands_in(document)
    ]


def why_not(line: str) -> list[str]:
    return [beginning for beginning in NOT_RUN if line.startswith(beginning)]


def run_in(directory: Path, document: str) -> Iterator[str]:
    """Run what can be run of a document in an empty directory; the lines that were run."""
    (directory / "examples").symlink_to(ROOT / "examples")
    (directory / "cluster.yaml").write_text(CLUSTERS.get(document, UNEQUAL))
    (directory / "config.json").write_text(json.dumps(LLAMA_3_2_1B))
    (directory / "plan.json").write_text(dump_plan(UNEVEN_PLAN))
    shutil.copy(ROOT / "examples" / "mini-profile.json", directory / "profile.json")
    save(directory / "checkpoints", 10)
    for line in commands_in(document):
        if why_not(line):
            continue
        quicker = {} if "--strategy" in line else QUICKER
        more = [word for part, added in quicker.items() if part in line for word in added]
        words = words_of(line.replace("MEGATRON_FLAGS", "$FLAGS"), {"FLAGS": FLAGS})
        at = words.index("--") if "--" in words else len(words)
        with chdir(directory):
            if words[0] == "zorse":
                run_zorse([*words[:at], *more, *words[at:]])
            else:
                assert words == ["make", "help"]
                subprocess.run([*words, "-C", ROOT], check=True, capture_output=True)
        yield line


@pytest.fixture(scope="module", autouse=True)
def searches() -> Iterator[None]:
    with each_search_once():
        yield


@pytest.mark.parametrize("document", sorted({document for document, _line in commands()}))
def test_commands_run(document: str, tmp_path: Path) -> None:
    run = list(run_in(tmp_path, document))
    skipped = [line for line in commands_in(document) if why_not(line)]
    assert len(run) + len(skipped) == len(commands_in(document))


def test_what_is_not_run_is_there_and_its_tests_are() -> None:
    lines = [line for _document, line in commands()]
    stale = [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)]
    assert stale == []
    reasons = " ".join((*NOT_RUN.values(), *WITH_THEIR_OWN_TEST.values())).replace(";", " ")
    for word in reasons.replace(",", " ").split():
        if word.startswith("tests/"):
            assert (ROOT / word).exists(), word
