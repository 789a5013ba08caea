"""Names that an emulated rank rebinds: of Megatron, of torch.distributed and of this package.

They are applied before training starts, with a plan or without one, and only look on: what stock
and this package compute stays the same.
"""

from functools import partial

from zorse_megatron.adapter.patches.rebind import Rebinding
from zorse_megatron.adapter.versions import MEGATRON_VERSIONS, TORCH_VERSIONS

_record = partial(Rebinding, test="tests/megatron/test_emulation.py")
_of_megatron = partial(_record, versions=MEGATRON_VERSIONS)
_of_torch = partial(_record, versions=TORCH_VERSIONS)
_of_ours = partial(_record, versions="")
_LINK = "zorse_megatron.runtime.host_memory:HostLink"

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

_copying = partial(
    _of_ours,
    becomes="The same copy, with the time that it takes.",
    why="a copy takes the time of the real model's bytes on the emulated GPU's link",
    delete_when="HostLink takes an object that makes copies",
)
START_TO_HOST = _copying(target=f"{_LINK}.start_to_host", parameters=("self", "source", "host"))
START_FROM_HOST = _copying(target=f"{_LINK}.start_from_host", parameters=("self", "host", "target"))
HOLD_BACK = _of_ours(
    target=f"{_LINK}.hold_back",
    parameters=("self", "copied"),
    becomes="The rank's clock waits for the copy.",
    why="a rank's clock stands still for copies where a CUDA stream would wait",
    delete_when="HostLink takes an object that makes copies",
)
_standing_for = partial(
    _of_ours, delete_when="the runtime says what it sends, and not only which tensors"
)
SEND_ACTIVATIONS = _standing_for(
    target="zorse_megatron.runtime.activation_offload:ActivationOffload._send",
    parameters=("self", "key", "memories"),
    becomes="The same; it says what the copied tensors stand for.",
    why="what a tiny forward kept stands for what the real one keeps",
)
KEEP_STATE = _standing_for(
    target="zorse_megatron.adapter.host_state:HostState.__init__",
    parameters=("self", "optimizer", "link", "optimizer_state", "on_change"),
    becomes="The same; it says what the copied tensors stand for.",
    why="pieces of the tiny state stand for pieces of the real one",
)
PIECE_SIZES = _of_ours(
    target="zorse_megatron.adapter.state_pieces:_piece_sizes",
    parameters=("shards",),
    becomes="The sizes that make as many pieces as the real state has.",
    why="the tiny state is stepped in as many pieces as the real one",
    delete_when="the number of pieces is part of the plan",
)

EMULATION = (
    WRAP_MODEL,
    PACE_STEP,
    INIT_PROCESS_GROUP,
    NEW_GROUP,
    GET_BACKEND,
    START_TO_HOST,
    START_FROM_HOST,
    HOLD_BACK,
    SEND_ACTIVATIONS,
    KEEP_STATE,
    PIECE_SIZES,
)
