"""Flags that a plan does not support, and those that it decides itself.

A flag is refused unless its argument has the parser's default, is off, or is among `accepted`.
Names are those of parsed arguments; a star stands for any ending, so that new flags of a family are
refused, too.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FlagFamily:
    """Flags that are refused for the same reason."""

    what: str
    """What they are, for people."""
    names: str
    """Arguments, separated by spaces; may end in a star."""
    remedy: str
    accepted: tuple[Any, ...] = ()
    """Values, beside the default and "off", that the flag may have."""


DECIDED = "The plan decides this; remove the flag."
NOT_YET = "This does not work under a plan yet; remove the flag, or train without --zorse-plan."
UNTRIED = "Untested under a plan; remove the flag, or train without --zorse-plan."
_NOT_GPT = "A plan trains dense GPT models; remove the flag."
_NO_PART = "It has no part in pretraining under a plan; remove the flag."
_STOCK = "Stock does it, from any plan's checkpoint: train without --zorse-plan for it."


def _decided(what: str, names: str) -> FlagFamily:
    return FlagFamily(what=what, names=names, remedy=DECIDED)


def _not_yet(what: str, names: str) -> FlagFamily:
    return FlagFamily(what=what, names=names, remedy=NOT_YET)


def _untried(what: str, names: str) -> FlagFamily:
    return FlagFamily(what=what, names=names, remedy=UNTRIED)


DECIDED_BY_PLAN = (
    _decided(
        "Layers of each stage",
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    ),
    _decided(
        "Virtual stages",
        "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank "
        "microbatch_group_size_per_vp_stage",
    ),
    _decided(
        "When messages between groups leave",
        "overlap_p2p_comm overlap_p2p_comm_warmup_flush pipeline_model_parallel_comm_backend "
        "use_ring_exchange_p2p",
    ),
    _decided("Which ranks make a group", "use_tp_pp_dp_mapping"),
)

_PARALLEL = (
    _not_yet(
        "Tensor parallelism beyond Megatron's own",
        "tensor_parallel_num_weight_shards tp_comm_overlap "
        "tp_comm_overlap_cfg tp_comm_bootstrap_backend distribute_saved_activations",
    ),
    _not_yet(
        "Context parallelism",
        "context_parallel_size hybrid_context_parallel hierarchical_context_parallel_sizes "
        "max_seqlen_per_dp_cp_rank cp_comm_type",
    ),
    _not_yet(
        "Mixture of experts",
        "num_experts expert_model_parallel_size expert_tensor_parallel_size "
        "expert_tensor_parallel_num_weight_shards moe_* overlap_moe_expert_parallel_comm "
        "overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release "
        "use_grouped_gemm_for_shared_expert use_grouped_gemm_for_dense_mlp "
        "high_priority_a2a_comm_stream use_fused_weighted_squared_relu "
        "save_tokens_per_expert_interval",
    ),
    _not_yet(
        "FSDP",
        "use_torch_fsdp2 torch_fsdp2_reshard_after_forward use_megatron_fsdp megatron_fsdp_* "
        "fsdp_* data_parallel_sharding_strategy outer_dp_sharding_strategy "
        "suggested_communication_unit_size keep_fp8_transpose_cache enable_full_sharding_in_hsdp "
        "strict_fsdp_dtensor_load",
    ),
    _not_yet(
        "Several instances of the distributed optimizer", "num_distributed_optimizer_instances"
    ),
)

_MODEL = (
    _not_yet("Multi-token prediction", "mtp_*"),
    _not_yet(
        "Multi-latent attention",
        "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
        "v_head_dim rotary_scaling_factor mscale mscale_all_dim cache_mla_latents "
        "mla_down_proj_fusion",
    ),
    _not_yet(
        "Attention of other kinds",
        "experimental_attention_variant linear_attention_freq linear_conv_kernel_dim "
        "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
        "dsa_* attention_output_gate use_kitchen_attention kitchen_attention_backend",
    ),
    FlagFamily(
        what="A softmax with parameters of its own",
        names="softmax_type",
        remedy=NOT_YET,
        accepted=("vanilla", "off-by-one"),
    ),
    _not_yet(
        "Hybrid models",
        "hybrid_layer_pattern hybrid_override_pattern is_hybrid_model mamba_* "
        "use_mamba_mem_eff_path",
    ),
    _not_yet(
        "Layers that are not equal",
        "heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json spec",
    ),
    _not_yet("Models built without memory", "init_model_with_meta_device"),
    _not_yet("Other initial weights on each replica", "data_parallel_random_init"),
    _not_yet("Clipping and logging of attention logits", "qk_clip* log_max_attention_logit"),
    _untried("MuP", "use_mup mup_*"),
    _untried("Frozen layers", "freeze_all_layers"),
    _untried("Transformer Engine's operation fuser", "use_transformer_engine_op_fuser"),
    FlagFamily(
        what="Other models than GPT",
        names="relative_attention_num_buckets relative_attention_max_distance mrope_section "
        "vocab_extra_ids mask_prob short_seq_prob sample_rate onnx_safe "
        "decoder_num_layers decoder_seq_length",
        remedy=_NOT_GPT,
    ),
    FlagFamily(
        what="Other models than GPT, data and sizes",
        names="ict_* biencoder_* bert_* titles_data_path query_in_block_prob use_one_sent_docs "
        "evidence_data_path retriever_* block_data_path embedding_path indexer_* num_classes img_h "
        "img_w num_channels patch_dim classes_fraction data_per_class_fraction data_sharding "
        "head_lr_mult vision_* swin_backbone_type mask_type mask_factor iter_per_epoch dino_* "
        "output_bert_embeddings",
        remedy=_NOT_GPT,
    ),
    FlagFamily(
        what="Rotary embeddings of other models",
        names="rope_type",
        remedy=_NOT_GPT,
        accepted=("rope",),
    ),
    FlagFamily(
        what="Sizes by another name",
        names="encoder_num_layers encoder_seq_length",
        remedy="Use --num-layers and --seq-length.",
    ),
)

_BATCH = (
    _not_yet(
        "A global batch that changes",
        "rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed "
        "phase_transition_iterations",
    ),
    _not_yet("Skipped iterations", "iterations_to_skip"),
    FlagFamily(
        what="Data loaders other than Megatron's own",
        names="dataloader_type",
        remedy="A plan needs Megatron's global sample order; use Megatron's own data loader.",
        accepted=("single", "cyclic"),
    ),
    _not_yet(
        "Several or whole validation sets",
        "full_validation multiple_validation_sets validation_set_names",
    ),
    FlagFamily(what="Evaluation alone", names="skip_train", remedy=NOT_YET + " " + _STOCK),
    _not_yet("Distillation", "logits_*"),
    _not_yet(
        "Reinforcement learning", "perform_rl_step rl_* grpo_* langrl_env_config refit_method"
    ),
    FlagFamily(
        what="Inference",
        names="inference_* max_tokens_to_oom use_legacy_static_engine decode_only_cuda_graphs "
        "enable_chunked_prefill num_speculative_tokens offset_sampling_seed_by_dp_rank "
        "flash_decode nccl_all_reduce_for_prefill symmetric_ar_type mlp_chunks_for_prefill "
        "batch_invariant_mode",
        remedy=_NO_PART,
    ),
)

_NUMBERS = (
    _not_yet(
        "8-bit and 4-bit training",
        "fp8 fp8_* fp4 fp4_* first_last_layers_bf16 num_layers_at_start_in_bf16 "
        "num_layers_at_end_in_bf16 reuse_grad_buf_for_mxfp8_param_ag te_precision_config_file "
        "stream_ckpt_dequant",
    ),
    FlagFamily(
        what="Optimizers other than Adam",
        names="optimizer",
        remedy=NOT_YET,
        accepted=("adam",),
    ),
    FlagFamily(
        what="Settings of optimizers other than Adam",
        names="sgd_momentum muon_* lion_* use_layer_wise_param_layout",
        remedy="A plan trains with Adam; remove the flag.",
    ),
    _not_yet(
        "Optimizer in host memory by stock",
        "optimizer_cpu_offload optimizer_offload_fraction use_torch_optimizer_for_cpu_offload "
        "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params",
    ),
    _not_yet(
        "Optimizer state in 16 bits or fewer",
        "use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype "
        "exp_avg_sq_dtype",
    ),
    _not_yet(
        "Gradients summed in other ways",
        "ddp_average_in_collective ddp_reduce_scatter_with_fp32_accumulation "
        "ddp_param_name_patterns_for_fp32_local_accumulation gradient_reduce_div_fusion",
    ),
    _not_yet(
        "Weight gradients computed late",
        "defer_embedding_wgrad_compute wgrad_deferral_limit delay_wgrad_compute",
    ),
    _not_yet(
        "Gathers and reductions elsewhere than the plan has them",
        "overlap_param_gather_with_optimizer_step align_param_gather align_grad_reduce",
    ),
    _not_yet(
        "Activations in host memory by stock",
        "fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads "
        "offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph "
        "delta_offload_bytes_across_pp_ranks activation_offload_fraction cpu_offloading_num_layers "
        "cpu_offloading_retain_pinned_cpu_buffers",
    ),
)

_MACHINE = (
    _not_yet(
        "CUDA graphs",
        "cuda_graph_impl cuda_graph_modules cuda_graph_scope_deprecated cuda_graph_warmup_steps "
        "enable_cuda_graph external_cuda_graph optimizer_cuda_graph",
    ),
    _not_yet(
        "NCCL and its communicators",
        "nccl_ub disable_symmetric_registration create_all_gather_group "
        "high_priority_stream_groups nccl_communicator_config_path use_sharp sharp_enabled_group "
        "distributed_timeout_seconds_after_init lazy_mpu_init fake_process_group",
    ),
    _not_yet("Restarts within the process", "inprocess_restart"),
    _untried(
        "Services around the job",
        "enable_ft_package calc_ft_timeouts ft_num_warmup_iters adlr_autoresume "
        "adlr_autoresume_interval run_workload_inspector_server gpu_sniff_test_interval test_mode "
        "fault_injector_* error_injection_rate error_injection_type enable_msc",
    ),
    FlagFamily(
        what="Iterations that are run again",
        names="rerun_mode",
        remedy=UNTRIED,
        accepted=("validate_results", "disabled"),
    ),
    FlagFamily(
        what="Checkpoint formats other than `torch_dist`",
        names="ckpt_format ckpt_convert_format ckpt_convert_save "
        "ckpt_convert_update_legacy_dist_opt_format auto_detect_ckpt_format",
        remedy="Only torch_dist checkpoints can be read under another plan.",
        accepted=("torch_dist",),
    ),
    _untried(
        "Checkpoints beside the persistent ones",
        "non_persistent_* replication replication_jump replication_factor",
    ),
    _untried(
        "How checkpoints are read and written",
        "load_main_params_from_ckpt dist_ckpt_save_pre_mcore_014 "
        "distrib_optim_fully_reshardable_mem_efficient ckpt_fully_parallel_save_process_group "
        "ckpt_fully_parallel_load_process_group",
    ),
    _not_yet("Parallel layout from a checkpoint", "use_mp_args_from_checkpoint_args"),
    _not_yet(
        "What is saved beside checkpoints",
        "save_wgrads_interval save_dgrads_interval save_params_interval save_activations_interval",
    ),
    _not_yet("The norm of the parameters in the log", "log_params_norm"),
    _not_yet("Arguments from a YAML file", "yaml_cfg"),
    FlagFamily(
        what="Gone from Megatron",
        names="batch_size warmup model_parallel_size checkpoint_activations",
        remedy="Megatron has --micro-batch-size, --lr-warmup-fraction, "
        "--tensor-model-parallel-size and --recompute-granularity in their place.",
    ),
)

REFUSED = (*_PARALLEL, *_MODEL, *_BATCH, *_NUMBERS, *_MACHINE)
