"""One rank of a data-parallel model on the CPU: `python -m tests.integrations.ddp_rank`.

Arguments: folder rank. The folder holds the ranks' meeting point; each rank writes the gradients
of two steps there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from engine.integrations import torch as ops

WORLD_SIZE = 2
ROWS = 6  # per rank


class Block(torch.nn.Module):
    """Norm, gated MLP and a residual: parameters of ours and of torch's side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.ones(16))
        self.up = torch.nn.Linear(16, 48)
        self.down = torch.nn.Linear(24, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus the MLP of its norm."""
        return x + self.down(ops.swiglu(self.up(ops.rmsnorm(x, self.norm))))


def batch(step: int) -> torch.Tensor:
    """Return the rows of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(WORLD_SIZE * ROWS, 16, generator=generator)


def gradients(model: torch.nn.Module, rows: torch.Tensor) -> list[torch.Tensor]:
    """Run a step without an optimizer."""
    model.zero_grad()
    model(rows).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def main(folder: Path, rank: int) -> None:
    """Run two steps of a rank."""
    store = f"file://{folder / 'store'}"
    torch.distributed.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=WORLD_SIZE
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(Block())
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    torch.save([gradients(model, batch(step)[own]) for step in range(2)], folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
