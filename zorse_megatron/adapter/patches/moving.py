"""Names of Megatron's training that a run under a plan rebinds to go on under another one."""

from functools import partial

from zorse_megatron.adapter.patches import signatures
from zorse_megatron.adapter.patches.rebind import Rebinding
from zorse_megatron.adapter.patches.versions import MEGATRON_VERSIONS

_TEST = "tests/megatron/test_moving.py::test_goes_on_as_from_a_checkpoint"
_record = partial(Rebinding, versions=MEGATRON_VERSIONS, test=_TEST)

DECIDE_EXIT = _record(
    target="megatron.training.training:checkpoint_and_decide_exit",
    parameters=(
        "model",
        "optimizer",
        "opt_param_scheduler",
        "iteration",
        "num_floating_point_operations_so_far",
        "checkpointing_context",
        "train_data_iterator",
    ),
    becomes="The same; then, if another plan has been asked for, the training is left for it.",
    why="it is the last that happens in an iteration: all is logged, evaluated and saved, and no "
    "sample of the next one has been read",
    delete_when="stock's loop takes a callback that may end it after an iteration",
)
SETUP_FROM_MEMORY = _record(
    target="megatron.training.training:setup_model_and_optimizer",
    parameters=signatures.SETUP,
    becomes="The same, without loading; state comes from where it was under the plan before.",
    why="stock takes state from checkpoints only",
    delete_when="load_checkpoint takes a source that is not a folder",
)

MOVING = (DECIDE_EXIT, SETUP_FROM_MEMORY)
