"""The recording entry, with layers of `engine_like` in place of Megatron's own."""

from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode

if __name__ == "__main__":
    if cpu_mode.needed():
        cpu_mode.enable()
    from megatron.core.models.backends import LocalSpecProvider

    from tests.megatron.engine_like import EngineLikeColumn, EngineLikeRow

    LocalSpecProvider.column_parallel_linear = lambda self: EngineLikeColumn  # type: ignore[method-assign,misc]
    LocalSpecProvider.row_parallel_linear = lambda self: EngineLikeRow  # type: ignore[method-assign,misc]
    record()
