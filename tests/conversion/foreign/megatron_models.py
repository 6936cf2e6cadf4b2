"""megatron-core's GPTModel and BertModel on a CPU, as a program: loads what was written here, saves it as Megatron-LM
does.

python -m tests.conversion.foreign.megatron_models FOLDER SHAPE...: of every SHAPE, FOLDER has `SHAPE-torch` and
`SHAPE-dist`, and `tokens.pt` and `samples.pt`; it gets `SHAPE-saved-torch` and `SHAPE-saved-dist`, and logits in
`SHAPE-logits.pt`, those of further tokens last. The same with `SHAPE-sharded` of tensor 2 x pipeline 2 on four ranks.
"""

import argparse
import contextlib
import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.activations import quick_gelu
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import MLATransformerConfig, TransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.utils import openai_gelu

SAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "normalization", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "activation_func_clamp_value",
    "glu_linear_offset", "softmax_type", "window_size", "window_attn_skip_freq", "mtp_num_layers",
    "mtp_loss_scaling_factor", "tensor_model_parallel_size", "pipeline_model_parallel_size",
)  # fmt: skip
EXPERTS = (
    "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_dtype",
    "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate", "moe_layer_freq",
)  # fmt: skip
LATENTS = (
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base",
    "rotary_percent", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim",
)  # fmt: skip


def without_cuda() -> None:
    """Functions of CUDA that Megatron calls even for models on the CPU."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *which: None
    torch.Tensor.cuda = lambda tensor, *which: tensor  # type: ignore[method-assign,assignment]
    ones = torch.ones  # of which sliding windows are cut, on "cuda"
    torch.ones = lambda *size, device=None, **how: ones(*size, **how)  # type: ignore[assignment]
    moe_utils.te_general_gemm = None  # which is not defined without Transformer Engine
    multi_latent_attention.HAVE_TE = False  # it is true without Transformer Engine
    DotProductAttention.__init__ = without_channels(DotProductAttention.__init__)  # type: ignore[method-assign]
    CudaRNGStatesTracker.fork = lambda *which: contextlib.nullcontext()  # type: ignore[method-assign]


def without_channels(build: Callable[..., None]) -> Callable[..., None]:
    """The local core attention does not know the channels that multi-latent attention names: kv_channels are those of
    values."""
    return lambda own, *given, k_channels=None, v_channels=None, **more: build(own, *given, **more)


def build(arguments: argparse.Namespace, **how: object) -> GPTModel | BertModel:
    """The model that Megatron-LM's arguments describe."""
    gelu = quick_gelu if arguments.quick_geglu else openai_gelu if arguments.openai_gelu else torch.nn.functional.gelu
    kind = MLATransformerConfig if arguments.multi_latent_attention else TransformerConfig
    names = SAME + (EXPERTS if arguments.num_experts else ()) + (LATENTS if arguments.multi_latent_attention else ())
    config = kind(
        **{name: getattr(arguments, name) for name in names},
        gated_linear_unit=arguments.swiglu or arguments.quick_geglu,
        activation_func=torch.nn.functional.silu if arguments.swiglu else gelu,
        layernorm_epsilon=arguments.norm_epsilon,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=arguments.bias_gelu_fusion,
        masked_softmax_fusion=False,
        pipeline_dtype=torch.float32,
        num_moe_experts=arguments.num_experts,
    )
    how |= {
        "vocab_size": arguments.padded_vocab_size,
        "max_sequence_length": arguments.max_position_embeddings,
        "share_embeddings_and_output_weights": not arguments.untie_embeddings_and_output_weights,
    }
    if hasattr(arguments, "bert_binary_head"):
        has_head = arguments.bert_binary_head
        return BertModel(config, 2 if has_head else 0, bert_layer_local_spec, add_binary_head=has_head, **how).eval()
    for name in (each for each in vars(arguments) if each.startswith("yarn_")):
        setattr(config, name, getattr(arguments, name))
    layers = get_gpt_decoder_block_spec(config, False, normalization=arguments.normalization)
    return GPTModel(
        config,
        layers,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layers, False),
        position_embedding_type=arguments.position_embedding_type,
        rotary_base=arguments.rotary_base,
        rope_scaling=arguments.use_rope_scaling,
        rope_scaling_factor=arguments.rope_scaling_factor,
        seq_len_interpolation_factor=arguments.rotary_seq_len_interpolation_factor,
        **how,
    ).eval()


