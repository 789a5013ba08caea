"""Every name of Megatron that a run under a plan rebinds, one record each."""

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from zorse_megatron.adapter.checkpoint_check import check_at_a_look, load_of
from zorse_megatron.adapter.compute_dtype import set_compute_dtype
from zorse_megatron.adapter.flags import fit_to_plan
from zorse_megatron.adapter.rebind import Rebinding
from zorse_megatron.adapter.sample_readers import with_middle_chunks
from zorse_megatron.adapter.versions import MEGATRON_VERSIONS
from zorse_megatron.errors import FlagError
from zorse_megatron.flags.unknown import unknown_problems
from zorse_megatron.log import say
from zorse_megatron.schema.gpu import GpuKind
from zorse_megatron.schema.plan import Plan

_EXACT = "tests/megatron/test_exactness.py"
_LOOP = "megatron.training.training"
_record = partial(Rebinding, versions=MEGATRON_VERSIONS, test=_EXACT)


def argument_records(
    plan: Plan, *, world_size: int, kinds: Mapping[str, GpuKind] | None = None
) -> list[Rebinding]:
    """Hooks into argument parsing; applied before the user's script runs.

    `kinds`: figures of GPUs that only the cluster file has.
    """

    def parse(stock: Callable[..., Namespace]) -> Callable[..., Namespace]:
        def parse_args(
            extra_args_provider: Any = None, ignore_unknown_args: bool = False
        ) -> Namespace:
            extra = extra_args_provider
            if not ignore_unknown_args:
                extra = partial(_with_known_flags, extra_args_provider)
            args = stock(extra, ignore_unknown_args)
            for note in fit_to_plan(args, plan, world_size=world_size, kinds=kinds):
                say(note)
            # Stock reads the checkpoint's arguments before there are groups of ranks.
            load = load_of(args, skips_damaged=False) if args.use_checkpoint_args else None
            if load is not None:
                check_at_a_look(load)
            say(
                f"Megatron's own lines count one rank per chunk: its 'world size' below is "
                f"{len(plan.chunks)}, this job has {world_size} ranks"
            )
            return args

        return parse_args

    def validate(stock: Callable[..., Any]) -> Callable[..., Any]:
        def validate_args(args: Namespace, defaults: Any = None) -> Any:
            # Once more: --use-checkpoint-args may have set arguments since they were parsed.
            fit_to_plan(args, plan, world_size=world_size, kinds=kinds)
            set_compute_dtype(args, plan)
            # One rank per stage: then stock's grid arithmetic is that of one replica that takes
            # the whole global batch, which is what a plan's groups are to the training loop.
            args.world_size = len(plan.chunks)
            try:
                return stock(args, {} if defaults is None else defaults)
            finally:
                args.world_size = world_size

        return validate_args

    return [
        Rebinding(
            target="megatron.training.arguments:parse_args",
            make=parse,
            parameters=("extra_args_provider", "ignore_unknown_args"),
            why="flags are checked against the plan, and what the plan decides is set",
            versions=MEGATRON_VERSIONS,
            test="tests/megatron/test_bad_input.py",
            delete_when="upstream takes a plan, or patches/ is merged",
        ),
        _record(
            target="megatron.training.arguments:validate_args",
            make=validate,
            parameters=("args", "defaults"),
            why="stock divides the world size by the stages and the batch by the quotient; unequal "
            "groups have no such quotient",
            delete_when="validate_args stops assuming equal data-parallel groups",
        ),
    ]


def _with_known_flags(extra: Callable[[Any], Any] | None, parser: Any) -> Any:
    """The parser with the script's own flags, once it knows all that are given.

    Without a check argparse would print its usage, a thousand lines of it, on every rank.
    """
    parser = parser if extra is None else extra(parser)
    known = [spelling for action in parser._actions for spelling in action.option_strings]
    problems = unknown_problems(sys.argv[1:], known)
    if problems:
        raise FlagError("The command has flags that nobody knows", problems)
    return parser


def entry_records(make_pretrain: Callable[[Any], Any]) -> list[Rebinding]:
    """Hook into `pretrain`, by the name that scripts import."""
    return [
        _record(
            target="megatron.training:pretrain",
            make=make_pretrain,
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
            why="an unmodified script passes no process groups; they are made from the plan here",
            delete_when="scripts pass pg_collection themselves",
        ),
        _record(
            target="megatron.training.utils:is_first_or_last_pipeline_stage",
            make=with_middle_chunks,
            parameters=("vp_stage",),
            why="scripts read samples on the first and the last stage only; with "
            "--reset-attention-mask layers in between would attend across documents",
            delete_when="stock sends attention masks and packing to middle stages",
        ),
    ]


