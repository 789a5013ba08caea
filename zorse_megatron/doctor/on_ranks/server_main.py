"""Forks the ranks of the checks on a CPU: `... doctor.on_ranks.server_main`."""

from zorse_megatron.emulate.forks.fork_server import serve


def preload() -> None:
    """Import what every rank needs, and start no thread and no process group."""
    from zorse_megatron.adapter.cpu import cpu_mode

    cpu_mode.enable()
    import zorse_megatron.adapter.gpt_entry
    import zorse_megatron.adapter.recording.metrics
    import zorse_megatron.adapter.training
    import zorse_megatron.pretrain  # noqa: F401
    from zorse_megatron.adapter.patches.registry import REGISTRY
    from zorse_megatron.adapter.preload import hooks_of_forked_ranks, import_late_modules_of_stock

    import_late_modules_of_stock()
    REGISTRY.apply(hooks_of_forked_ranks())


if __name__ == "__main__":
    serve(preload)
