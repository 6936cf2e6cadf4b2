"""What the time of a layer depends on, beside its share of ranks and samples."""

from dataclasses import fields

from megapipe.config.run import PretrainConfig

WITHOUT_EFFECT = (
    "num_layers",
    "max_positions",
    "norm_epsilon",
    "rope_theta",
    "rope_scaling",
    "tie_embeddings",
    "init_std",
    "scale_residual_init",
    "expert_bias",
)
"""Fields of a model that change no layer's time."""
OF_EXPERTS = ("num_experts", "experts_per_token", "normalize_expert_shares", "expert_balance_rate")
"""Fields of a model with experts: of one without they say nothing."""
RESOLVED = {"num_kv_heads": "kv_heads", "head_size": "head_dim", "ffn_hidden_size": "ffn_size"}


def shape_of(config: PretrainConfig) -> dict[str, str]:
    """Name -> value in words; times measured under one shape say nothing of another."""
    model = config.model
    found = {
        each.name: getattr(model, RESOLVED.get(each.name, each.name))
        for each in fields(model)
        if each.name not in WITHOUT_EFFECT and (model.num_experts is not None or each.name not in OF_EXPERTS)
    }
    remade = " ".join(config.recompute.parts) if config.recompute.method == "selective" else "none"
    found |= {
        "kind": config.kind,
        "sequence_length": config.data.sequence_length,
        "isolate_documents": config.data.isolate_documents,
        "precision": config.training.precision,
        "fp8": config.training.fp8,
        "compile": config.training.compile,
        "sequence_parallel": config.parallel.sequence,
        "sequence_chunks": config.parallel.sequence_chunks,
        "context_attention": config.parallel.context_attention,
        "recomputed_parts": remade,
        "recompute_logits": config.recompute.logits,
        "optimizer": config.optimizer.name,
        "kernels": " ".join(f"{op}={name}" for op, name in sorted(config.kernels.backends.items())) or "default",
    }
    return {name: str(value) for name, value in found.items()}


def differences(measured: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """`hidden_size 512 instead of 256` for each that differs."""
    names = [name for name in wanted if measured.get(name) != wanted[name]]
    return [f"{name} {wanted[name]} instead of {measured.get(name, 'nothing')}" for name in names]
