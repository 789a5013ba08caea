"""Every way to give KV groups to the ranks of a TP group computes what one rank with all of them
does.

Loss and gradients of one layer with embedding and loss, without a training loop; ranks may hold
nothing of attention, of the MLP, of the vocabulary, or of all three.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron import tiny_gpt
from tests.megatron.preloaded import run_megatron_ranks
from zorse_megatron.plan.plan import TpShards
from zorse_megatron.schedule.tensor_parallel_parts import TpPartition

GROUPS, COLUMNS, ROWS, SEQUENCE, SAMPLES = 4, 16, 32, 6, 2
MAX_LOSS_DIFFERENCE, MAX_RELATIVE_DIFFERENCE = 2e-5, 1e-4


def compositions(degree: int) -> list[tuple[int, ...]]:
    return [c for c in itertools.product(range(GROUPS + 1), repeat=degree) if sum(c) == GROUPS]


def cases(degree: int) -> Iterator[tuple[TpShards, bool]]:
    """All three kinds cut alike, or each in a way of its own; with sequence parallelism or not."""
    found = compositions(degree)
    for at, groups in enumerate(found):
        columns, rows = (at, at) if at % 2 else (at + 1, at + len(found) // 2)
        tp_shards = TpShards(
            kv_groups=groups,
            mlp_columns=tuple(COLUMNS // GROUPS * n for n in found[columns % len(found)]),
            vocabulary_rows=tuple(ROWS // GROUPS * n for n in found[rows % len(found)]),
        )
        yield tp_shards, at % 4 > 1


def model_config() -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.training.models.gpt import GPTModelConfig

    transformer = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=COLUMNS,
        num_attention_heads=2 * GROUPS,
        num_query_groups=GROUPS,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        transformer_impl="local",
    )
    return GPTModelConfig(
        transformer=transformer,
        vocab_size=ROWS,
        seq_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )


def build(config: Any, tp: Any, alone: Any) -> Any:
    from zorse_megatron.adapter.groups.process_groups import (
        PipelinePosition,
        PlanGroups,
        collection_of,
    )

    position = PipelinePosition(0, 1)
    groups = PlanGroups(
        group=alone,
        replica=tp,
        tp_group=tp,
        everyone=tp,
        alone=alone,
        world=alone,
        position=position,
    )
    builder = config.get_builder_cls()(config)
    return builder.build_model(collection_of(groups), pre_process=True, post_process=True)


def loss_of(model: Any) -> torch.Tensor:
    dice = torch.Generator().manual_seed(3)
    tokens, labels = (torch.randint(0, ROWS, (SAMPLES, SEQUENCE), generator=dice) for _ in "ab")
    positions = torch.arange(SEQUENCE).expand(SAMPLES, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    loss = model(tokens, positions, mask, labels=labels).sum()
    loss.backward()
    return loss.detach()


def part_of_rank(
    whole: Any, tp_shards: TpShards, sequence_parallel: bool, tp: Any, alone: Any
) -> Any:
    """Loss and gradients of this rank, and what they are to be."""
    from zorse_megatron.adapter.data_parallel.buckets import tp_sums_of
    from zorse_megatron.adapter.model.uneven_tp_shards import (
        LocalSizes,
        size_hooks,
        with_sequence_parallelism,
    )
    from zorse_megatron.adapter.parameter_parts import held_part, taken
    from zorse_megatron.adapter.patches.rebind import REGISTRY
    from zorse_megatron.runtime.mailbox import TpRank

    place = TpRank(
        index=tp.rank(),
        degree=tp.size(),
        group=tp,
        is_split=sequence_parallel,
        tp_shards=TpPartition(degree=tp.size(), tp_shards=tp_shards),
    )
    config = model_config()
    config.transformer.tensor_model_parallel_size = tp.size()
    config.transformer.sequence_parallel = sequence_parallel
    LocalSizes(config, place).show()
    hooks = {**size_hooks(place), "torch_norm": with_sequence_parallelism}
    values = dict(whole.named_parameters())
    with REGISTRY.applied(hooks):
        model = build(config, tp, alone)
        expected = {}
        for name, parameter in model.named_parameters():
            part = held_part(name, parameter, place.tp_shards, is_gated=True, index=place.index)
            with torch.no_grad():
                parameter.copy_(taken(values[name], part))
            expected[name] = taken(values[name].grad, part)
        loss = loss_of(model)
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    for name, parameter in model.named_parameters():
        if parameter in tp_sums_of(model, config.transformer):
            dist.all_reduce(found[name], group=tp)
    return loss, found, expected


def unlike_specs() -> list[str]:
    """Ways to give a layer's spec that do not lead to one without heads, or are changed by it."""
    from megatron.core.transformer.attention import SelfAttention
    from megatron.training.models.gpt import default_layer_spec

    from zorse_megatron.adapter.model.uneven_tp_shards import (
        SelfAttentionWithoutHeads,
        layer_spec_with,
        replacing_attention,
    )

    config = model_config()
    plain = default_layer_spec(config, None)
    given: dict[str, Any] = {
        "nothing": None,
        "a spec": plain,
        "a function": lambda config: default_layer_spec(config, None),
        "one of the stage": default_layer_spec,
    }
    found = {
        name: layer_spec_with(replacing_attention(SelfAttentionWithoutHeads), each)(
            config
        ).submodules.self_attention.module
        for name, each in given.items()
    }
    unlike = [name for name, module in found.items() if module is not SelfAttentionWithoutHeads]
    changed = plain.submodules.self_attention.module is not SelfAttention
    return [*unlike, *(["the given spec"] if changed else [])]


def differences_on_rank() -> list[str]:
    """Every case in which loss or a gradient is another one."""
    tiny_gpt.start()
    wrong = unlike_specs()
    alone = [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]
    sets = [dist.new_group([0, 1]), dist.new_group([0, 1, 2])]
    whole = build(model_config(), alone, alone)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
            parameter.mul_(0.3)
    reference = loss_of(whole)
    for tp in sets[dist.get_rank() > 1 :]:
        for parts, sequence_parallel in cases(tp.size()):
            loss, found, expected = part_of_rank(whole, parts, sequence_parallel, tp, alone)
            bad = [] if abs(loss - reference) <= MAX_LOSS_DIFFERENCE else [f"loss {loss}"]
            for name, gradient in found.items():
                error = (gradient - expected[name]).norm()
                if not error <= MAX_RELATIVE_DIFFERENCE * expected[name].norm():
                    bad.append(f"{name} {error}")
            wrong += [f"{parts}, split {sequence_parallel}: {bad}"] if bad else []
    return wrong


def test_every_composition_computes_the_same() -> None:
    assert [len(compositions(degree)) for degree in (2, 3)] == [5, 15]
    assert run_megatron_ranks(3, differences_on_rank) == [[], [], []]
