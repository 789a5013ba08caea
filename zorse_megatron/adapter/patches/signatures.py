"""Parameters of what several records are about."""

TRAIN_STEP = (
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
)
DDP = (
    "config",
    "ddp_config",
    "module",
    "disable_bucketing",
    "pg_collection",
    "full_param_layout",
)
SETUP = (
    "model_type",
    "model_provider_func",
    "checkpointing_context",
    "cfg_container",
    "pg_collection",
)
