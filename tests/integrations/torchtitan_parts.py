"""Small TorchTitan models on the CPU, for tests; and, run as a program, one of two ranks.

    python -m tests.integrations.torchtitan_parts folder rank modules
    python -m tests.integrations.torchtitan_parts folder rank name flavor overrides

The first runs modules on DTensors that are split over two ranks, the second a step of a model
under tensor parallelism, in TorchTitan's default backend, with the weights of `folder/weights.pt`.
Results and gradients are written to the folder.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import get_spmd_context
from torchtitan.models.common import attention as titan_attention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE

PACKAGE = "engine.integrations.torchtitan"
OVERRIDES = (
    "varlen_attention",
    "attention",
    "rmsnorm",
    "rope_complex",
    "rope_cos_sin",
    "feed_forward",
    "grouped_experts",
)
VOCAB, LENGTH, BATCH = 2048, 24, 2
functional = torch.nn.functional


def plain_attention(
    self: Any,
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    *,
    attention_masks: Any,
    scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """Attend document by document with torch, in place of FlashAttention, which needs a GPU."""
    group = q_BLNH.shape[2] // k_BLNH.shape[2]
    repeated = (x.repeat_interleave(group, 2) for x in (k_BLNH, v_BLNH))
    rows = [x.flatten(0, 1) for x in (q_BLNH, *repeated)]
    parts = []
    for start, end in itertools.pairwise(attention_masks.cu_seq_q.tolist()):
        heads = (x[start:end].transpose(0, 1)[None] for x in rows)
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, scale=scale)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts).view(*q_BLNH.shape[:3], v_BLNH.shape[-1])


def configuration(name: str, flavor: str, overrides: tuple[str, ...] = ()) -> Any:
    """Return the specification of a model of two layers, with some of our overrides applied."""
    registry = importlib.import_module(f"torchtitan.models.{name}").model_registry
    spec = registry(flavor, attn_backend="varlen")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        if getattr(layer, "moe", None) is not None:
            _shrink(layer.moe)
    override(spec, overrides)
    return spec


def override(spec: Any, overrides: tuple[str, ...]) -> None:
    """Apply some of our overrides, as `--override.imports` does."""
    apply_overrides(OverrideConfig(imports=[f"{PACKAGE}.{each}" for each in overrides]), spec)


def _shrink(moe: Any) -> None:
    """Leave a mixture 8 experts of 48 features, 2 of them for a token."""
    routed = moe.routed_experts
    for part in (moe, routed.inner_experts, routed.token_dispatcher, moe.router):
        part.num_experts = 8
    for part in (routed.token_dispatcher, moe.router):
        part.top_k = 2
    moe.router.gate.out_features = 8
    routed.inner_experts.hidden_dim = 48


def model(name: str, flavor: str, overrides: tuple[str, ...] = ()) -> Any:
    """Return the model with the weights of seed 0."""
    torch.manual_seed(0)
    built = configuration(name, flavor, overrides).model.build()
    built.init_states(buffer_device=torch.device("cpu"))
    return built


def loss_of(built: Any, step: int) -> torch.Tensor:
    """Return the loss on a batch of two documents a row."""
    generator = torch.Generator().manual_seed(step)
    steps = torch.randint(1, 4, (BATCH, LENGTH + 1), generator=generator)
    tokens = steps.cumsum(1) % 97
    positions = torch.cat([torch.arange(LENGTH - 7), torch.arange(7)]).expand(BATCH, -1)
    logits = built(tokens[:, :-1], positions, built.get_attention_masks(positions))
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def small_modules(ours: bool) -> list[Any]:
    """Return a norm, two MLPs and a RoPE with the weights of seed 0."""
    titan = importlib.import_module(PACKAGE)
    up = Linear.Config(in_features=16, out_features=24)
    down = Linear.Config(in_features=24, out_features=16)
    configs = [
        RMSNorm.Config(normalized_shape=16),
        FeedForward.Config(w1=up, w2=down, w3=up),
        FeedForward.Config(w1=up, w2=down, w3=up),
        ComplexRoPE.Config(dim=8, max_seq_len=32),
    ]
    if ours:
        mlp = titan.feed_forward
        factories = (titan.rmsnorm, mlp, mlp, titan.rope_complex)
        configs = [make(config) for make, config in zip(factories, configs, strict=True)]
    torch.manual_seed(0)
    return [config.build() for config in configs]


def inputs() -> list[torch.Tensor]:
    """Return hidden states, and queries and keys."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 6, 16), (2, 6, 4, 8), (2, 6, 2, 8))
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def results(modules: list[Any], tensors: list[Any]) -> list[torch.Tensor]:
    """Run the modules, and return their results and all gradients."""
    norm, wide, by_token, rope = modules
    x, q, k = tensors
    found = [norm(x), wide(whole(x)), by_token(x), *rope(q, k)]
    weights = torch.Generator().manual_seed(2)
    loss = sum((full(y) * torch.randn(y.shape, generator=weights)).sum() for y in found)
    loss.backward()
    parameters = [p for module in (norm, wide, by_token) for p in module.parameters()]
    return [full(y).detach() for y in (*found, *(t.grad for t in (*tensors, *parameters)))]


