"""What does not go together with products in 8 bits, and with experts: a message for each rule that breaks."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megapipe.config.run import PretrainConfig


def fp8_problems(config: "PretrainConfig") -> list[str]:
    """Of products in 8 bits."""
    training, blocks = config.training, config.model.num_layers
    kept = training.fp8_first_kept, training.fp8_last_kept
    if training.fp8 == "none":
        if any(kept):
            return [
                f"training.fp8_first_kept is {kept[0]} and training.fp8_last_kept {kept[1]}, but training.fp8 is "
                "none; set it to tensorwise or rowwise, or leave them out"
            ]
        return []
    found = []
    if training.precision == "fp16":
        found.append(
            f"training.fp8 {training.fp8} scales every operand by itself and needs no fp16 with its loss scale; "
            "set training.precision bf16"
        )
    if min(kept) < 0 or sum(kept) >= blocks:
        found.append(
            f"training.fp8_first_kept {kept[0]} and training.fp8_last_kept {kept[1]} must be at least 0 and leave "
            f"some of the {blocks} blocks of model.num_layers for fp8; lower them, or set training.fp8 none"
        )
    return found


def expert_problems(config: "PretrainConfig") -> list[str]:
    """Of mixtures of experts."""
    if config.model.num_experts is None:
        return []
    with_experts = f"does not go with model.num_experts {config.model.num_experts}"
    found = []
    if config.training.fp8 != "none":
        found.append(
            f"training.fp8 {config.training.fp8} {with_experts}, whose products have no fp8 form; set training.fp8 "
            "none"
        )
    if config.training.compile:
        found.append(
            f"training.compile {with_experts}: how many tokens an expert gets differs from step to step, and "
            "blocks are compiled for fixed sizes; leave it out"
        )
    if config.optimizer.name == "muon":
        found.append(
            f"optimizer.name muon {with_experts}, whose matrices lie stacked in one parameter; set optimizer.name "
            "adamw or sgd"
        )
    if config.model.balances_experts and not config.training.master_weights:
        found.append(
            f"training.master_weights false {with_experts}: biases move by model.expert_balance_rate "
            f"{config.model.expert_balance_rate}, which bf16 would round away; set training.master_weights true, or "
            "model.expert_balance_rate 0"
        )
    return found
