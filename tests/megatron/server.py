"""Forks the ranks of the tests' jobs: see `zorse_megatron.emulate.fork_server`.

Started by `launch.MegatronServer`. It has what one for a user's emulated ranks has, and more.
"""

import importlib
import pkgutil
import sys

from zorse_megatron.emulate import fork_server

# What a run imports of this project, most of it late: after the plan and Megatron's flags are read.
RUN_PACKAGES = ("plan", "inputs", "schedule", "runtime", "adapter", "flags", "live")


def preload() -> None:
    """Import what every rank needs, and start no thread and no process group."""
    # It wraps stdout, and no test logs to it.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    fork_server.preload()
    for name in RUN_PACKAGES:
        package = importlib.import_module(f"zorse_megatron.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    # Each rank shuffles all documents three times, which takes longer than to train on some.
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 1000


if __name__ == "__main__":
    fork_server.serve(preload)
