"""Forks ranks, on GPUs if there are any: `... zorse_megatron.emulate.on_ranks.server_main`."""

from zorse_megatron.emulate.fork_server import serve


def preload() -> None:
    """Import what every rank needs, and start no thread and no process group."""
    from zorse_megatron.adapter import cpu_mode

    if cpu_mode.needed():
        cpu_mode.enable()
    from zorse_megatron.adapter.patches.rebind import REGISTRY
    from zorse_megatron.adapter.preload import (
        hooks_of_forked_ranks,
        import_late_modules_of_stock,
        remember_flags,
    )

    import_late_modules_of_stock()
    REGISTRY.apply(hooks_of_forked_ranks(on_gpu=not cpu_mode.enabled()))
    remember_flags()
    # What a rank imports late, once it has its plan and its flags.
    import zorse_megatron.adapter.gpt_entry
    import zorse_megatron.adapter.recording
    import zorse_megatron.adapter.training
    import zorse_megatron.emulate.conductor
    import zorse_megatron.emulate.on_ranks.memory_cap
    import zorse_megatron.emulate.on_ranks.model_sizes
    import zorse_megatron.emulate.on_ranks.pacer
    import zorse_megatron.pretrain  # noqa: F401


if __name__ == "__main__":
    serve(preload)
