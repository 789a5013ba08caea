"""Runs the training script: the user's own, or ours when none is given."""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from zorse_megatron.adapter.patches.versions import megatron_directory
from zorse_megatron.log import say


class SiblingModules(MetaPathFinder):
    """Finds single-file modules next to the script (`gpt_builders`, `model_provider`).

    Python would put the script's directory on `sys.path`. In a Megatron-LM checkout that directory
    also holds a package `megatron`, which would take the place of the installed one half-way.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find `fullname` if it is a top-level module in a file of its own."""
        file = self.directory / f"{fullname}.py"
        if path is not None or not file.is_file():
            return None
        return importlib.util.spec_from_file_location(fullname, file)


def run_entry(script: Path | None, megatron_flags: Sequence[str]) -> None:
    """Run `script`, or our GPT entry, as `__main__` with Megatron's flags."""
    if script is None:
        sys.argv = ["zorse_megatron.pretrain", *megatron_flags]
        from zorse_megatron.adapter import gpt_entry

        gpt_entry.main()
        return
    sys.argv = [str(script), *megatron_flags]
    own, used = script.resolve().parent / "megatron", megatron_directory()
    if own.is_dir() and own != used:
        say(f"{script} runs on the megatron in {used}, not on its checkout's own")
    # At the end: an installed module wins over one next to the script.
    sys.meta_path.append(SiblingModules(script.resolve().parent))
    # In the namespace of the real __main__, so that what the script defines can be pickled, while
    # processes that are spawned (torch_dist saving) import our guarded module and not the script.
    main = vars(sys.modules["__main__"])
    main["__file__"] = str(script)
    exec(compile(script.read_text(), str(script), "exec"), main)