def sharded(model: GPTModel | BertModel) -> dict[str, object]:
    """Its sharded state, with the metadata that Megatron-LM's own save gives."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return dict(model.sharded_state_dict(metadata={"dp_cp_group": group}))


def logits(model: GPTModel | BertModel, folder: Path) -> tuple[torch.Tensor, ...]:
    """[b, s, padded vocabulary], and those of a pair or of further tokens; hidden states of a first stage."""
    if isinstance(model, BertModel):
        tokens, visible, types = torch.load(folder / "samples.pt")
        with torch.no_grad():
            outputs = model(tokens, visible, types if model.add_binary_head else None)
        return tuple(each for each in outputs if each is not None) if isinstance(outputs, tuple) else (outputs,)
    tokens = torch.load(folder / "tokens.pt")
    batch, length = tokens.shape
    places = torch.arange(length).expand(batch, length)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    if not model.mtp_process:
        with torch.no_grad():
            return (model(tokens, places, hidden),)
    outputs: list[torch.Tensor] = []

    def keep(layer: torch.nn.Module, given: object, made: tuple[torch.Tensor, ...]) -> None:
        outputs.append(made[0].transpose(0, 1).clone())  # the loss changes them

    handle = model.output_layer.register_forward_hook(keep)
    with torch.no_grad():
        model(tokens, places, hidden, labels=tokens)  # further tokens are predicted only with labels
    handle.remove()
    return outputs[-1], *outputs[:-1]


COMMON = {"checkpoint_version": 3.0, "iteration": 7}
"""Values that Megatron-LM's own save adds to the model's state and arguments."""


def loaded(
    folder: Path, shape: str, ranks: Path, **ends: object
) -> tuple[argparse.Namespace, GPTModel | BertModel, GPTModel | BertModel]:
    """Load both layouts strictly: the arguments, and the models of `torch` and of `torch_dist`. ranks: the folder of
    this rank."""
    state = torch.load(ranks / "model_optim_rng.pt", weights_only=False)
    arguments = state["args"]
    model, other = build(arguments, **ends), build(arguments, **ends)
    model.load_state_dict(state["model"], strict=True)
    read = dist_checkpointing.load({"model": sharded(other)}, str(folder / f"{shape}-dist/release"))
    other.load_state_dict(read["model"], strict=True)
    assert read["args"].hidden_size == arguments.hidden_size
    return arguments, model, other


def exchange(folder: Path, shape: str) -> None:
    """Load both layouts, write the logits, save both."""
    arguments, model, other = loaded(folder, shape, folder / f"{shape}-torch/release/mp_rank_00")
    found = {"torch": logits(model, folder), "dist": logits(other, folder)}
    torch.save(found, folder / f"{shape}-logits.pt")
    for layout, part in (("torch", "iter_0000007/mp_rank_00"), ("dist", "iter_0000007")):
        (folder / f"{shape}-saved-{layout}" / part).mkdir(parents=True)
        (folder / f"{shape}-saved-{layout}" / "latest_checkpointed_iteration.txt").write_text("7")
    common = {**COMMON, "args": arguments}
    path = folder / f"{shape}-saved-torch/iter_0000007/mp_rank_00/model_optim_rng.pt"
    torch.save({**common, "model": model.state_dict_for_save_checkpoint()}, path)
    dist_checkpointing.save({**common, "model": sharded(model)}, str(folder / f"{shape}-saved-dist/iter_0000007"))


def exchange_sharded(rank: int, folder: Path, shape: str) -> None:
    """The same on one of 2 x 2 ranks: `SHAPE-sharded` and, resharded by Megatron, `SHAPE-dist`."""
    store = dist.FileStore(str(folder / f"{shape}-store"), 4)
    limit = timedelta(seconds=120)  # a rank whose peers are gone ends
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=limit)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    tensor, stage = rank % 2, rank // 2
    place = folder / f"{shape}-sharded/release/mp_rank_{tensor:02d}_{stage:03d}"
    ends = {"pre_process": stage == 0, "post_process": stage == 1, "parallel_output": False}
    arguments, model, other = loaded(folder, shape, place, **ends)
    size = arguments.hidden_size
    found = {"torch": staged_logits(model, folder, rank, size), "dist": staged_logits(other, folder, rank, size)}
    if rank == 2:
        torch.save(found, folder / f"{shape}-sharded-logits.pt")
    saved = folder / f"{shape}-sharded-saved-dist"
    saved.mkdir(exist_ok=True)
    dist_checkpointing.save({**COMMON, "args": arguments, "model": sharded(model)}, str(saved))
    dist.barrier()


def staged_logits(model: GPTModel | BertModel, folder: Path, rank: int, hidden_size: int) -> tuple[torch.Tensor, ...]:
    """Logits on the last stage; hidden states on the first, which hands them on."""
    if rank < 2:
        (hidden,) = logits(model, folder)
        dist.send(hidden.contiguous(), rank + 2)
        return (hidden,)
    tokens = torch.load(folder / "samples.pt")[0] if isinstance(model, BertModel) else torch.load(folder / "tokens.pt")
    received = torch.empty(*tokens.T.shape, hidden_size)
    dist.recv(received, rank - 2)
    model.set_input_tensor(received)
    return logits(model, folder)


def on_four_ranks(folder: Path, shape: str) -> None:
    """Forks: Megatron is imported once, and takes its groups from the process."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=exchange_sharded, args=(rank, folder, shape)) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    without_cuda()
    for named in sys.argv[2:]:
        if (Path(sys.argv[1]) / f"{named}-sharded").exists():
            on_four_ranks(Path(sys.argv[1]), named)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    for named in sys.argv[2:]:
        exchange(Path(sys.argv[1]), named)
