"""Multi-token prediction: equations of DeepSeek-V3 with transformers' blocks, what is ignored, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from megatron.core.transformer.multi_token_prediction import roll_tensor
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from megapipe.checkpoint.correspondence import correspondences
from megapipe.config.bert import BertModelConfig
from megapipe.config.model import ModelConfig
from megapipe.config.run import PretrainConfig
from megapipe.layers.split import SplitTape, gradient_edge
from megapipe.layout.scheduling import schedule_problems
from megapipe.layout.validation import context_problems
from megapipe.spec.family import family_of
from tests.layers.bound import LLAMA, all_gradients, bind_model, load, make_context, run, small_model
from tests.models.hugging_face import case_of

DEPTHS, WEIGHT = 2, 0.7


class TheirDepth(nn.Module):
    """A layer of DeepSeek-V3 that predicts a further token, by the names of its published files."""

    def __init__(self, config: transformers.DeepseekV3Config, index: int) -> None:
        super().__init__()
        block = deepseek.DeepseekV3DecoderLayer(config, index)
        self.self_attn, self.mlp = block.self_attn, block.mlp
        self.input_layernorm, self.post_attention_layernorm = block.input_layernorm, block.post_attention_layernorm
        self.enorm, self.hnorm = (deepseek.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in "eh")
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = nn.ModuleDict(
            {"norm": deepseek.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)}
        )

    def forward(self, hidden: Tensor, embedded: Tensor, **how: Any) -> Tensor:
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        output = deepseek.DeepseekV3DecoderLayer.forward(self, joined, **how)
        return self.shared_head["norm"](output)


def their_losses(theirs: Any, depths: nn.ModuleDict, tokens: Tensor, labels: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the loss sum of the next token, and of each further one, by equations 21 to 25 of arXiv 2412.19437."""
    hidden = theirs.model(tokens, use_cache=False).last_hidden_state
    length = tokens.shape[1]
    blocked = torch.full((length, length), -torch.inf, dtype=hidden.dtype).triu(1).expand(len(tokens), 1, -1, -1)
    places = torch.arange(length).expand(len(tokens), -1)
    how = {"attention_mask": blocked, "position_embeddings": theirs.model.rotary_emb(hidden, places)}

    def loss(hidden: Tensor) -> Tensor:
        each = functional.cross_entropy(theirs.lm_head(hidden).transpose(1, 2), labels, reduction="none")
        return (each * weights).sum()

    weights = mask
    losses = [loss(hidden)]
    for depth in depths.values():
        tokens, labels, mask = (roll_tensor(each.clone())[0] for each in (tokens, labels, mask))
        weights = weights * mask
        hidden = depth(hidden, theirs.model.embed_tokens(tokens), **how)
        losses.append(loss(hidden))
    return losses


def drawn(depths: nn.ModuleDict) -> nn.ModuleDict:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for each in [*depths.parameters(), *depths.buffers()]:
            each.normal_(0.0, 0.2, generator=generator)
    return depths.double()


def test_losses_and_gradients_are_those_of_deepseek() -> None:
    case = case_of("deepseek_v3")
    theirs = case.theirs.double()
    layers = theirs.config.num_hidden_layers
    extra = {str(layers + depth): TheirDepth(theirs.config, layers - 1) for depth in range(DEPTHS)}
    depths = drawn(nn.ModuleDict(extra))
    model = replace(case.model, mtp_layers=DEPTHS, mtp_loss_weight=WEIGHT)
    ours = bind_model(model, dtype=torch.float64)
    pairs = correspondences(model, family_of("deepseek_v3"))
    tensors = {**theirs.state_dict(), **{f"model.layers.{name}": each for name, each in depths.state_dict().items()}}
    with torch.no_grad():
        load(ours, {pair.spec.name: pair.joined([tensors[name] for name in pair.theirs]) for pair in pairs})
    context = make_context(model)
    found = run(ours, context)
    (found * torch.tensor([1.0, 1.0])).sum().backward()
    first, *further = their_losses(theirs, depths, context.tokens, context.labels, context.loss_mask.double())
    expected = torch.stack([first, WEIGHT / DEPTHS * torch.stack(further).sum()])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    expected.sum().backward()
    gradients = dict(theirs.named_parameters())
    gradients |= {f"model.layers.{name}": each for name, each in depths.named_parameters()}
    summed = all_gradients(ours)
    for pair in pairs:
        if all(name in gradients for name in pair.theirs):
            wanted = pair.joined([gradients[name].grad for name in pair.theirs])
            torch.testing.assert_close(summed[pair.spec.name], wanted, rtol=1e-7, atol=1e-9, msg=pair.spec.name)
