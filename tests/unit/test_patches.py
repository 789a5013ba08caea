"""patches/ apply to the tag that they are for, and do nothing without one of our flags."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.upstream import PRETRAIN_GPT, needs_upstream

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "patches" / "core_v0.19.0" / "pretrain_gpt.patch"
CHECK = ROOT / "scripts" / "check_patches.py"
MARK = "the stock script runs"
STAND_IN = f"\nimport sys\nprint({MARK!r}, sys.argv[1:], __name__)\n"


def original_text():
    """What the patch says upstream's file holds: context lines, with filler above."""
    lines = PATCH.read_text(encoding="utf-8").splitlines()
    hunks = [number for number, line in enumerate(lines) if line.startswith("@@")]
    assert len(hunks) == 1
    match = re.fullmatch(r"@@ -(\d+),(\d+) \+\d+,(\d+) @@", lines[hunks[0]])
    start, old_count, new_count = map(int, match.groups())
    body = lines[hunks[0] + 1 :]
    old = [line[1:] for line in body if line[:1] in (" ", "-")]
    new = [line[1:] for line in body if line[:1] in (" ", "+")]
    assert (len(old), len(new)) == (old_count, new_count)
    return "\n".join(["# filler"] * (start - 1) + old) + "\n"


@pytest.fixture
def checkout(tmp_path):
    """A folder that holds of pretrain_gpt.py only what the patch knows of it."""
    (tmp_path / "pretrain_gpt.py").write_text(original_text() + STAND_IN, encoding="utf-8")
    return tmp_path


def check(path):
    command = [sys.executable, str(CHECK), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def apply(path):
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(path.parent)}
    subprocess.run(["git", "apply", str(PATCH)], cwd=path, env=environment, check=True)


def run_script(path, *words):
    command = [sys.executable, str(path / "pretrain_gpt.py"), *words]
    return subprocess.run(command, cwd=path, capture_output=True, text=True, check=False)


def test_check_tells_the_three_states(checkout):
    assert check(checkout).stdout == "core_v0.19.0/pretrain_gpt.patch: applies\n"
    apply(checkout)
    assert check(checkout).stdout == "core_v0.19.0/pretrain_gpt.patch: is applied already\n"
    (checkout / "pretrain_gpt.py").write_text("import time\n", encoding="utf-8")
    answer = check(checkout)
    assert answer.returncode == 1
    assert "does not apply" in answer.stdout


def test_check_wants_a_checkout(tmp_path):
    answer = check(tmp_path)
    assert answer.returncode == 2
    assert "found no pretrain_gpt.py" in answer.stdout


def test_without_our_flags_the_script_is_stock(checkout):
    apply(checkout)
    answer = run_script(checkout, "--num-layers", "2")
    assert answer.stdout == f"{MARK} ['--num-layers', '2'] __main__\n"
    assert answer.returncode == 0


@pytest.mark.slow
def test_with_our_flags_we_take_over_before_the_script_goes_on(checkout):
    apply(checkout)
    answer = run_script(checkout, "--num-layers", "2", "--zorse-plan", "missing.json")
    assert answer.returncode == 2
    assert "cannot read missing.json" in answer.stderr
    assert MARK not in answer.stdout


@needs_upstream
def test_applies_to_upstream(tmp_path):
    shutil.copy(PRETRAIN_GPT, tmp_path)
    assert check(tmp_path).returncode == 0
    apply(tmp_path)
    compile((tmp_path / "pretrain_gpt.py").read_text(encoding="utf-8"), "pretrain_gpt.py", "exec")
