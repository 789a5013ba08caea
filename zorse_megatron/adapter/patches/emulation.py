"""Names of Megatron that an emulated rank rebinds, or finds rebound.

They are applied before training starts, with a plan or without one, and only look on or save time:
what stock and this package compute stays the same. The backend needs none: Megatron trains on the
process group that it finds (`emulate.on_ranks.rank_main`).
"""

from functools import partial

from zorse_megatron.adapter.patches import signatures
from zorse_megatron.adapter.patches.rebind import Rebinding
from zorse_megatron.adapter.patches.versions import MEGATRON_VERSIONS

_EMULATION = "tests/megatron/test_emulation.py"
_record = partial(
    Rebinding,
    versions=MEGATRON_VERSIONS,
    test=f"{_EMULATION}::test_stock_on_one_gpu_takes_the_sum_of_its_computations",
)

WRAP_MODEL = _record(
    target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    parameters=("self", *signatures.DDP),
    becomes="The same, and then the layers are paced and the buffers counted.",
    why="layers are paced, and buffers are counted as the real model's, from the moment "
    "they are in place; both stock's wrapper and ours pass here",
    delete_when="pretrain calls a hook with the wrapped model before the optimizer is made",
)
PACE_STEP = _record(
    target="megatron.training.training:train_step",
    parameters=signatures.TRAIN_STEP,
    becomes="The same; the clock starts with the first step.",
    why="the emulated clock starts with the first step and is read at the end of each",
    delete_when="pretrain takes a callback for each step",
)

_of_parent = partial(_record, test=f"{_EMULATION}::test_ranks_start_fast")
ADD_ARGUMENTS = _of_parent(
    target="megatron.training.arguments:add_megatron_arguments",
    parameters=("parser",),
    becomes="The same arguments, of a parser that the process that forks the ranks has built.",
    why="stock reads the help of 800 arguments from its sources each time: 1 s of CPU in every "
    "rank, which shares few cores with the others",
    delete_when="Megatron builds its parser in milliseconds",
)
SAVE_QUEUE = _of_parent(
    target="megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
    parameters=("mp_mode",),
    becomes="The same queue; the process that holds it is forked.",
    why="a spawned one imports torch and Megatron again: 4 to 8 s of CPU for each rank that saves",
    delete_when="Megatron forks it",
)

EMULATION = (
    ADD_ARGUMENTS,
    SAVE_QUEUE,
    WRAP_MODEL,
    PACE_STEP,
)
