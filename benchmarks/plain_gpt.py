"""A GPT as it is usually written in plain torch, as a peer of megapipe: pre-norm blocks, fused attention, tied head,
torch's cross entropy."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the model that all contestants train."""

    vocabulary_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    sequence_length: int


class Block(nn.Module):
    """Attention and MLP, each with a LayerNorm before it and a residual connection around it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.num_heads = shape.num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [b, s, hidden] for the input [b, s, hidden]."""
        b, s, hidden = x.shape
        heads = (b, s, self.num_heads, hidden // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).split(hidden, dim=2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(b, s, hidden))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class PlainGpt(nn.Module):
    """The whole model; `forward` returns the mean loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word = nn.Embedding(shape.vocabulary_size, shape.hidden_size)
        self.position = nn.Embedding(shape.sequence_length, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross entropy of labels [b, s] for tokens [b, s]."""
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.word.weight.t()
        return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1))