def full(x: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that may be split."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole(x: torch.Tensor) -> torch.Tensor:
    """Return x on every rank, as an MLP under tensor parallelism gets it."""
    return x.redistribute(placements=[Replicate()]) if isinstance(x, DTensor) else x


def run_modules(folder: Path, rank: int) -> None:
    """Run modules: tokens split for the norm and an MLP, features for another, heads for RoPE."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    modules = small_modules(ours=True)
    norm, wide, by_token, _ = modules
    features = ((wide.w1, Shard(0)), (wide.w3, Shard(0)), (wide.w2, Shard(1)))
    copies = ((each, Replicate()) for each in (norm, by_token.w1, by_token.w3, by_token.w2))
    for module, placement in (*features, *copies):
        placed = distribute_tensor(module.weight.detach(), mesh, [placement])
        module.weight = torch.nn.Parameter(placed)
    split = [
        distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_()
        for x, dim in zip(inputs(), (1, 2, 2), strict=True)
    ]
    torch.save(results(modules, split), folder / f"modules{rank}.pt")


def run_model(folder: Path, rank: int, name: str, flavor: str, overrides: tuple[str, ...]) -> None:
    """Run a step of a model whose features and tokens are split over the ranks."""
    parallel_dims.device_type = "cpu"  # TorchTitan would take CUDA for granted
    titan_attention.VarlenAttention.forward = plain_attention
    dims = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, world_size=2, spmd_backend="spmd_types"
    )
    dims.build_mesh()
    spec = configuration(name, flavor)
    sharding = importlib.import_module(f"torchtitan.models.{name}.sharding")
    mixture = {} if name == "llama3" else {"enable_ep": False}
    getattr(sharding, f"set_{name}_sharding_config")(spec.model, enable_sp=True, **mixture)
    override(spec, overrides)
    built = spec.model.build()
    built.init_states(buffer_device=torch.device("cpu"))
    built.load_state_dict(torch.load(folder / "weights.pt"))
    built.parallelize(dims)
    with get_spmd_context(parallel_dims=dims)():
        loss = loss_of(built, 0)
        loss.backward()
    found = {"loss": loss.detach()}
    for key, parameter in built.named_parameters():
        if key.endswith("w13"):
            for half, stock in enumerate(("w1_EFD", "w3_EFD")):
                found[key.replace("w13", stock)] = parameter.grad[:, half]
        elif parameter.grad is not None:
            found[key] = parameter.grad
    torch.save(found, folder / f"{'ours' if overrides else 'theirs'}{rank}.pt")


def main(folder: Path, rank: int, *what: str) -> None:
    """Run one of two ranks."""
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    if what == ("modules",):
        run_modules(folder, rank)
    else:
        (name, flavor, overrides) = what
        run_model(folder, rank, name, flavor, tuple(filter(None, overrides.split(","))))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
