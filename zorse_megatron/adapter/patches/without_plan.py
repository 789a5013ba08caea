"""Names of Megatron rebound without a plan, too: stock's bugs, recording, measuring, emulation."""

from functools import partial

from zorse_megatron.adapter.patches import rebind
from zorse_megatron.adapter.patches.rebind import MEGATRON_VERSIONS, Rebinding

_record = partial(Rebinding, versions=MEGATRON_VERSIONS)
_building = partial(
    _record,
    target="megatron.training.training:setup_model_and_optimizer",
    parameters=rebind.SETUP,
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

# Names of Megatron that an emulated rank rebinds, or finds rebound.
#
# They are applied before training starts, with a plan or without one, and only look on or save
# time: what stock and this package compute stays the same. The backend needs none: Megatron trains
# on the process group that it finds (`emulate.on_ranks.rank_main`).


_EMULATION = "tests/megatron/test_emulation.py"
_emulating = partial(
    Rebinding,
    versions=MEGATRON_VERSIONS,
    test=f"{_EMULATION}::test_stock_on_one_gpu_takes_the_sum_of_its_computations",
)

WRAP_MODEL = _emulating(
    target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    parameters=("self", *rebind.DDP),
    becomes="The same, and then the layers are paced and the buffers counted.",
    why="layers are paced, and buffers are counted as the real model's, from the moment "
    "they are in place; both stock's wrapper and ours pass here",
    delete_when="pretrain calls a hook with the wrapped model before the optimizer is made",
)
PACE_STEP = _emulating(
    target="megatron.training.training:train_step",
    parameters=rebind.TRAIN_STEP,
    becomes="The same; the clock starts with the first step.",
    why="the emulated clock starts with the first step and is read at the end of each",
    delete_when="pretrain takes a callback for each step",
)

_of_parent = partial(_emulating, test=f"{_EMULATION}::test_ranks_start_fast")
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
