"""Names of Megatron's checkpoints that a run under a plan rebinds."""

from functools import partial

from zorse_megatron.adapter.patches.rebind import MEGATRON_VERSIONS, Rebinding

_FULLY_PARALLEL = "megatron.core.dist_checkpointing.strategies.fully_parallel"
_OPTIMIZER_TEST = "tests/megatron/test_optimizer_checkpoint.py"
_DAMAGE_TEST = "tests/megatron/test_damaged_checkpoints.py"
_record = partial(Rebinding, versions=MEGATRON_VERSIONS)

SAVE_CHECKPOINT = _record(
    target="megatron.training.training:save_checkpoint",
    parameters=(
        "iteration",
        "model",
        "optimizer",
        "opt_param_scheduler",
        "num_floating_point_operations_so_far",
        "checkpointing_context",
        "pipeline_rank",
        "expert_rank",
        "tensor_rank",
        "pipeline_parallel",
        "expert_parallel",
        "non_persistent_ckpt",
        "train_data_iterator",
        "preprocess_common_state_dict_fn",
        "release",
        "tp_group",
        "pp_group",
        "dp_cp_group",
        "dp_group",
        "expt_dp_group",
        "rng_state_key_prefix",
    ),
    becomes="The same; a tied embedding of which a rank has two copies is saved once.",
    why="stock's parallel save may give the two copies to two writers",
    test="tests/megatron/test_checkpoints.py::test_resumes",
    delete_when="stock's parallel save gives copies of a tensor on one rank to one writer",
)
SAVE_SHARDS = _record(
    target="megatron.core.dist_checkpointing:save",
    parameters=(
        "sharded_state_dict",
        "checkpoint_dir",
        "sharded_strategy",
        "validate_access_integrity",
        "async_sharded_save",
        "preprocess_common_before_consistancy_check",
        "content_metadata",
        "async_strategy",
        "verify_integrity",
    ),
    becomes="The same, and then a manifest of the files (docs/migration.md).",
    why="a shard that is cut short or changed is found only by sizes and checksums; those of "
    "--verify-integrity are computed by one rank for all, and have no sizes",
    test=f"{_DAMAGE_TEST}::test_every_save_has_a_manifest_of_its_files",
    delete_when="save_integrity_manifest is computed by all ranks, and its manifest has sizes",
)
SAVE_IN_PARALLEL = _record(
    target=f"{_FULLY_PARALLEL}:FullyParallelSaveStrategyWrapper.apply_saving_parallelization",
    parameters=("self", "sharded_state_dict"),
    becomes="The same; groups of one rank validate when the others do.",
    why="with --ckpt-assume-constant-structure, groups of one rank validate with the world at "
    "every save and the others only at the first one, and the second save hangs",
    test=f"{_OPTIMIZER_TEST}::test_saves_of_constant_structure",
    delete_when="the first-save validation does not depend on the size of the group",
)
LOAD_CHECKPOINT = _record(
    target="megatron.training.training:load_checkpoint",
    parameters=(
        "ddp_model",
        "optimizer",
        "opt_param_scheduler",
        "load_arg",
        "strict",
        "checkpointing_context",
        "skip_load_to_model_and_opt",
        "tp_group",
        "pp_group",
        "dp_cp_group",
        "dp_group",
        "expt_dp_group",
        "rng_state_key_prefix",
    ),
    becomes="The same; what cannot be loaded ends every rank with status 2.",
    why="where a checkpoint cannot be loaded, stock ends with status 0 or with a traceback; to "
    "a batch system the job then looks done, or worth another start",
    test=f"{_DAMAGE_TEST}::test_what_only_reading_finds_ends_the_job_for_good",
    delete_when="load_checkpoint raises CheckpointingException for all that it cannot load",
)
CHECK_SCHEDULE = _record(
    target="megatron.core.optimizer_param_scheduler:OptimizerParamScheduler._check_and_set",
    parameters=("self", "cls_value", "sd_value", "name"),
    becomes="The same while a checkpoint is loaded; values that differ are told all at once, on "
    "one rank.",
    why="to resume with more --train-iters ends in an assertion on every rank, which a batch "
    "system takes to be worth another start",
    test=f"{_DAMAGE_TEST}::test_another_schedule_than_the_saved_one",
    delete_when="stock's assertion names --override-opt-param-scheduler, and one rank says it",
)
LOAD_IN_PARALLEL = _record(
    target=f"{_FULLY_PARALLEL}:FullyParallelLoadStrategyWrapper.load",
    parameters=("self", "sharded_state_dict", "checkpoint_dir", "async_strategy"),
    becomes="The same; groups of one rank take part in the exchange of loaded objects.",
    why="with --ckpt-fully-parallel-load, groups of several ranks gather loaded objects over "
    "the world; groups of one rank skip that, and the job hangs",
    test=f"{_OPTIMIZER_TEST}::test_training_goes_on_exactly",
    delete_when="exchange_loaded_objects_gather_object uses the parallelization group",
)
READ_TRACKER = _record(
    target="megatron.training.checkpointing:read_metadata",
    parameters=("tracker_filename",),
    becomes="The iteration that rank 0 has chosen, on all ranks; no tracker file is read again.",
    why="of what ranks read stock takes the highest iteration; a node that still sees the "
    "tracker file as it was would have all ranks load a damaged checkpoint",
    test=f"{_DAMAGE_TEST}::test_a_flipped_byte_is_skipped_for_an_older_checkpoint",
    delete_when="rank 0 reads the tracker file for all",
)

CHECKPOINTS = (
    SAVE_CHECKPOINT,
    SAVE_SHARDS,
    SAVE_IN_PARALLEL,
    LOAD_CHECKPOINT,
    CHECK_SCHEDULE,
    LOAD_IN_PARALLEL,
    READ_TRACKER,
)
