"""Names of Megatron and of torch.distributed that an emulated rank rebinds.

They are applied before training starts, with a plan or without one, and only look on: what stock
and this package compute stays the same.
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

EMULATION = (
    WRAP_MODEL,
    PACE_STEP,
    INIT_PROCESS_GROUP,
    NEW_GROUP,
    GET_BACKEND,
)
