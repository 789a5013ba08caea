"""Names of Megatron that are rebound without a plan, too: bugs of stock, recording, measuring."""

from functools import partial

from zorse_megatron.adapter.patches import signatures
from zorse_megatron.adapter.patches.rebind import Rebinding
from zorse_megatron.adapter.patches.versions import MEGATRON_VERSIONS

_record = partial(Rebinding, versions=MEGATRON_VERSIONS)
_building = partial(
    _record,
    target="megatron.training.training:setup_model_and_optimizer",
    parameters=signatures.SETUP,
)

COMPILE_HELPERS = _record(
    target="megatron.core.datasets.utils:compile_helpers",
    parameters=(),
    becomes="The same, where the extension is not there yet.",
    why="the wheel ships the built extension helpers_cpp but no Makefile; stock runs make "
    "regardless and exits with status 1",
    test="tests/megatron/test_stock_on_cpu.py::test_stock_trains",
    delete_when="the wheel ships the Makefile, or compile_helpers looks before it builds",
)
LOG_STEP = _record(
    target="megatron.training.training:training_log",
    parameters=(
        "loss_dict",
        "total_loss_dict",
        "learning_rate",
        "iteration",
        "loss_scale",
        "report_memory_flag",
        "skipped_iter",
        "grad_norm",
        "params_norm",
        "num_zeros_in_grad",
        "max_attention_logit",
        "pg_collection",
        "is_first_iteration",
        "seqlen_squared_sum_in_batch",
        "total_real_tokens_in_batch",
    ),
    becomes="The same, after writing a line of JSON to the metrics file.",
    why="stock's log lines are rounded and averaged over the logging interval",
    test="tests/megatron/test_metrics.py::test_agrees_with_what_stock_prints",
    delete_when="Megatron writes its scalars in full precision without TensorBoard",
)
SETUP_WHEN_RECORDING = _building(
    becomes="The same, once every rank can write its file; under a plan that is asked before.",
    why="ranks can tell each other what they cannot write here, and nothing is built yet",
    test="tests/megatron/test_record_files.py::test_a_stock_run_checks_its_metrics",
    delete_when="--zorse-metrics goes",
)
SETUP_WHEN_MEASURING = _building(
    becomes="The same; the model is measured, and the command ends.",
    why="the user's own flags, and script, build the layers that are measured",
    test="tests/megatron/test_measure_layers.py::test_parameters_are_those_of_the_shape",
    delete_when="Megatron can build model and optimizer from a command line without training",
)

ALWAYS = (COMPILE_HELPERS,)
RECORDING = (LOG_STEP, SETUP_WHEN_RECORDING)
MEASURING = (SETUP_WHEN_MEASURING,)
