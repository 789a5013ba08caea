"""Check that every patch in patches/ applies to a Megatron-LM checkout.

    python scripts/check_patches.py /path/to/Megatron-LM

The exit status is 0 if each applies or is applied already, 1 if one does not apply, 2 if the path
is no checkout.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[1] / "patches"


def git_apply(patch: Path, checkout: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `git apply` in the checkout, which need not be a git repository."""
    return subprocess.run(
        ["git", "apply", *options, str(patch)],
        cwd=checkout,
        # In a folder inside another repository git would take paths from that one's root.
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(checkout.parent)},
        capture_output=True,
        text=True,
        check=False,
    )


def state_of(patch: Path, checkout: Path) -> tuple[bool, str]:
    """Return whether a patch is fine, and why."""
    forward = git_apply(patch, checkout, "--check")
    if forward.returncode == 0:
        return True, "applies"
    if git_apply(patch, checkout, "--check", "--reverse").returncode == 0:
        return True, "is applied already"
    return False, "does not apply: " + " ".join(forward.stderr.split())


def main() -> int:
    """Check all patches and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="the root of a Megatron-LM checkout")
    checkout = parser.parse_args().checkout.resolve()
    if not (checkout / "pretrain_gpt.py").is_file():
        print(f"{checkout}: found no pretrain_gpt.py; expected a Megatron-LM checkout")
        return 2
    states = {
        patch.relative_to(PATCHES): state_of(patch, checkout)
        for patch in sorted(PATCHES.rglob("*.patch"))
    }
    for patch, (_, why) in states.items():
        print(f"{patch}: {why}")
    return 0 if states and all(fine for fine, _ in states.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