def training_records(
    *,
    make_models: Callable[[Any], Any],
    make_ddp: Callable[[Any], Any],
    make_optimizer: Callable[[Any], Any],
    forward_backward: Callable[..., Any],
    make_loader: Callable[[Any], Any],
    make_datasets: Callable[[Any], Any],
    make_save: Callable[[Any], Any],
    make_sequence_count: Callable[[Any], Any] | None,
    tell_last_rank: Callable[[Any], Any] | None,
) -> list[Rebinding]:
    """Hooks into the training loop; applied when `pretrain` is called."""
    return [
        *_model_records(make_models, make_ddp),
        *_step_records(make_optimizer, forward_backward),
        *_data_records(make_loader, make_datasets),
        *_saving_records(make_save),
        *(() if make_sequence_count is None else _counting_records(make_sequence_count)),
        *(() if tell_last_rank is None else _telling_records(tell_last_rank)),
    ]


def _model_records(
    make_models: Callable[[Any], Any], make_ddp: Callable[[Any], Any]
) -> list[Rebinding]:
    return [
        _record(
            target="megatron.training.models.gpt:unimodal_build_distributed_models",
            make=make_models,
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
            why="a rank's chunks are as many pipeline stages to stock, which knows one, or "
            "virtual ones at equal distances; and one chunk must be wrapped and released before "
            "the next one is built",
            delete_when="build_distributed_models takes the stages to build, and wraps each before "
            "it builds the next",
        ),
        _record(
            target="megatron.training.models.dist_utils:DistributedDataParallel",
            make=make_ddp,
            why="the builder names the wrapper's class instead of taking it",
            delete_when="build_distributed_models takes the DDP class as an argument",
        ),
    ]


def _step_records(
    make_optimizer: Callable[[Any], Any], forward_backward: Callable[..., Any]
) -> list[Rebinding]:
    return [
        _record(
            target=f"{_LOOP}:get_megatron_optimizer",
            make=make_optimizer,
            parameters=(
                "config",
                "model_chunks",
                "config_overrides",
                "use_gloo_process_groups",
                "pg_collection",
                "dump_param_to_param_group_map",
            ),
            why="setup_model_and_optimizer passes no pg_collection and names the optimizer's class",
            delete_when="setup_model_and_optimizer passes pg_collection and takes the class",
        ),
        _record(
            target=f"{_LOOP}:get_forward_backward_func",
            make=lambda _stock: lambda *args, **kwargs: forward_backward,
            parameters=("pp_size", "vp_size", "schedule_pg_collection"),
            why="the schedule is the plan's list of actions",
            delete_when="pretrain takes a forward_backward_func",
        ),
    ]


def _data_records(
    make_loader: Callable[[Any], Any], make_datasets: Callable[[Any], Any]
) -> list[Rebinding]:
    return [
        _record(
            target=f"{_LOOP}:build_pretraining_data_loader",
            make=make_loader,
            parameters=("dataset", "consumed_samples"),
            why="replicas read unequal parts of the global batch",
            delete_when="stock's samplers take the samples of each replica",
        ),
        _record(
            target=f"{_LOOP}:build_train_valid_test_datasets",
            make=make_datasets,
            parameters=(
                "build_train_valid_test_datasets_provider",
                "train_valid_test_num_samples",
            ),
            why="rank 0 must build the data sets for all, and may be on a middle stage",
            delete_when="stock lets a rank of the first stage build and decide",
        ),
    ]


def _saving_records(make_save: Callable[[Any], Any]) -> list[Rebinding]:
    return [
        _record(
            target=f"{_LOOP}:save_checkpoint",
            make=make_save,
            why="a tied embedding of which a rank has two copies must be saved once",
            delete_when="stock's parallel save gives copies of a tensor on one rank to one writer",
        )
    ]


def _counting_records(make_sequence_count: Callable[[Any], Any]) -> list[Rebinding]:
    return [
        _record(
            target=f"{_LOOP}:consume_seqlen_stats_in_iteration",
            make=make_sequence_count,
            parameters=(),
            why="stock adds up lengths of packed sequences over the world, and divides by a number "
            "of stages that counted them; ranks without micro-batches would not take part",
            delete_when="stock sums over one data-parallel group, with every rank",
        )
    ]


def _telling_records(tell_last_rank: Callable[[Any], Any]) -> list[Rebinding]:
    return [
        _record(
            target=f"{_LOOP}:{name}",
            make=tell_last_rank,
            why="stock prints the loss on the job's last rank, which does not know it here",
            delete_when="print_rank_last prints on a rank of the last stage",
        )
        for name in ("train_step", "evaluate")
    ]
