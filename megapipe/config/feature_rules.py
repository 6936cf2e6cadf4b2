"""Rules about fp8 and mixtures of experts: one message for each option that cannot be combined with them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megapipe.config.run import PretrainConfig


def fp8_problems(config: "PretrainConfig") -> list[str]:
    """Return one message for each broken rule of fp8."""
    training, blocks = config.training, config.model.num_layers
    kept = training.fp8_first_kept, training.fp8_last_kept
    if training.fp8 == "none":
        if any(kept):
            return [
                f"training.fp8_first_kept is {kept[0]} and training.fp8_last_kept {kept[1]}, but training.fp8 is "
                "none; set it to tensorwise or rowwise, or leave them out"
            ]
        return []
    problems = []
    if training.precision == "fp16":
        problems.append(
            f"training.fp8 {training.fp8} already scales every operand and cannot be combined with fp16; set "
            "training.precision bf16"
        )
    if min(kept) < 0 or sum(kept) >= blocks:
        problems.append(
            f"training.fp8_first_kept {kept[0]} and training.fp8_last_kept {kept[1]} must be at least 0 and leave "
            f"some of the {blocks} blocks of model.num_layers for fp8; lower them, or set training.fp8 none"
        )
    return problems


def expert_problems(config: "PretrainConfig") -> list[str]:
    """Return one message for each option that cannot be combined with a mixture of experts."""
    if config.model.num_experts is None:
        return []
    with_experts = f"cannot be combined with model.num_experts {config.model.num_experts}"
    problems = []
    if config.training.fp8 != "none":
        problems.append(
            f"training.fp8 {config.training.fp8} {with_experts}: experts have no fp8 matrix products; set "
            "training.fp8 none"
        )
    if config.training.compile:
        problems.append(
            f"training.compile {with_experts}: the number of tokens per expert changes from step to step, but "
            "blocks are compiled for fixed sizes; set training.compile false"
        )
    if config.optimizer.name == "muon":
        problems.append(
            f"optimizer.name muon {with_experts}: the matrices of all experts are one parameter; set optimizer.name "
            "adamw or sgd"
        )
    if config.model.balances_experts and not config.training.master_weights:
        problems.append(
            f"training.master_weights false {with_experts}: bf16 would round away the bias updates of "
            f"model.expert_balance_rate {config.model.expert_balance_rate}; set training.master_weights true, or "
            "model.expert_balance_rate 0"
        )
    return problems
