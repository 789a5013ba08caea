"""Runs the test of each rebound name without its record: a test that passes proves nothing.

    python scripts/check_patches_needed.py                # all records: about half an hour
    python scripts/check_patches_needed.py DistributedOptimizer compile_helpers

Prints one line for each record. The exit status is 0 if every test fails without its record, 1 if
one passes or does not end in time, 2 if nothing matches the words. A `sitecustomize`, which every
Python process of the test imports, leaves the record out; the package itself knows nothing of it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from zorse_megatron.adapter.patches.rebind import REGISTRY

ROOT = Path(__file__).resolve().parents[1]
LEAVE_OUT = """
from zorse_megatron.adapter.patches.rebind import Registry

apply = Registry.apply


def apply_the_others(registry, replacements):
    kept = {{each: make for each, make in replacements.items() if each != {name!r}}}
    return apply(registry, kept)


Registry.apply = apply_the_others
"""


def fails_without(name: str, *, timeout_s: float) -> tuple[bool, str]:
    """Return whether a record's test fails without it, and the last line that says how."""
    test = REGISTRY.records[name].test
    with tempfile.TemporaryDirectory(prefix="zorse-without-") as directory:
        code = LEAVE_OUT.format(name=name)
        Path(directory, "sitecustomize.py").write_text(code, encoding="utf-8")
        paths = [directory, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, test],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, f"not ended after {timeout_s:g} s"
    # 1: tests failed. Anything else but 0 is no verdict (no such test, say), nor is a skipped test.
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    if done.returncode not in (0, 1) or not re.search(r"\d+ (passed|failed|error)", last):
        raise SystemExit(f"{test}: pytest ended with {done.returncode}\n{done.stdout}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1, lines[0] if lines else last


def main() -> int:
    """Check the records whose target has one of the words in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of names; none: all records")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each test")
    given = parser.parse_args()
    records = [
        (name, record)
        for name, record in REGISTRY.records.items()
        if not given.words or any(word in record.target for word in given.words)
    ]
    if not records:
        print(f"found no record whose name has any of {given.words} in it")
        return 2
    verdicts = []
    for name, record in records:
        fails, how = fails_without(name, timeout_s=given.timeout)
        verdicts.append(fails)
        verdict = "fails without it" if fails else "DOES NOT FAIL WITHOUT IT"
        print(f"{record.target} ({record.test}): {verdict}: {how}", flush=True)
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
