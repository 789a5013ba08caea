"""Names of Megatron's training that a run under a plan rebinds."""

from functools import partial

from zorse_megatron.adapter.patches import rebind
from zorse_megatron.adapter.patches.rebind import MEGATRON_VERSIONS, Rebinding

_EXACT = "tests/megatron/test_exactness.py"
_SCRIPT = "tests/megatron/test_upstream_script.py"
_LOOP = "megatron.training.training"
_record = partial(Rebinding, versions=MEGATRON_VERSIONS)
_training = partial(_record, test=f"{_EXACT}::test_follows_stock")

PARSE_ARGS = _record(
    target="megatron.training.arguments:parse_args",
    parameters=("extra_args_provider", "ignore_unknown_args"),
    becomes="The same; flags that nobody knows are told by name, and so is a checkpoint that is "
    "not whole where its arguments are asked for.",
    why="flags of the script's own parser are known only here, and argparse would print its usage, "
    "a thousand lines, on every rank",
    test="tests/megatron/test_bad_input.py::test_a_flag_that_the_parser_of_the_script_lacks",
    delete_when="upstream takes a plan, or patches/ is merged",
)
VALIDATE_ARGS = _training(
    target="megatron.training.arguments:validate_args",
    parameters=("args", "defaults"),
    becomes="The same, once the flags fit the plan, and with one rank per stage, so that stock's "
    "grid arithmetic is that of one replica.",
    why="stock divides the world size by the stages and the batch by the quotient; unequal "
    "groups have no such quotient",
    delete_when="validate_args stops assuming equal data-parallel groups",
)
GPU_GENERATION = _record(
    target="megatron.training.arguments:get_device_arch_version",
    parameters=(),
    becomes="At least 10, from which on stock asks for no `CUDA_DEVICE_MAX_CONNECTIONS=1`.",
    why="with tensor parallelism, stock wants one hardware queue on older GPUs, so that a transfer "
    "starts before the computation beside it; a plan's streams need a queue each, or they wait "
    "for one another",
    test=f"{_EXACT}::test_follows_stock",
    delete_when="the check knows of layouts whose streams need more than one queue",
)
PRINT_ARGS = _record(
    target="megatron.training.arguments:_print_args",
    parameters=("title", "args"),
    becomes="The same, without the arguments that have Megatron's defaults, unless "
    "`--logging-level` is below 20.",
    why="of 800 lines 80 say something about the job",
    test="tests/megatron/test_launched_jobs.py::test_prints_no_more_than_stock",
    delete_when="_print_args leaves out defaults",
)
PAD_VOCABULARY = _training(
    target="megatron.core.tokenizers.utils.build_tokenizer:vocab_size_with_padding",
    parameters=("orig_vocab_size", "args", "logging_enabled"),
    becomes="The same, for the command's `--tensor-model-parallel-size`.",
    why="stock pads for the degree of this rank's TP group; the model is one for all ranks",
    delete_when="the padded size is an argument of its own",
)
PRETRAIN = _training(
    target="megatron.training:pretrain",
    parameters=(
        "cfg_container",
        "train_valid_test_dataset_provider",
        "model_type",
        "forward_step_func",
        "model_provider",
        "process_non_loss_data_func",
        "get_embedding_ranks",
        "get_position_embedding_ranks",
        "non_loss_data_func",
        "store",
        "inprocess_call_wrapper",
        "p2p_communicator",
        "pg_collection",
        "skip_model_parallel_init",
    ),
    becomes="The same, with process groups made from the plan.",
    why="an unmodified script passes no process groups; they are made from the plan here",
    delete_when="scripts pass pg_collection themselves",
)
WARM_UP = _record(
    target=f"{_LOOP}:set_jit_fusion_options",
    parameters=("tp_size",),
    becomes="The same, on the sizes of one rank that holds all columns of the MLP.",
    why="stock halves what it takes for the columns of a rank, for SwiGLU; they may be odd",
    test=f"{_EXACT}::test_follows_stock_into_the_checkpoint",
    delete_when="the warm-up takes sizes that Megatron's layers take",
)
IS_FIRST_OR_LAST_STAGE = _record(
    target="megatron.training.utils:is_first_or_last_pipeline_stage",
    parameters=("vp_stage",),
    becomes="The same; also true on groups in between whose layers must know where documents end.",
    why="scripts read samples on the first and the last stage only; with "
    "--reset-attention-mask layers in between would attend across documents",
    test=f"{_SCRIPT}::test_layers_in_the_middle_know_where_documents_end",
    delete_when="stock sends attention masks and packing to middle stages",
)
BUILD_MODELS = _training(
    target="megatron.training.models.gpt:unimodal_build_distributed_models",
    parameters=(
        "build_model_func",
        "transformer_config",
        "pg_collection",
        "ddp_config",
        "overlap_param_gather_with_optimizer_step",
        "use_megatron_fsdp",
        "use_torch_fsdp2",
        "wrap_with_ddp",
        "data_parallel_random_init",
        "mixed_precision_wrapper",
        "pre_wrap_hook",
        "model_type",
    ),
    becomes="The same, for one chunk of the rank after the other.",
    why="a rank's chunks are as many pipeline stages to stock, which knows one, or "
    "virtual ones at equal distances; and one chunk must be wrapped and released before "
    "the next one is built",
    delete_when="build_distributed_models takes the stages to build, and wraps each before "
    "it builds the next",
)
DDP_CLASS = _training(
    target="megatron.training.models.dist_utils:DistributedDataParallel",
    parameters=rebind.DDP,
    becomes="Stock's class with shards of unequal size.",
    why="the builder names the wrapper's class instead of taking it",
    delete_when="build_distributed_models takes the DDP class as an argument",
)
BUILD_MODULE = _training(
    target="megatron.core.transformer.transformer_block:build_module",
    parameters=("spec_or_module", "args", "kwargs"),
    becomes="The same, while initial weights are made: a layer of the whole model is dropped "
    "once its weights are copied.",
    why="the whole model is built for its random numbers; a layer must not keep its memory "
    "beyond its copy",
    delete_when="Megatron can initialise a stage as part of the whole model",
)
TORCH_NORM = _training(
    target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
    parameters=(
        "cls",
        "config",
        "hidden_size",
        "eps",
        "persist_layer_norm",
        "zero_centered_gamma",
        "normalization",
    ),
    becomes="The same; with `--sequence-parallel` the norm's weights are marked for it.",
    why="stock refuses torch's norms with sequence parallelism, which only need the mark that "
    "Apex's have",
    delete_when="WrappedTorchNorm marks its parameters itself",
)
CHECK_HEADS = _training(
    target="megatron.core.transformer.transformer_config:TransformerConfig.__post_init__",
    parameters=("self",),
    becomes="The same; in a plan with uneven TP shards of attention, heads need not be a multiple "
    "of the ranks.",
    why="stock refuses heads that do not divide by the ranks of a TP group",
    delete_when="the config is told how many heads a rank has",
)
VOCAB_RANGE = _training(
    target="megatron.core.tensor_parallel.utils:"
    "VocabUtility.vocab_range_from_per_partition_vocab_size",
    parameters=("per_partition_vocab_size", "rank", "world_size"),
    becomes="The same; in a TP group of uneven TP shards, the rows that the plan gives the rank.",
    why="stock takes it that all ranks of a TP group have as many rows of the vocabulary",
    delete_when="the embedding and the cross entropy are told their first row",
)
LOOK_UP = _training(
    target="megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",
    parameters=("self", "input_"),
    becomes="The same; on a rank without rows of the vocabulary, as if it had a row of zeros.",
    why="stock looks up row 0 of none; the embedding's class is named where it is made",
    delete_when="VocabParallelEmbedding takes part in the TP group's sum without rows",
)
LOSS = _training(
    target="megatron.core.models.common.language_module.language_module:"
    "LanguageModule.compute_language_model_loss",
    parameters=("self", "labels", "logits"),
    becomes="The same; on a rank without rows of the vocabulary, as if it had a logit of minus "
    "infinity.",
    why="stock's cross entropy takes the maximum of the rank's logits, of which there are none",
    delete_when="the vocabulary-parallel cross entropy takes part in the TP group's sums without "
    "logits",
)
SPLIT_GATE = _training(
    target="megatron.core.transformer.mlp:apply_swiglu_sharded_factory",
    parameters=(
        "original_sh_ten",
        "sharded_offsets",
        "singleton_local_shards",
        "tp_group",
        "dp_group",
    ),
    becomes="The same; a gated MLP without columns is not divided in two.",
    why="stock divides by the number of the rank's columns",
    delete_when="it describes a tensor without elements",
)
GET_OPTIMIZER = _training(
    target=f"{_LOOP}:get_megatron_optimizer",
    parameters=(
        "config",
        "model_chunks",
        "config_overrides",
        "use_gloo_process_groups",
        "pg_collection",
        "dump_param_to_param_group_map",
    ),
    becomes="Stock's distributed optimizer on those shards.",
    why="setup_model_and_optimizer passes no pg_collection and names the optimizer's class",
    delete_when="setup_model_and_optimizer passes pg_collection and takes the class",
)
OPTIMIZER_CLASS = _record(
    target="megatron.core.optimizer:DistributedOptimizer",
    parameters=(
        "optimizer",
        "config",
        "grad_scaler",
        "init_state_fn",
        "model_chunks",
        "per_model_buffers",
        "data_parallel_group",
        "data_parallel_group_gloo",
        "data_parallel_group_idx",
        "distributed_optimizer_instance_id",
    ),
    becomes="Stock's class with shards of unequal size, while the optimizer is built.",
    why="get_megatron_optimizer names the optimizer's class instead of taking it; bound only "
    "while it builds",
    test="tests/megatron/test_uneven_optimizer.py::test_steps_equal_stock",
    delete_when="get_megatron_optimizer takes the class of the distributed optimizer",
)
PARAMETERS_NORM = _training(
    target=f"{_LOOP}:calc_params_l2_norm",
    parameters=("model", "force_create_fp32_copy"),
    becomes="The same, of the shards that ranks own.",
    why="stock counts each rank's parameters once per pipeline stage, of equal replicas that hold "
    "them unsharded",
    delete_when="stock asks the optimizer for it",
)
GET_SCHEDULE = _training(
    target=f"{_LOOP}:get_forward_backward_func",
    parameters=("pp_size", "vp_size", "schedule_pg_collection"),
    becomes="The executor.",
    why="the schedule is the plan's list of actions",
    delete_when="pretrain takes a forward_backward_func",
)
RERUN_VOTES = _record(
    target="megatron.core.rerun_state_machine:RerunStateMachine._reduce_any",
    parameters=("self", "value"),
    becomes="The same; whether a first run is to be repeated has been summed with its tokens.",
    why="each sum over the world is a round trip of the slowest link, and one follows the other",
    test="tests/megatron/test_rerun_votes.py::test_votes_are_summed_with_the_tokens",
    delete_when="stock sums its votes along with something else",
)
BUILD_DATASETS = _training(
    target=f"{_LOOP}:build_train_valid_test_datasets",
    parameters=("build_train_valid_test_datasets_provider", "train_valid_test_num_samples"),
    becomes="The same; rank 0 builds the index files for all, on whatever stage it is.",
    why="rank 0 must build the data sets for all, and may be on a middle stage",
    delete_when="stock lets a rank of the first stage build and decide",
)
BUILD_LOADER = _training(
    target=f"{_LOOP}:build_pretraining_data_loader",
    parameters=("dataset", "consumed_samples"),
    becomes="Stock's loader; each replica takes its samples.",
    why="replicas read unequal parts of the global batch",
    delete_when="stock's samplers take the samples of each replica",
)
COUNT_SEQUENCES = _training(
    target=f"{_LOOP}:consume_seqlen_stats_in_iteration",
    parameters=(),
    becomes="The same, for packed samples: the number of tokens, which each chunk has counted.",
    why="stock adds up lengths of packed sequences over the world, and divides by a number "
    "of stages that counted them; ranks without micro-batches would not take part",
    test=f"{_SCRIPT}::test_trains_on_packed_documents",
    delete_when="stock sums over one data-parallel group, with every rank",
)
PACKED_ATTENTION = _training(
    target="megatron.core.models.backends:DotProductAttention",
    parameters=(
        "config",
        "layer_number",
        "attn_mask_type",
        "attention_type",
        "attention_dropout",
        "softmax_scale",
        "cp_comm_type",
        "pg_collection",
    ),
    becomes="A subclass that takes packed samples: each sequence attends by itself.",
    why="stock's attention without Transformer Engine refuses them, which V100 and T4 need",
    test=f"{_SCRIPT}::test_fine_tunes_on_conversations",
    delete_when="stock's DotProductAttention takes packed_seq_params",
)
EXPERTS_SPEC = _record(
    target="megatron.core.models.gpt.gpt_layer_specs:get_moe_module_spec_for_backend",
    parameters=("backend", "num_experts", "moe_grouped_gemm", "use_te_activation_func"),
    becomes="The same, with a router whose losses do not depend on the cut into micro-batches.",
    why="`aux_loss` is one of a micro-batch, whose size differs by rank under a plan",
    test="tests/megatron/test_experts.py::test_follows_one_process",
    delete_when="MoESubmodules' router, or its blocks of samples, can be chosen by an argument",
)
ROUTER_LOSSES = _record(
    target="megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics",
    parameters=("self", "metric_names", "pg_collection"),
    becomes="Losses of routers as they have been summed over all ranks along with the step's "
    "tokens.",
    why="stock sums them over the pipeline's group, which does not exist under a plan",
    test="tests/megatron/test_experts.py::test_logs_what_one_process_logs",
    delete_when="the tracker reduces over groups that are passed to it alone",
)
_reporting = partial(
    _training,
    becomes="The same; the job's last rank, which prints, is told the loss if it does not know it.",
    why="stock prints the loss on the job's last rank, which does not know it here",
    delete_when="print_rank_last prints on a rank of the last stage",
)
TRAIN_STEP = _reporting(
    target=f"{_LOOP}:train_step",
    parameters=rebind.TRAIN_STEP,
)
EVALUATE = _reporting(
    target=f"{_LOOP}:evaluate",
    parameters=(
        "forward_step_func",
        "data_iterator",
        "model",
        "process_non_loss_data_func",
        "config",
        "verbose",
        "non_loss_data_func",
        "eval_iters",
        "pg_collection",
        "p2p_communicator",
    ),
)
SIGNALS_RECEIVED = _record(
    target="megatron.training.dist_signal_handler:DistributedSignalHandler.signals_received",
    parameters=("self",),
    becomes="The same; in an elastic job ranks that end for a signal then do so by a status of "
    "their own.",
    why="stock ends by status 0 on all ranks, which is what torchrun takes a training for that is "
    "done, though the signal asked another node's ranks to start again",
    test="tests/megatron/test_launched_jobs.py::test_a_stopped_elastic_job_is_not_done",
    delete_when="stock's status tells a signal from the end of the training",
)

