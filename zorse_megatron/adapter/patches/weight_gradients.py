"""The name that ranks of a group with `split_backward` rebind."""

from zorse_megatron.adapter.patches.rebind import Rebinding
from zorse_megatron.adapter.patches.versions import MEGATRON_VERSIONS

LINEAR_BACKWARD = Rebinding(
    target="megatron.core.tensor_parallel.layers:"
    "LinearWithGradAccumulationAndAsyncCommunication.backward",
    parameters=("ctx", "grad_output"),
    becomes="The same; in a backward of a group with `split_backward` the weight's gradient is "
    "left to an action of its own.",
    why="stock computes the gradients of input and weight in one function; its own "
    "delay_wgrad_compute is for layers of Transformer Engine, whose stores are replaced",
    versions=MEGATRON_VERSIONS,
    test="tests/megatron/test_weight_gradients.py::test_weights_are_those_of_the_plan_without_it",
    delete_when="stock's linear layers have a backward_dw",
)

SPLIT_BACKWARD = (LINEAR_BACKWARD,)
