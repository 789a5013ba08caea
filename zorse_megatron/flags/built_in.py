"""What our own GPT entry leaves out of upstream's pretrain_gpt.py, and refuses by name."""

from argparse import Namespace

from zorse_megatron.errors import Problem
from zorse_megatron.flags.table import spelling_of

LEFT_OUT = (
    "sft",
    "fim_data",
    "perform_rl_step",
    "logits_load_dir",
    "hybrid_context_parallel",
    "hybrid_layer_pattern",
    "dataloader_inter_document_masking",
    "mtp_num_layers",
    "overlap_moe_expert_parallel_comm",
)
"""Arguments whose code lives in pretrain_gpt.py and is not reproduced in our entry."""


def left_out_problems(args: Namespace) -> list[Problem]:
    """Every flag that is given and that our entry cannot honour."""
    return [
        Problem(
            where=spelling_of(name),
            found=repr(getattr(args, name)),
            expected="the flag to be absent: this entry does plain GPT pretraining",
            remedy="Leave it out, or run Megatron-LM's own script: "
            "`python -m zorse_megatron.pretrain pretrain_gpt.py ...`.",
        )
        for name in LEFT_OUT
        if getattr(args, name, None)
    ]