UNDER_A_PLAN = (
    PARSE_ARGS,
    VALIDATE_ARGS,
    GPU_GENERATION,
    PRINT_ARGS,
    PAD_VOCABULARY,
    PRETRAIN,
    WARM_UP,
    IS_FIRST_OR_LAST_STAGE,
    BUILD_MODELS,
    DDP_CLASS,
    BUILD_MODULE,
    TORCH_NORM,
    VOCAB_RANGE,
    CHECK_HEADS,
    LOOK_UP,
    LOSS,
    SPLIT_GATE,
    GET_OPTIMIZER,
    OPTIMIZER_CLASS,
    PARAMETERS_NORM,
    GET_SCHEDULE,
    RERUN_VOTES,
    BUILD_DATASETS,
    BUILD_LOADER,
    COUNT_SEQUENCES,
    PACKED_ATTENTION,
    EXPERTS_SPEC,
    ROUTER_LOSSES,
    TRAIN_STEP,
    EVALUATE,
    SIGNALS_RECEIVED,
)

# The name that ranks of a group with `split_backward` rebind.


LINEAR_BACKWARD = _record(
    target="megatron.core.tensor_parallel.layers:"
    "LinearWithGradAccumulationAndAsyncCommunication.backward",
    parameters=("ctx", "grad_output"),
    becomes="The same; in a backward of a group with `split_backward` the weight's gradient is "
    "left to an action of its own.",
    why="stock computes the gradients of input and weight in one function; its own "
    "delay_wgrad_compute is for layers of Transformer Engine, whose stores are replaced",
    test=f"{_EXACT}::test_changes_no_bit",
    delete_when="stock's linear layers have a backward_dw",
)

FROZEN_BACKWARD = _record(
    target="megatron.core.tensor_parallel.layers:LinearWithFrozenWeight.backward",
    parameters=("ctx", "grad_output"),
    becomes="The same, of layers without rows, too.",
    why="a rank of a TP group may hold no KV group or no column of the MLP, and a reshape to width "
    "0 is ambiguous",
    test="tests/megatron/test_lora.py::test_follows_one_process",
    delete_when="stock's reshape says both sizes",
)

LINEAR_LAYERS = (LINEAR_BACKWARD, FROZEN_BACKWARD)

# Names of Megatron's training that a run under a plan rebinds to go on under another one.


_moving = partial(_record, test="tests/megatron/test_moving.py::test_goes_on_as_from_a_checkpoint")

DECIDE_EXIT = _moving(
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
SETUP_FROM_MEMORY = _moving(
    target="megatron.training.training:setup_model_and_optimizer",
    parameters=rebind.SETUP,
    becomes="The same, without loading; state comes from where it was under the plan before.",
    why="stock takes state from checkpoints only",
    delete_when="load_checkpoint takes a source that is not a folder",
)

MOVING = (DECIDE_EXIT, SETUP_FROM_MEMORY)
