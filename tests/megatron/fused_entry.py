"""The recording entry, with an optimizer that keeps its state as the fused Adams of GPUs do."""

from tests.megatron.fused_adam import fused_adam
from tests.megatron.recording_entry import record
from zorse_megatron.adapter import cpu_mode

if __name__ == "__main__":
    if cpu_mode.needed():
        cpu_mode.enable()
    with fused_adam(wanted=True):
        record()
