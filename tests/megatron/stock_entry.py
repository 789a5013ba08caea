"""Stock Megatron through our GPT entry, with CPU mode where there is no GPU.

Saving a checkpoint re-imports this file in another process: nothing heavy at module level.
"""

import sys


def main() -> None:
    from zorse_megatron.adapter import cpu_mode
    from zorse_megatron.flags.installed_software import with_cpu_flags

    if cpu_mode.needed():
        cpu_mode.enable()
        sys.argv[1:] = with_cpu_flags(sys.argv[1:])

    from zorse_megatron.adapter import gpt_entry
    from zorse_megatron.adapter.patches.rebind import REGISTRY
    from zorse_megatron.adapter.start import stock_fixes

    REGISTRY.apply(stock_fixes())
    gpt_entry.main()


if __name__ == "__main__":
    main()
