"""Names of Megatron and of torch.distributed that an emulated rank rebinds, or finds rebound.

They are applied before training starts, with a plan or without one, and only look on or save time:
what stock and this package compute stays the same.
"""

from functools import partial

from zorse_megatron.adapter.patches.rebind import Rebinding
from zorse_megatron.adapter.versions import MEGATRON_VERSIONS, TORCH_VERSIONS

_record = partial(Rebinding, test="tests/megatron/test_emulation.py")
_of_megatron = partial(_record, versions=MEGATRON_VERSIONS)
_of_torch = partial(_record, versions=TORCH_VERSIONS)

WRAP_MODEL = _of_megatron(
    target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    parameters=(
        "self",
        "config",
        "ddp_config",
        "module",
        "disable_bucketing",
        "pg_collection",
        "full_param_layout",
    ),
    becomes="The same, and then the layers are paced and the buffers counted.",
    why="layers are paced, and buffers are counted as the real model's, from the moment "
    "they are in place; both stock's wrapper and ours pass here",
    delete_when="pretrain calls a hook with the wrapped model before the optimizer is made",
)
PACE_STEP = _of_megatron(
    target="megatron.training.training:train_step",
    parameters=(
        "forward_step_func",
        "data_iterator",
        "model",
        "optimizer",
        "opt_param_scheduler",
        "config",
        "forward_backward_func",
        "iteration",
        "pg_collection",
        "p2p_communicator",
    ),
    becomes="The same; the clock starts with the first step.",
    why="the emulated clock starts with the first step and is read at the end of each",
    delete_when="pretrain takes a callback for each step",
)

_ON_EMULATED = "The same; groups of gloo become groups of the backend `emulated`."
INIT_PROCESS_GROUP = _of_torch(
    target="torch.distributed:init_process_group",
    becomes=_ON_EMULATED,
    why="Megatron's --distributed-backend knows nccl and gloo only",
    delete_when="Megatron takes any registered backend",
)
NEW_GROUP = _of_torch(
    target="torch.distributed:new_group",
    becomes=_ON_EMULATED,
    why="Megatron asks for gloo groups by name",
    delete_when="Megatron takes any registered backend",
)
GET_BACKEND = _of_torch(
    target="torch.distributed:get_backend",
    parameters=("group",),
    becomes="The same; the backend `emulated` answers to the name gloo.",
    why="callers choose by this name how to call, and the calls are those of gloo",
    delete_when="the runtime asks groups for abilities and not for names",
)

_of_parent = partial(_of_megatron, test="tests/megatron/test_emulation.py::test_ranks_start_fast")
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
    INIT_PROCESS_GROUP,
    NEW_GROUP,
    GET_BACKEND,
)
