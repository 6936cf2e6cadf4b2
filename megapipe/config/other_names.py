"""Option names of other training programs, and the field that each one is here; only used to answer a wrong option.

A target is a field, or a field and the value that the option stands for. Names that are spelled like a field here
(`--weight-decay`, `--num-layers`) need no entry: `hint` searches the fields first.
"""

from collections.abc import Collection

from megapipe.config.errors import nearest

OTHER_NAMES = {
    "Megatron-LM": {
        "tensor_model_parallel_size": "parallel.tensor",
        "pipeline_model_parallel_size": "parallel.pipeline",
        "context_parallel_size": "parallel.context",
        "sequence_parallel": "parallel.sequence true",
        "tp_comm_overlap": "parallel.sequence_chunks 2",
        "distributed_timeout_minutes": "parallel.timeout_seconds",
        "distributed_backend": "parallel.links",
        "num_layers_per_virtual_pipeline_stage": "schedule.chunks",
        "num_virtual_stages_per_pipeline_rank": "schedule.chunks",
        "microbatch_group_size_per_virtual_pipeline_stage": "schedule.group_size",
        "use_distributed_optimizer": "zero.stage 1",
        "data_parallel_sharding_strategy": "zero.stage",
        "recompute_activations": "recompute.method selective",
        "recompute_granularity": "recompute.method",
        "recompute_num_layers": "recompute.num_blocks",
        "micro_batch_size": "batch.micro_size",
        "global_batch_size": "batch.global_size",
        "rampup_batch_size": "batch.ramp_start",
        "train_iters": "training.steps",
        "train_samples": "training.steps",
        "exit_interval": "training.stop_at",
        "bf16": "training.precision bf16",
        "fp16": "training.precision fp16",
        "fp8_format": "training.fp8 tensorwise",
        "deterministic_mode": "training.deterministic true",
        "log_interval": "training.log_every",
        "save": "training.directory",
        "load": "training.directory",
        "finetune": "init_from",
        "pretrained_checkpoint": "init_from",
        "save_interval": "checkpoint.every",
        "async_save": "checkpoint.asynchronous true",
        "eval_interval": "evaluation.every",
        "eval_iters": "evaluation.samples",
        "lr": "optimizer.learning_rate",
        "min_lr": "optimizer.floor",
        "lr_decay_style": "optimizer.decay",
        "lr_decay_iters": "optimizer.decay_steps",
        "lr_wsd_decay_iters": "optimizer.decay_steps",
        "lr_warmup_iters": "optimizer.warmup_steps",
        "lr_warmup_samples": "optimizer.warmup_steps",
        "clip_grad": "optimizer.clip_norm",
        "adam_beta1": "optimizer.betas",
        "adam_beta2": "optimizer.betas",
        "adam_eps": "optimizer.epsilon",
        "sgd_momentum": "optimizer.momentum",
        "initial_loss_scale": "loss_scale.initial",
        "loss_scale_window": "loss_scale.window",
        "min_loss_scale": "loss_scale.minimum",
        "data_path": "data.prefix",
        "seq_length": "data.sequence_length",
        "eod_mask_loss": "data.mask_end_of_document true",
        "reset_attention_mask": "data.isolate_documents true",
        "reset_position_ids": "data.isolate_documents true",
        "vocab_size": "model.vocabulary_size",
        "padded_vocab_size": "model.vocabulary_size",
        "max_position_embeddings": "model.max_positions",
        "num_attention_heads": "model.num_heads",
        "num_query_groups": "model.num_kv_heads",
        "group_query_attention": "model.num_kv_heads",
        "kv_channels": "model.head_size",
        "swiglu": "model.activation swiglu",
        "layernorm_epsilon": "model.norm_epsilon",
        "position_embedding_type": "model.positions",
        "use_rotary_position_embeddings": "model.positions rotary",
        "rotary_base": "model.rope_theta",
        "disable_bias_linear": "model.bias none",
        "add_qkv_bias": "model.bias qkv",
        "qk_layernorm": "model.qk_norm true",
        "window_size": "model.sliding_window",
        "untie_embeddings_and_output_weights": "model.tie_embeddings false",
        "init_method_std": "model.init_std",
        "attention_backend": "model.attention",
        "moe_router_topk": "model.experts_per_token",
        "moe_router_bias_update_rate": "model.expert_balance_rate",
        "tensorboard_dir": "tracking.tensorboard true",
    },
    "nanoGPT": {
        "n_layer": "model.num_layers",
        "n_head": "model.num_heads",
        "n_embd": "model.hidden_size",
        "block_size": "data.sequence_length",
        "dropout": "model.hidden_dropout",
        "batch_size": "batch.micro_size",
        "gradient_accumulation_steps": "batch.global_size",
        "max_iters": "training.steps",
        "lr_decay_iters": "optimizer.decay_steps",
        "warmup_iters": "optimizer.warmup_steps",
        "decay_lr": "optimizer.decay",
        "grad_clip": "optimizer.clip_norm",
        "beta1": "optimizer.betas",
        "beta2": "optimizer.betas",
        "dtype": "training.precision",
        "out_dir": "training.directory",
        "dataset": "data.prefix",
        "backend": "parallel.links",
        "wandb_log": "tracking.wandb_project",
    },
    "Hugging Face": {
        "num_hidden_layers": "model.num_layers",
        "num_key_value_heads": "model.num_kv_heads",
        "head_dim": "model.head_size",
        "intermediate_size": "model.ffn_hidden_size",
        "hidden_act": "model.activation",
        "rms_norm_eps": "model.norm_epsilon",
        "layer_norm_eps": "model.norm_epsilon",
        "layer_norm_epsilon": "model.norm_epsilon",
        "tie_word_embeddings": "model.tie_embeddings",
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


def hint(name: str, known: Collection[str]) -> str:
    """Return a suffix that names the field meant by an unknown option, or an empty string.

    Args:
        name: the option as written, with underscores: `n_embd`, `model.n_embd`.
        known: every option of the parser, such as `model.num_layers`.
    """
    last = name.rpartition(".")[2]
    same = [each for each in known if each.rpartition(".")[2] == last]
    if len(same) == 1:
        return f"; did you mean {same[0]!r}?"
    for program, targets in OTHER_NAMES.items():
        if last in targets and targets[last].partition(" ")[0] in known:
            return f"; {program}'s {last} is --{targets[last]} here"
    return nearest(name, known)
