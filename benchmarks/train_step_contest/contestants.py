"""The training steps of the contestants, with the same size, dtype, micro-batches, gradient clip and AdamW."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal
from unittest.mock import patch

import torch
from plain_gpt import PlainGpt, Shape
from torch import Tensor, nn

from megapipe.config.model import ModelConfig
from megapipe.config.parallel import MeshShape
from megapipe.config.run import PretrainConfig
from megapipe.engine.step import StepInput
from megapipe.layers.context import MicrobatchContext
from megapipe.parallel.launch import connected_mesh
from megapipe.parallel.mesh import Mesh
from megapipe.parallel.unit_state import UnitState
from megapipe.training.loop.replica import Replica

from .models import Training

Step = Callable[[], None]
Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]

LEARNING_RATE, CLIP, BETAS, DECAY = 1e-4, 1.0, (0.9, 0.95), 0.1
OURS = "megapipe"


@dataclass(frozen=True)
class Setting:
    """The setting of all contestants. compiled: whether torch.compile compiles the peers."""

    training: Training
    precision: Literal["fp32", "bf16"]
    device: torch.device
    compiled: bool

    def batches(self) -> Batches:
        """Return (tokens, labels) of every micro-batch; they are the same for all contestants."""
        shape = self.training.shape
        size = (self.training.num_microbatches, self.training.micro_size, shape.sequence_length + 1)
        tokens = torch.randint(shape.vocabulary_size, size, generator=torch.Generator().manual_seed(0))
        return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens.to(self.device)]


def contestants(setting: Setting) -> dict[str, Callable[[], Step]]:
    """Return functions that build the contestants' steps, by name. The fastest peer comes second, in case the time
    does not suffice for all."""
    suffix = ", compiled" if setting.compiled else ""

    def megapipe(compiled: bool) -> Step:
        return megapipe_step(connected_mesh(MeshShape({}), setting.device), setting, compiled)

    builders = {OURS: lambda: megapipe(compiled=False), f"plain torch{suffix}": lambda: _plain(setting)}
    if setting.compiled:
        builders[f"{OURS}, compiled"] = lambda: megapipe(compiled=True)
    builders[f"transformers{suffix}"] = lambda: _hugging_face(setting)
    return builders


def configuration(setting: Setting, pipeline: int, compiled: bool) -> PretrainConfig:
    """Return the configuration of megapipe that computes the same as the peers."""
    training, shape = setting.training, setting.training.shape
    config = PretrainConfig(
        model=ModelConfig(
            vocabulary_size=shape.vocabulary_size,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            max_positions=shape.sequence_length,
        )
    )
    config.data = replace(config.data, prefix="unused", sequence_length=shape.sequence_length)
    global_size = training.micro_size * training.num_microbatches
    config.batch = replace(config.batch, global_size=global_size, micro_size=training.micro_size)
    config.parallel = replace(
        config.parallel, pipeline=pipeline, device="cuda" if setting.device.type == "cuda" else "cpu"
    )
    config.training = replace(config.training, precision=setting.precision, compile=compiled)
    return config


def megapipe_step(mesh: Mesh, setting: Setting, compiled: bool) -> Step:
    """Return a step of this rank's part of megapipe. compiled: whether torch.compile compiles each block."""
    config = configuration(setting, mesh.size("pipeline"), compiled)
    with _weights_drawn_on(mesh.device):
        replica = Replica(config, mesh)
    contexts = [
        MicrobatchContext(
            tokens=tokens,
            labels=labels,
            loss_mask=torch.ones(labels.shape, device=mesh.device),
            ordinals=torch.arange(len(tokens)),
        )
        for tokens, labels in setting.batches()
    ]
    counts = [float(context.loss_mask.numel()) for context in contexts if context.loss_mask is not None]
    steps = iter(range(10**9))

    def step() -> None:
        replica.engine.run(StepInput(next(steps), contexts, counts, LEARNING_RATE))

    return step


@contextmanager
def _weights_drawn_on(device: torch.device) -> Iterator[None]:
    """Within the block, draw initial weights on a GPU. megapipe draws them on the CPU, which takes a minute for a
    billion weights."""

    def initialize(state: UnitState, seed: int) -> None:
        for segment in state.table:
            values, init = state.view(state.master, segment), segment.spec.init
            if init.kind == "normal":
                values.normal_(std=init.std)
            else:
                values.fill_(init.kind == "ones")
        state.restore(state.newest)

    if device.type == "cpu":
        yield
        return
    with patch.object(UnitState, "initialize", initialize):
        yield


def _plain(setting: Setting) -> Step:
    with setting.device:
        model = PlainGpt(setting.training.shape)
    return _peer_step(model, model, setting)


def _peer_step(model: nn.Module, loss: Loss, setting: Setting) -> Step:
    """Return a step as a user would write it: accumulate gradients, clip them, and step torch's fused AdamW.

    With bf16, weights are fp32 and autocast computes in bf16, as usual.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=BETAS,
        fused=True,
    )
    batches, is_bf16 = setting.batches(), setting.precision == "bf16"
    compute_loss: Loss = torch.compile(loss) if setting.compiled else loss

    def step() -> None:
        for tokens, labels in batches:
            with torch.autocast(setting.device.type, dtype=torch.bfloat16, enabled=is_bf16):
                value = compute_loss(tokens, labels)
            (value / len(batches)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _hugging_face(setting: Setting) -> Step:
    with setting.device:
        model = hugging_face_model(setting.training.shape)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits
        return nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels.reshape(-1))

    return _peer_step(model, loss, setting)


def hugging_face_model(shape: Shape) -> nn.Module:
    """Return a GPT2LMHeadModel with exact GELU, without dropout, and with its faster attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocabulary_size,
        n_positions=shape.sequence_length,
        n_embd=shape.hidden_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        bos_token_id=None,
        eos_token_id=None,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)
