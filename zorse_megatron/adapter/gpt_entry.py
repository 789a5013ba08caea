"""GPT pretraining on the pip-installed Megatron alone.

Counterpart of `pretrain_gpt.py`, which is in the Megatron-LM repository and not in the wheel: same
flags, same loss, same order of calls. What it leaves out it refuses by name (`flags/flags.yaml`).
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron.training
import torch
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_args, get_timers, inprocess_restart, set_startup_timestamps
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from zorse_megatron.adapter.data.gpt_data import get_batch, train_valid_test_datasets_provider
from zorse_megatron.errors import FlagError
from zorse_megatron.flags.check import check_own_entry

LossReport = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

# A loss this many times the largest one seen is a spike (`SPIKY_LOSS_FACTOR` in pretrain_gpt.py).
SPIKE_FACTOR = 10

_straggler = StragglerDetector()


def refuse_left_out(args: Namespace) -> None:
    """Raise a FlagError that names every flag given that this entry cannot honour."""
    problems = check_own_entry(args)
    if problems:
        raise FlagError("The GPT entry does not know these flags", problems)


def loss_func(
    loss_mask: torch.Tensor, output_tensor: torch.Tensor, model: Any = None
) -> LossReport:
    """Sum the losses of the tokens that count.

    Returns the sum, the number of those tokens, and both again in one tensor for stock's report,
    which divides one by the other after adding them up over the data-parallel ranks.
    """
    counts = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * counts)
    num_tokens = counts.sum().clone().detach().to(torch.int)
    _validate(loss)
    report = torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])
    return loss, num_tokens, {"lm loss": report}


def _validate(loss: torch.Tensor) -> None:
    """Let stock's rerun state machine check the loss before it is averaged away."""
    args = get_args()
    rerun = get_rerun_state_machine()
    # Tolerance 0: a forward pass that is run again gives the same loss.
    if args.check_for_nan_in_loss_and_grad:
        for name, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            rerun.validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        rerun.validate_result(
            result=loss,
            rejection_func=partial(
                rerun.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )


def forward_step(
    data_iterator: Iterator[Any] | None, model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossReport]]:
    """Run one microbatch through this rank's model chunk."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    with _straggler:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, partial(loss_func, batch["loss_mask"], model=model)


def get_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the ranks of one pipeline that hold word embeddings: the first, and if tied the last.

    Stock's default counts the last rank in every case.
    """
    if get_args().untie_embeddings_and_output_weights:
        return [pp_ranks[0]]
    return sorted({pp_ranks[0], pp_ranks[-1]})


def main(program_start_s: float | None = None) -> None:
    """Parse `sys.argv` as stock does and train.

    `program_start_s` (seconds since the epoch) feeds stock's start-up report; without it the
    report starts here.
    """
    entered_s = time.time()
    set_startup_timestamps(program_start=program_start_s or entered_s, main_entry=entered_s)
    # Looked up now and not imported above: the plan executor binds this name to its own.
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(megatron.training.pretrain)
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_left_out(args)
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )
