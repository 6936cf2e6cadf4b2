"""Option names of other training programs, and the field that each one is here; only used to answer a wrong option.

A target is a field, or a field and the value that the option sets; after a semicolon, it says how values differ.
Options with the same target share an entry, with spaces between their names. Names that are spelled like a field here
(`--weight-decay`, `--num-layers`) need no entry: `hint` searches the fields first. `WITHOUT_FIELD` has options that
are no field here, and why. The tables of docs/migrate are made from both maps (`make figures`).
"""

from collections.abc import Collection, Mapping

from megapipe.config import nearest

_TARGETS = {
    "Megatron-LM": {
        "tensor_model_parallel_size": "parallel.tensor",
        "pipeline_model_parallel_size": "parallel.pipeline",
        "context_parallel_size": "parallel.context",
        "cp_comm_type": "parallel.context_attention; p2p: ring. a2a: all_to_all",
        "expert_model_parallel_size": "parallel.tensor; tensor ranks split the experts",
        "pipeline_model_parallel_layout": "parallel.layers_per_stage; a list that counts embedding and head",
        "decoder_first_pipeline_num_layers": "parallel.layers_per_stage; a list that counts embedding and head",
        "decoder_last_pipeline_num_layers": "parallel.layers_per_stage; a list that counts embedding and head",
        "sequence_parallel": "parallel.sequence true",
        "tp_comm_overlap": "parallel.sequence_chunks 2",
        "distributed_timeout_minutes": "parallel.timeout_seconds; in seconds",
        "distributed_backend": "parallel.links",
        "num_layers_per_virtual_pipeline_stage": "schedule.chunks; layers / pipeline ranks / old value",
        "num_virtual_stages_per_pipeline_rank": "schedule.chunks",
        "microbatch_group_size_per_virtual_pipeline_stage": "schedule.group_size",
        "use_distributed_optimizer": "zero.stage 1",
        "data_parallel_sharding_strategy": "zero.stage; no_shard: 0. optim: 1. optim_grads: 2. optim_grads_params: 3",
        "use_megatron_fsdp use_torch_fsdp2": "zero.stage 3",
        "num_distributed_optimizer_instances": "zero.shard_size; replicas / old value",
        "grad_reduce_in_bf16": "zero.reduce_dtype bf16",
        "recompute_activations": "recompute.method selective",
        "recompute_granularity": "recompute.method; full or selective",
        "recompute_method": "recompute.num_blocks; block: recompute.num_blocks. uniform: recompute.every",
        "recompute_num_layers": "recompute.num_blocks; with --recompute-method uniform, recompute.every",
        "recompute_modules": "recompute.parts; attention, mlp or norms",
        "fine_grained_activation_offloading": "offload.activations blocks",
        "cpu_offloading_num_layers": "offload.num_blocks",
        "optimizer_cpu_offload": "offload.optimizer true",
        "micro_batch_size": "batch.micro_size",
        "global_batch_size": "batch.global_size",
        "rampup_batch_size": "batch.ramp_start; and batch.ramp_samples. The batch grows in multiples of ramp_start",
        "train_iters": "training.steps",
        "train_samples": "training.steps; samples / global batch",
        "exit_interval": "training.stop_at",
        "bf16": "training.precision bf16",
        "fp16": "training.precision fp16",
        "fp8_format": "training.fp8 tensorwise",
        "fp8_recipe": "training.fp8; tensorwise or rowwise",
        "num_layers_at_start_in_bf16": "training.fp8_first_kept",
        "num_layers_at_end_in_bf16": "training.fp8_last_kept",
        "deterministic_mode": "training.deterministic true",
        "log_interval": "training.log_every",
        "save load": "training.directory",
        "finetune": "init_from; the folder of the weights",
        "no_load_optim no_load_rng": "init_from; takes the weights alone",
        "pretrained_checkpoint": "init_from",
        "save_interval": "checkpoint.every",
        "save_retain_interval": "checkpoint.keep_every",
        "async_save": "checkpoint.asynchronous true",
        "eval_interval": "evaluation.every",
        "eval_iters": "evaluation.samples; iterations x global batch",
        "lr": "optimizer.learning_rate",
        "min_lr": "optimizer.floor; a fraction of the peak learning rate",
        "lr_decay_style": "optimizer.decay; constant, linear, cosine or wsd",
        "lr_decay_iters": "optimizer.decay_steps",
        "lr_wsd_decay_iters": "optimizer.decay_steps; with optimizer.decay wsd",
        "lr_warmup_iters": "optimizer.warmup_steps",
        "lr_warmup_samples": "optimizer.warmup_steps; samples / global batch",
        "lr_warmup_fraction": "optimizer.warmup_steps; in steps, not a fraction",
        "lr_decay_samples": "optimizer.decay_steps; samples / global batch",
        "clip_grad": "optimizer.clip_norm",
        "adam_beta1 adam_beta2": "optimizer.betas; both in one list",
        "adam_eps": "optimizer.epsilon",
        "exp_avg_dtype exp_avg_sq_dtype": "optimizer.moment_dtype",
        "muon_momentum": "optimizer.muon.momentum",
        "muon_num_ns_steps": "optimizer.muon.newton_schulz_steps",
        "sgd_momentum": "optimizer.momentum",
        "initial_loss_scale": "loss_scale.initial",
        "loss_scale_window": "loss_scale.window",
        "min_loss_scale": "loss_scale.minimum",
        "data_path train_data_path": "data.prefix; several shards with weights: data.blend",
        "valid_data_path": "data.split; the validation documents of the same shard",
        "seq_length encoder_seq_length": "data.sequence_length",
        "eod_mask_loss": "data.mask_end_of_document true",
        "reset_attention_mask reset_position_ids dataloader_inter_document_masking": "data.isolate_documents true",
        "fim_spm_rate": "data.fim_suffix_first",
        "mask_prob": "data.mask_probability",
        "short_seq_prob": "data.short_sequence_probability",
        "bert_no_binary_head": "model.sentence_head false",
        "apply_residual_connection_post_layernorm": "model.norm_position post; in a GPT, stream",
        "encoder_num_layers": "model.num_layers",
        "vocab_size": "model.vocabulary_size",
        "padded_vocab_size": "model.vocabulary_size; padding is added automatically",
        "max_position_embeddings": "model.max_positions",
        "num_attention_heads": "model.num_heads",
        "num_query_groups": "model.num_kv_heads",
        "group_query_attention": "model.num_kv_heads; the number of key and value heads",
        "kv_channels": "model.head_size",
        "multi_latent_attention": "model.kv_latent_size; the number of channels, --kv-lora-rank",
        "q_lora_rank": "model.query_latent_size",
        "kv_lora_rank": "model.kv_latent_size",
        "qk_head_dim": "model.head_size; with model.kv_latent_size",
        "qk_pos_emb_head_dim": "model.rotary_head_size",
        "v_head_dim": "model.value_head_size",
        "swiglu": "model.activation swiglu",
        "squared_relu": "model.activation relu_squared",
        "apply_layernorm_1p": "model.normalization rms_norm_unit_offset; with --normalization RMSNorm",
        "openai_gelu": "model.activation gelu_tanh",
        "moe_ffn_hidden_size": "model.ffn_hidden_size",
        "moe_shared_expert_intermediate_size": "model.shared_expert_size",
        "moe_shared_expert_gate": "model.shared_expert_gate true",
        "layernorm_epsilon": "model.norm_epsilon",
        "position_embedding_type": "model.positions; learned_absolute: learned. rope: rotary. none: none",
        "use_rotary_position_embeddings": "model.positions rotary",
        "rotary_base": "model.rope_theta",
        "rotary_percent": "model.rotary_fraction",
        "use_rope_scaling": "model.rope_scaling.kind llama3",
        "rope_scaling_factor": "model.rope_scaling.factor; with model.rope_scaling.kind llama3",
        "no_position_embedding": "model.positions none",
        "disable_bias_linear": "model.bias none",
        "add_qkv_bias": "model.bias qkv",
        "qk_layernorm": "model.qk_norm true",
        "window_size": "model.sliding_window; the tokens to the left and the token itself",
        "window_attn_skip_freq": "model.layer_pattern; with a kind whose sliding_window is null",
        "no_rope_freq": "model.layer_pattern; with a kind whose positions is none",
        "moe_layer_freq": "model.layer_pattern; with a kind whose num_experts is null",
        "softmax_type": "model.attention_sinks true; for learnable",
        "quick_geglu": "model.activation swiglu_clamped",
        "activation_func_clamp_value": "model.swiglu_limit",
        "mtp_num_layers": "model.mtp_layers",
        "mtp_loss_scaling_factor": "model.mtp_loss_weight",
        "untie_embeddings_and_output_weights": "model.tie_embeddings false",
        "init_method_std": "model.init_std",
        "attention_backend": "model.attention; flash, fused: auto. unfused: unfused",
        "use_flash_attn": "model.attention auto",
        "no_masked_softmax_fusion no_bias_gelu_fusion": "kernels.backends; a backend for each operation",
        "no_bias_swiglu_fusion no_rope_fusion": "kernels.backends; a backend for each operation",
        "moe_router_topk": "model.experts_per_token",
        "moe_router_pre_softmax": "model.normalize_expert_shares false",
        "moe_router_enable_expert_bias moe_router_bias_update_rate": "model.expert_balance_rate",
        "tensorboard_dir": "tracking.tensorboard true",
        "profile_step_start": "profile.first_step; counted from 1 at the start of the program",
        "profile_step_end": "profile.steps; the number of recorded steps",
        "use_pytorch_profiler": "profile.trace; a folder",
        "check_for_nan_in_loss_and_grad": "reliability.skip_non_finite false",
        "log_straggler": "reliability.stragglers_every; a number of steps",
        "check_weight_hash_across_dp_replicas_interval": "reliability.compare_every",
    },
    "nanoGPT": {
        "n_layer": "model.num_layers",
        "n_head": "model.num_heads",
        "n_embd": "model.hidden_size",
        "vocab_size": "model.vocabulary_size; padding is added automatically",
        "block_size": "data.sequence_length",
        "dropout": "model.hidden_dropout; also model.embedding_dropout and model.attention_dropout",
        "batch_size": "batch.micro_size",
        "gradient_accumulation_steps": "batch.global_size; batch_size x gradient_accumulation_steps",
        "max_iters": "training.steps",
        "eval_interval": "evaluation.every",
        "eval_iters": "evaluation.samples; eval_iters x batch_size",
        "log_interval": "training.log_every",
        "lr_decay_iters": "optimizer.decay_steps",
        "warmup_iters": "optimizer.warmup_steps",
        "decay_lr": "optimizer.decay; True: cosine. False: constant",
        "min_lr": "optimizer.floor; a fraction of the peak learning rate",
        "grad_clip": "optimizer.clip_norm",
        "beta1 beta2": "optimizer.betas; both in one list",
        "dtype": "training.precision; float32: fp32. bfloat16: bf16. float16: fp16",
        "out_dir": "training.directory",
        "dataset": "data.prefix; a shard, not a folder",
        "backend": "parallel.links; chosen automatically",
        "wandb_log": "tracking.wandb_project; a project turns it on",
    },
    "torchtitan": {
        "job.dump_folder": "training.directory",
        "job.config_file": "config; in YAML",
        "profiling.enable_profiling": "profile.trace; a folder",
        "profiling.profile_freq": "profile.first_step; recorded once, not periodically",
        "profiling.save_traces_folder": "profile.trace",
        "metrics.log_freq": "training.log_every",
        "metrics.enable_tensorboard": "tracking.tensorboard true",
        "metrics.enable_wandb": "tracking.wandb_project; a project turns it on",
        "model.flavor": "model; a packaged file, such as llama3_8b",
        "model.converters": "training.fp8; tensorwise or rowwise",
        "optimizer.lr": "optimizer.learning_rate",
        "optimizer.beta1 optimizer.beta2": "optimizer.betas; both in one list",
        "optimizer.eps": "optimizer.epsilon",
        "lr_scheduler.warmup_steps": "optimizer.warmup_steps",
        "lr_scheduler.decay_ratio": "optimizer.decay_steps; in steps, with optimizer.decay wsd",
        "lr_scheduler.decay_type": "optimizer.decay; linear or cosine",
        "lr_scheduler.min_lr_factor lr_scheduler.lr_min": "optimizer.floor",
        "training.dataset training.dataset_path": "data.prefix; a tokenized shard",
        "training.local_batch_size": "batch.micro_size; per micro-batch, with pipelines too",
        "training.global_batch_size": "batch.global_size",
        "training.seq_len": "data.sequence_length",
        "training.max_norm": "optimizer.clip_norm",
        "training.mixed_precision_param": "training.precision bf16",
        "training.mixed_precision_reduce": "zero.reduce_dtype; float32: fp32. bfloat16: bf16",
        "training.enable_cpu_offload": "offload.optimizer true; weights: offload.weights",
        "training.data_parallel_degree": "parallel.data",
        "parallelism.data_parallel_replicate_degree": "parallel.data; replicate degree x shard degree",
        "parallelism.data_parallel_shard_degree": "zero.shard_size; -1: null",
        "parallelism.fsdp_reshard_after_forward": "zero.stage; always: 3. never: 2",
        "parallelism.tensor_parallel_degree": "parallel.tensor",
        "parallelism.enable_async_tensor_parallel": "parallel.sequence_chunks 2",
        "parallelism.pipeline_parallel_degree": "parallel.pipeline",
        "parallelism.pipeline_parallel_schedule": "schedule.name; such as 1f1b, interleaved_1f1b or zb_v",
        "parallelism.pipeline_parallel_schedule_csv": "schedule.name; a file in another format",
        "parallelism.pipeline_parallel_microbatch_size": "batch.micro_size",
        "parallelism.pipeline_parallel_layers_per_stage": "schedule.chunks; layers / pipeline ranks / old value",
        "parallelism.module_fqns_per_model_part": "parallel.layers_per_stage; a list of numbers of layers",
        "parallelism.pipeline_parallel_split_points": "parallel.layers_per_stage; a list of numbers of layers",
        "parallelism.context_parallel_degree": "parallel.context",
        "parallelism.expert_parallel_degree": "parallel.tensor; tensor ranks split the experts",
        "checkpoint.interval": "checkpoint.every",
        "checkpoint.folder": "training.directory",
        "checkpoint.enable_checkpoint checkpoint.enable": "checkpoint.every; none saves only at the end",
        "checkpoint.keep_latest_k": "checkpoint.keep_last",
        "checkpoint.async_mode": "checkpoint.asynchronous true",
        "checkpoint.initial_load_path": "init_from; takes the weights alone",
        "activation_checkpoint.mode": "recompute.method; none, selective or full. memory_budget: auto",
        "activation_checkpoint.selective_ac_option": "recompute.parts; attention, mlp or norms",
        "activation_checkpoint.memory_budget": "recompute.memory; in GiB, not a fraction",
        "compile.enable": "training.compile true",
        "validation.enable": "evaluation.every; null: no evaluation",
        "validation.dataset": "data.split; the validation documents of the same shard",
        "float8.recipe_name": "training.fp8; tensorwise or rowwise",
        "comm.init_timeout_seconds comm.train_timeout_seconds": "parallel.timeout_seconds",
        "validation.freq": "evaluation.every",
        "validation.steps": "evaluation.samples; steps x samples per step",
        "debug.seed": "training.seed",
        "debug.deterministic": "training.deterministic true",
    },
    "Hugging Face": {
        "num_hidden_layers": "model.num_layers",
        "num_key_value_heads": "model.num_kv_heads",
        "head_dim": "model.head_size",
        "q_lora_rank": "model.query_latent_size",
        "kv_lora_rank": "model.kv_latent_size",
        "qk_nope_head_dim": "model.head_size; with model.kv_latent_size",
        "qk_rope_head_dim": "model.rotary_head_size",
        "v_head_dim": "model.value_head_size",
        "intermediate_size": "model.ffn_hidden_size",
        "hidden_act": "model.activation",
        "rms_norm_eps layer_norm_eps layer_norm_epsilon": "model.norm_epsilon",
        "partial_rotary_factor rotary_pct": "model.rotary_fraction",
        "attention_bias": "model.bias attention; with mlp_bias: all",
        "mlp_bias": "model.bias mlp; with attention_bias: all",
        "query_pre_attn_scalar": "model.attention_scale; 1 / sqrt of it",
        "attention_multiplier": "model.attention_scale",
        "attn_logit_softcapping": "model.attention_softcap",
        "final_logit_softcapping": "model.logit_softcap",
        "use_parallel_residual": "model.parallel_residual",
        "embedding_multiplier": "model.embedding_scale",
        "residual_multiplier": "model.residual_scale",
        "logits_scaling": "model.logit_scale; 1 / logits_scaling",
        "hidden_activation": "model.activation",
        "tie_word_embeddings": "model.tie_embeddings",
        "num_nextn_predict_layers": "model.mtp_layers",
        "initializer_range": "model.init_std",
        "num_local_experts": "model.num_experts",
        "num_experts_per_tok": "model.experts_per_token",
        "per_device_train_batch_size": "batch.micro_size",
        "max_steps": "training.steps",
        "max_grad_norm": "optimizer.clip_norm",
        "output_dir": "training.directory",
        "save_steps": "checkpoint.every",
        "eval_steps": "evaluation.every",
        "logging_steps": "training.log_every",
    },
}

