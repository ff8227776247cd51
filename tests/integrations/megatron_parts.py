"""Small Megatron models on the CPU, for tests; and, run as a program, one of two ranks.

    python -m tests.integrations.megatron_parts folder rank experts tensors

loads the folder's distributed checkpoint into our model with that many ranks for experts and for
parts of an expert, and writes its logits and gradients there.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():  # Megatron warns of packages that it would like
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    from engine.integrations import megatron

functional = torch.nn.functional
VOCAB, LENGTH, BATCH = 96, 12, 2


def without_cuda(set_attribute: Any) -> None:
    """Let Megatron's local modules run without a CUDA device; see monkeypatch.setattr."""
    buffers = SimpleNamespace(get_tensor=lambda shape, dtype, _: torch.empty(shape, dtype=dtype))
    tracker = SimpleNamespace(fork=lambda *_: contextlib.nullcontext())
    set_attribute(parallel_state, "get_global_memory_buffer", lambda: buffers)
    set_attribute(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    set_attribute(torch.cuda, "current_device", lambda: torch.device("cpu"))
    set_attribute(torch.cuda, "synchronize", lambda: None)
    if not hasattr(moe_utils, "te_general_gemm"):  # without TransformerEngine it is not defined
        moe_utils.te_general_gemm = None


def join(folder: Path, rank: int, world_size: int, experts: int = 1, tensors: int = 1) -> None:
    """Initialise Megatron's groups over gloo."""
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size
    )
    parallel_state.initialize_model_parallel(
        1, expert_model_parallel_size=experts, expert_tensor_parallel_size=tensors
    )


def leave() -> None:
    """Undo `join`."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def config(**changes: Any) -> TransformerConfig:
    """Return the configuration of a dense model."""
    fields = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 40,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(fields | changes))


def moe_config(**changes: Any) -> TransformerConfig:
    """Return the configuration of a model of experts."""
    fields = {
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "allgather",
    }
    return config(**(fields | changes))


def model(settings: TransformerConfig, spec: Any) -> GPTModel:
    """Return a model with the weights of seed 0."""
    torch.manual_seed(0)
    kind = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False}
    return GPTModel(settings, spec, VOCAB, LENGTH, **kind)


def local(settings: TransformerConfig) -> GPTModel:
    """Return a model of Megatron's local spec."""
    return model(
        settings,
        get_gpt_layer_local_spec(
            settings.num_moe_experts,
            qk_layernorm=settings.qk_layernorm,
            normalization=settings.normalization,
        ),
    )


def ours(settings: TransformerConfig) -> GPTModel:
    """Return a model of our modules."""
    return model(settings, megatron.gpt_block_spec(settings))


def batch(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return tokens, positions, mask and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    return tokens[:, :-1], positions, hidden, tokens[:, 1:]


def logits_and_gradients(gpt: GPTModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Run a model forward and backward. The loss is large enough for gradients of about 1."""
    (tokens, positions, mask, labels) = batch()
    logits = gpt(tokens, positions, mask)
    loss = functional.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))
    (100 * loss).backward()
    return logits.detach(), {name: p.grad for name, p in gpt.named_parameters()}


def metadata(**fields: Any) -> dict[str, Any]:
    """Return the metadata that Megatron's training passes to sharded_state_dict."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"dp_cp_group": group, **fields}


def save(source: GPTModel, folder: Path, **fields: Any) -> None:
    """Save a distributed checkpoint into a new folder."""
    folder.mkdir()
    dist_checkpointing.save(source.sharded_state_dict(metadata=metadata(**fields)), str(folder))


def load(target: GPTModel, folder: Path, **fields: Any) -> None:
    """Load a distributed checkpoint."""
    wanted = target.sharded_state_dict(metadata=metadata(**fields))
    target.load_state_dict(dist_checkpointing.load(wanted, str(folder)))


def main(folder: Path, rank: int, experts: int, tensors: int) -> None:
    """Run one of two ranks."""
    without_cuda(setattr)
    join(folder, rank, 2, experts, tensors)
    split = {"expert_model_parallel_size": experts, "expert_tensor_parallel_size": tensors}
    gpt = ours(moe_config(moe_grouped_gemm=True, **split))
    load(gpt, folder / "checkpoint")
    torch.save(logits_and_gradients(gpt), folder / f"{rank}.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
