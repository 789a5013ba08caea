"""A script for torchrun: NVIDIA's own `pretrain_gpt.py`, unmodified, or our copy of it where that
is not there; on a machine without a GPU in CPU mode, which replaces names of `torch.cuda`.

Of Megatron one thing is changed: it does not build its C++ helpers, which a wheel has built.
"""

import os
import runpy
import sys


def main() -> None:
    names = ("RANK", "LOCAL_RANK", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES")
    said = (f"{name}={os.environ.get(name)}" for name in ("SLURMD_NODENAME", *names))
    # A line in one piece: others write to the same file, and not by lines.
    sys.stdout.write(f"\nstarted with {' '.join(said)}\n")
    sys.stdout.flush()
    from tests.megatron.upstream import DIRECTORY, PRETRAIN_GPT, SCRIPT
    from zorse_megatron.adapter import cpu_mode
    from zorse_megatron.flags.installed_software import with_cpu_flags

    if cpu_mode.needed():
        cpu_mode.enable()
        sys.argv[1:] = with_cpu_flags(sys.argv[1:])
    from zorse_megatron.adapter.patches.rebind import REGISTRY
    from zorse_megatron.adapter.start import stock_fixes

    REGISTRY.apply(stock_fixes())
    if not SCRIPT:
        from zorse_megatron.adapter import gpt_entry

        gpt_entry.main()
        return
    sys.path.insert(0, str(DIRECTORY))
    sys.argv[0] = str(PRETRAIN_GPT)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
