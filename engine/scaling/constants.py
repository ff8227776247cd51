"""How much of a card's data sheet the engine reaches, and what its launches and host take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NCCL", "OURS", "Collective", "Constants"]


@dataclass(frozen=True)
class Collective:
    """One way to add arrays of several GPUs: latency and rate.

    Attributes
    ----------
    name : str
    latency_us : float
        Of an empty array, two GPUs.
    peer_us : float
        For each further GPU.
    link_share : float
        Share of the link's rate that is reached.
    is_one_shot : bool
        Whether each GPU reads the whole arrays of all others, or a part of each, twice.
    """

    name: str
    latency_us: float
    peer_us: float
    link_share: float
    is_one_shot: bool

    def us(self, num_bytes: float, size: int, link_rate: float) -> float:
        """Return the time of a sum of `num_bytes` over `size` GPUs; `link_rate` in GB/s.

        Examples
        --------
        >>> Collective("", 10.0, 1.0, 0.5, True).us(1e6, 3, 400.0)
        21.0
        """
        moved = num_bytes * (size - 1) * (1 if self.is_one_shot else 2 / size)
        rate = 1e3 * link_rate * self.link_share  # bytes/us
        return self.latency_us + self.peer_us * (size - 2) + moved / rate


OURS = (
    Collective("one shot", 2.22, 0.5, 0.731, True),
    Collective("two shot", 3.2, 1.0, 0.7, False),
)
"""Sums by `all_reduce`, measured on two H100s; what a further GPU adds is assumed."""

NCCL = (
    Collective("small", 12.7, 0.5, 0.235, True),
    Collective("large", 21.2, 1.0, 0.63, False),
)
"""Sums by NCCL 2.28, measured on two H200s; what a further GPU adds is assumed."""


@dataclass(frozen=True)
class Constants:
    """Shares of a data sheet's figures, and times that do not depend on it.

    `python -m tests.bench.fit_scaling` finds them from the measured points of docs/benchmarks, all
    of one NVIDIA H200; `host_*` and the collectives' are measured by themselves.

    Attributes
    ----------
    read, read_codes, read_packed, read_super : float
        Share of the memory's rate at which weights are read by products of few rows: of 16 bits,
        of codes with quantized activations, of packed codes, of packed codes whose scales have
        scales.
    read_experts, read_expert_codes : float
        The same of experts, in 16 bits and as codes.
    read_pages, read_page_codes, elementwise : float
        The same of attention over pages of 16 and of 8 bits, and of elementwise ops.
    tensor_16, tensor_8, tensor_packed, tensor_experts, tensor_attention : float
        Share of the tensor cores' rate: products in 16 bits, in 8 bits, of packed codes, of
        experts, and attention over prompts.
    packed_tile, super_tile : float
        Packed codes, in millions, that products of many rows decode per us; with scales of scales.
    packed_rows : float
        Packed codes times rows, in millions, that products of few rows multiply per us.
    edge : float
        Columns of a weight that take as long as the beginning and the end of a product's tile.
    launch_us, elementwise_us : float
        Of a launch of a product or attention, and of an elementwise one.
    sequence_us, route_us, sample_us, step_us : float
        Of attention, times the root of the number of sequences; of choosing experts in a layer; of
        sampling, for a million logits; of a step.
    host_step_us, host_sequence_us : float
        The host's work for a step of decodes, and for each of its sequences.
    host_prompt_us, host_prompt_layer_us : float
        The same for a step with prompts, and for each layer.
    collectives : tuple of Collective
        The fastest one for a size is used.
    network_rate, network_us : float
        GB/s between two hosts for each GPU, and the latency.
    """

    read: float = 0.927
    read_codes: float = 0.879
    read_packed: float = 0.83
    read_super: float = 0.664
    read_experts: float = 0.767
    read_expert_codes: float = 0.465
    read_pages: float = 0.95
    read_page_codes: float = 0.712
    elementwise: float = 0.8
    tensor_16: float = 0.721
    tensor_8: float = 0.661
    tensor_packed: float = 0.836
    tensor_experts: float = 0.5
    tensor_attention: float = 0.6
    packed_tile: float = 2.32
    super_tile: float = 1.78
    packed_rows: float = 20.9
    edge: float = 140.0
    launch_us: float = 2.25
    elementwise_us: float = 0.702
    sequence_us: float = 2.73
    route_us: float = 11.3
    sample_us: float = 4.0
    step_us: float = 21.2
    host_step_us: float = 66.0
    host_sequence_us: float = 0.82
    host_prompt_us: float = 1500.0
    host_prompt_layer_us: float = 130.0
    collectives: tuple[Collective, ...] = OURS
    network_rate: float = 50.0
    network_us: float = 20.0