_REASONS = {
    "Megatron-LM": {
        "accumulate_allreduce_grads_in_fp32": "gradients are always accumulated in fp32",
        "no_gradient_accumulation_fusion": "gradients are always accumulated in fp32",
        "attention_softmax_in_fp32": "softmax is always computed in fp32",
        "overlap_grad_reduce": "reductions always overlap with the rest of a step",
        "calculate_per_token_loss": "the loss is always a mean over tokens",
        "transformer_impl use_mcore_models": "there is one implementation; kernels.backends chooses its kernels",
        "use_cpu_initialization": "initial weights depend on the seed alone",
        "tokenizer_type tokenizer_model vocab_file merge_file": "megapipe preprocess chooses the tokenizer",
        "make_vocab_size_divisible_by": "padding of the vocabulary is added automatically",
        "no_check_for_nan_in_loss_and_grad": "both are always checked: see reliability.skip_non_finite",
        "data_cache_path": "data.order keyed needs no index",
        "num_workers": "a thread of each rank prepares its batches",
        "mock_data": "megapipe preprocess --input python-stdlib makes a small corpus",
        "ckpt_format": "there is one format; megapipe convert reads and writes others",
        "exit_signal_handler exit_duration_in_mins": "signals end a run with a save by default",
        "log_throughput": "tokens per second and MFU are always reported",
        "wandb_exp_name": "a run's folder identifies it",
        "start_weight_decay end_weight_decay weight_decay_incr_style": "optimizer.weight_decay is constant",
        "fp8_margin fp8_amax_history_len fp8_amax_compute_algo": "fp8 scales are computed from the current tensor",
        "moe_router_load_balancing_type moe_aux_loss_coeff": "biases balance the experts: model.expert_balance_rate",
        "moe_z_loss_coeff": "a z-loss is not supported",
        "moe_expert_capacity_factor": "no token is dropped",
        "moe_grouped_gemm": "there is no grouped kernel",
        "moe_token_dispatcher_type expert_tensor_parallel_size": "tensor ranks split the experts",
    },
    "nanoGPT": {
        "eval_only": "use megapipe evaluate",
        "always_save_checkpoint": "saves do not depend on the validation loss",
        "wandb_run_name": "a run's folder identifies it",
    },
    "torchtitan": {
        "model.tokenizer_path model.hf_assets_path": "megapipe preprocess chooses the tokenizer",
        "job.description": "a run's folder identifies it",
        "profiling.enable_memory_snapshot": "memory snapshots are not supported",
        "optimizer.implementation": "kernels.backends chooses the kernel of adamw",
        "optimizer.early_step_in_backward": "updates in the backward are not supported",
        "parallelism.context_parallel_rotate_method": "parallel.context_attention ring passes them in one way",
        "parallelism.expert_tensor_parallel_degree": "tensor ranks split the experts",
        "checkpoint.load_step": "a run continues from its newest checkpoint",
        "checkpoint.last_save_in_hf": "use megapipe convert, with --to hf",
        "checkpoint.last_save_model_only checkpoint.export_dtype": "use megapipe convert",
        "checkpoint.create_seed_checkpoint": "initial weights do not depend on the layout",
        "float8.filter_fqns": "training.fp8_first_kept and training.fp8_last_kept exclude whole blocks",
        "float8.emulate": "CPUs always emulate fp8",
        "memory_estimation.enabled": "use megapipe plan dry-run",
    },
}


