"""Measured constants: achieved shares of data-sheet rates, and launch and host times."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NCCL", "OURS", "Collective", "Constants"]


@dataclass(frozen=True)
class Collective:
    """One all-reduce algorithm: latency and rate.

    Attributes
    ----------
    name : str
        Name of the algorithm.
    latency_us : float
        Latency with an empty array on two GPUs.
    peer_us : float
        Additional latency per further GPU.
    link_share : float
        Achieved share of the link's rate.
    is_one_shot : bool
        True: each GPU reads the full arrays of all others. False: reduce-scatter, then all-gather,
        each moving one part per GPU.
    """

    name: str
    latency_us: float
    peer_us: float
    link_share: float
    is_one_shot: bool

    def us(self, num_bytes: float, size: int, link_rate: float) -> float:
        """Return the time in us to all-reduce `num_bytes` over `size` GPUs; `link_rate` in GB/s.

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
"""The engine's `all_reduce`, measured on two H100s; `peer_us` is assumed."""

NCCL = (
    Collective("small", 12.7, 0.5, 0.235, True),
    Collective("large", 21.2, 1.0, 0.63, False),
)
"""All-reduce of NCCL 2.28, measured on two H200s; `peer_us` is assumed."""


@dataclass(frozen=True)
class Constants:
    """Achieved shares of data-sheet rates, and times that do not depend on the data sheet.

    `python -m tests.bench.fit_scaling` fits them to the points in docs/benchmarks, measured on one
    NVIDIA H200, one H100, and two H200s as stages; `host_*` and `collectives` are measured
    separately.

    Attributes
    ----------
    read, read_codes, read_packed, read_super : float
        Share of memory bandwidth that skinny GEMMs achieve with weights in 16 bits, codes with
        quantized activations or packed 8-bit codes, other packed codes, and those with two levels
        of scales.
    read_experts, read_expert_codes, read_packed_experts : float
        Share of memory bandwidth for experts in 16 bits, as codes, and as packed codes.
    read_pages, read_page_codes, elementwise : float
        Share of memory bandwidth for attention over 16-bit and 8-bit pages, and elementwise ops.
    tensor_16, tensor_8, tensor_packed, tensor_attention : float
        Share of the tensor cores' rate: 16-bit GEMMs, 8-bit GEMMs, GEMMs of packed codes, and
        prefill attention.
    tensor_experts : float
        Rate of grouped GEMMs of experts, relative to GEMMs of the same format.
    packed_tile, super_tile : float
        Packed codes, in millions, that GEMM tiles decode per us, with one and with two levels of
        scales.
    packed_rows : float
        Packed codes times rows, in millions, that skinny GEMMs multiply per us: one row, or eight.
    edge : float
        Prologue and epilogue of a GEMM tile, as the equivalent number of columns of the weight.
    launch_us, elementwise_us : float
        Overhead per launch of a GEMM or attention kernel, and of an elementwise kernel.
    sequence_us, route_us, sample_us, step_us : float
        Overhead of attention per square root of the number of sequences, of expert routing per
        layer, of sampling per million logits, and of a step.
    host_step_us, host_sequence_us : float
        Host work per decode step, and per sequence in it.
    host_prompt_us, host_prompt_layer_us : float
        Host work per step with prompts, and per layer.
    collectives : tuple of Collective
        Available algorithms; the fastest one for a size is used.
    stage_us : float
        What a step costs each pipeline stage beyond its share of one GPU's step, in us, if stages
        write into each other's memory.
    message_us, message_rate : float
        The same if they send messages, and GB/s of activations in them.
    network_rate, network_us : float
        GB/s per GPU between two hosts, and latency in us.
    """

    read: float = 0.94
    read_codes: float = 0.845
    read_packed: float = 0.752
    read_super: float = 0.774
    read_experts: float = 0.735
    read_expert_codes: float = 0.881
    read_packed_experts: float = 0.475
    read_pages: float = 0.95
    read_page_codes: float = 0.754
    elementwise: float = 0.8
    tensor_16: float = 0.709
    tensor_8: float = 0.666
    tensor_packed: float = 0.882
    tensor_experts: float = 0.549
    tensor_attention: float = 0.6
    packed_tile: float = 14.9
    super_tile: float = 4.82
    packed_rows: float = 38.9
    edge: float = 140.0
    launch_us: float = 1.99
    elementwise_us: float = 1.23
    sequence_us: float = 2.76
    route_us: float = 8.05
    sample_us: float = 4.0
    step_us: float = 13.3
    host_step_us: float = 66.0
    host_sequence_us: float = 0.82
    host_prompt_us: float = 1500.0
    host_prompt_layer_us: float = 130.0
    collectives: tuple[Collective, ...] = OURS
    stage_us: float = 22.0
    message_us: float = 816.0
    message_rate: float = 1.94
    network_rate: float = 50.0
    network_us: float = 20.0