def _by_name(programs: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return the target, or the reason, of every option, by program and name."""
    return {
        program: {name: target for names, target in entries.items() for name in names.split()}
        for program, entries in programs.items()
    }


OTHER_NAMES = _by_name(_TARGETS)
WITHOUT_FIELD = _by_name(_REASONS)


def hint(name: str, options: Collection[str]) -> str:
    """Return a suffix that answers an unknown option: the field that it means, or why there is none; may be empty.

    Args:
        name: the option as written, with underscores: `n_embd`, `model.n_embd`.
        options: every option of the parser, such as `model.num_layers`.
    """
    last = name.rpartition(".")[2]
    matches = [each for each in options if each.rpartition(".")[2] == last]
    elsewhere = "." in name and any(name in names for names in (*OTHER_NAMES.values(), *WITHOUT_FIELD.values()))
    if len(matches) == 1 and not elsewhere:
        return f"; did you mean {matches[0]!r}?"
    programs: dict[tuple[str, str], list[str]] = {}
    for program, targets in OTHER_NAMES.items():
        other = _matching_name(name, targets)
        if other and split_target(targets[other])[0] in options:
            programs.setdefault((other, targets[other]), []).append(f"{program}'s")
    if programs:
        meanings = (
            f"{' and '.join(names)} {other} is {_in_words(target)}" for (other, target), names in programs.items()
        )
        return f"; {', '.join(meanings)}"
    for program, reasons in WITHOUT_FIELD.items():
        if other := _matching_name(name, reasons):
            return f"; {program}'s {other} has no field here: {reasons[other]}"
    return nearest(name, options)


def split_target(target: str) -> tuple[str, str, str]:
    """Return the field of a target, the value that the option sets, and how values differ; may be empty."""
    option, _, remark = target.partition("; ")
    field, _, value = option.partition(" ")
    return field, value, remark


def _in_words(target: str) -> str:
    option, _, remark = target.partition("; ")
    return f"--{option} here{f' ({remark})' if remark else ''}"


def _matching_name(name: str, names: Collection[str]) -> str | None:
    """Return the one of `names` that an option has: the same name, or else the only one that is equal without
    sections."""
    last = name.rpartition(".")[2]
    for exact in (name, last):
        if exact in names:
            return exact
    matches = [each for each in names if each.rpartition(".")[2] == last]
    return matches[0] if len(matches) == 1 else None
