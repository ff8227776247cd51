"""A mixture of experts: a router selects the few experts that compute each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine import kernels
from engine.device import array_module
from engine.errors import ConfigError, WeightsError
from engine.kernels._override.scope import current_overrides
from engine.layers.arrays import arrays_of
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.norm import Norm, QuantizedRows
from engine.weights import Format, Weight

__all__ = ["SUMMED_NEXT", "DenseAndExperts", "Experts", "MoE", "RoutingParams"]

_FLOAT32 = np.dtype(np.float32)
_QUANTIZED_BLOCK = (128, 128)  # scale block of weights multiplied with quantized activations
_QUANTIZED_FROM = 9  # minimum tokens to quantize x: for fewer, reading weights dominates
# Minimum tokens to quantize x in the norm. For fewer, a kernel of its own is as fast or faster: the
# first product may start and load weights meanwhile.
_CODED_FROM = 2048
_ROUTED_WITH_CODES = range(_QUANTIZED_FROM, 257)  # tokens that one kernel quantizes and routes
# Tokens whose experts' outputs the next layer's norm may sum. For fewer, the second product does so
# within one kernel; for many, the outputs would take memory during another layer.
SUMMED_NEXT = range(_QUANTIZED_FROM, 513)


@dataclass(frozen=True)
class RoutingParams:
    """Arguments of `kernels.moe_route`: selection and weights of a token's experts.

    Attributes
    ----------
    top_k : int
        Number of experts per token.
    score : str
        "softmax", "sigmoid" or "sparsemixer".
    num_groups, top_groups : int
        Experts are selected from the `top_groups` best of `num_groups` groups.
    renormalize : bool
        Divide the weights by their sum.
    scale : float
        Factor on the weights.
    num_shared : int
        1: the last expert is a shared one, which computes every token and counts beside `top_k`.
        Its gate is the last row of the router's weight.
    scales_input : bool
        The sigmoid of the only expert's logit multiplies its input, and the weight is 1. Requires
        `top_k` 1; the other fields must have their defaults.
    jitter : float
        Parameter of "sparsemixer".
    """

    top_k: int
    score: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    num_shared: int = 0
    scales_input: bool = False
    jitter: float = 0.0

    def __post_init__(self) -> None:
        if self.scales_input and replace(self, scales_input=False) != RoutingParams(1):
            raise ConfigError(f"scales_input must be False unless only top_k=1 is set; got {self}")


@dataclass(frozen=True, eq=False)
class Experts:
    """The matrices of all experts, and the activation between their two products.

    Attributes
    ----------
    gate_up : Weight
        (E, 2I, N): for each expert the rows of gate, then the rows of up; or (E, I, N), up alone.
    down : Weight
        (E, N, I).
    gate_up_bias, down_bias : Weight, optional
        (E, 2I) and (E, N), dense.
    activation : str
        "swiglu", "geglu" or "swiglu_clamped", as in `kernels.moe_gemm`; or "relu2" without a gate.
    alpha, limit : float
        Parameters of "swiglu_clamped".
    num_identity : int
        Number of further experts without matrices, which return their input.
    adds_identity : bool
        Whether sums include their outputs; else another rank adds them.

    Raises
    ------
    WeightsError
        If a bias is not dense.
    """

    gate_up: Weight
    down: Weight
    gate_up_bias: Weight | None = None
    down_bias: Weight | None = None
    activation: str = "swiglu"
    alpha: float = 1.702
    limit: float = 7.0
    num_identity: int = 0
    adds_identity: bool = True

    def __post_init__(self) -> None:
        for name, weight in self._weights():
            if name.endswith("bias") and not weight.format.is_dense:
                raise WeightsError(f"{name} must be a dense weight; got {weight.format.name!r}")

    def _weights(self) -> Iterator[tuple[str, Weight]]:
        yield "gate_up", self.gate_up
        yield "down", self.down
        if self.gate_up_bias is not None:
            yield "gate_up_bias", self.gate_up_bias
        if self.down_bias is not None:
            yield "down_bias", self.down_bias

    @property
    def num_elements(self) -> int:
        """Number of elements in one expert's two matrices."""
        return (self.gate_up.num_elements + self.down.num_elements) // self.gate_up.shape[0]

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array."""
        yield from arrays_of(**dict(self._weights()))

    def __call__(self, x: Any, routing: kernels.Routing, *, deterministic: bool = False) -> Any:
        """Return (T, k, N): the weighted output of each of a token's k experts.

        `x` (T, N) is an array or `QuantizedRows`. Pairs of experts that return their input are not
        written.
        """
        own, options = self._with_matrices(routing)
        rows = self.first_product(x, own, deterministic=deterministic, **options)
        return self.second_product(rows, own, deterministic=deterministic, **options)

    def _with_matrices(self, routing: kernels.Routing) -> tuple[kernels.Routing, dict[str, Any]]:
        """Return the pairs of experts with matrices, and options of their products."""
        if not self.num_identity:
            return routing, {}
        count = routing.offsets.shape[0] - 1
        offsets = routing.offsets[: count - self.num_identity + 1]
        return routing._replace(offsets=offsets), {"num_experts": count}

    def _identity(self, x: Any, routing: kernels.Routing) -> dict[str, Any]:
        """Return the options of `kernels.moe_combine` that add the experts without matrices."""
        if not self.num_identity:
            return {}
        identity = x if self.adds_identity else None
        return {"routing": routing, "num_identity": self.num_identity, "identity": identity}

    def combined(
        self, x: Any, routing: kernels.Routing, *, deterministic: bool = False, **others: Any
    ) -> Any:
        """Return (T, N): the weighted sum over a token's experts, for `x` (T, N).

        `x` is an array or `QuantizedRows`. `others` are keywords of `kernels.moe_combine`: further
        summands, and `out`.
        """
        if self.num_identity:
            pairs = self(x, routing, deterministic=deterministic)
            return kernels.moe_combine(pairs, **self._identity(x, routing), **others)
        rows = self.first_product(x, routing, deterministic=deterministic)
        rows, options = _operand(rows, self.down, routing, deterministic=deterministic)
        return kernels.moe_gemm_combine(
            rows,
            self.down,
            routing,
            bias=None if self.down_bias is None else self.down_bias.data,
            deterministic=deterministic,
            pdl=True,  # safe, as in `first_product`
            **options,
            **others,
        )

    def coded_format(self, num_tokens: int) -> Format | None:
        """Return the weight format for which a norm may quantize `num_tokens` tokens.

        None: they are read as they are, or quantized by a kernel of their own.
        """
        return self.gate_up.format if self._is_coded and num_tokens >= _CODED_FROM else None

    def routes_with_codes(self, num_tokens: int) -> bool:
        """Tell whether the op that normalises and routes also quantizes `num_tokens` tokens."""
        is_read = num_tokens in _ROUTED_WITH_CODES or num_tokens >= _CODED_FROM
        return self._is_coded and is_read

    @property
    def _is_coded(self) -> bool:
        return self.gate_up.format.block == _QUANTIZED_BLOCK and not self.num_identity

    def first_product(
        self,
        x: Any,
        routing: kernels.Routing,
        *,
        deterministic: bool,
        num_experts: int | None = None,
        as_codes: bool = True,
    ) -> Any:
        """Return act(gate) * up, or act(up), of every pair (token, expert), sorted by expert.

        The result is (T k, I): an array or, if the second product multiplies codes and `as_codes`
        is not False, `QuantizedRows`.

        `num_experts`: number of experts in the layer, if this rank holds only some of them.
        """
        # pdl is safe: no kernel writes the weights or biases. The second product follows the first,
        # which triggers its launch only once the routing is complete.
        is_gated = self.activation != "relu2"
        num_tokens = routing.experts.shape[0]
        quantizes = _multiplies_codes(self.down, num_tokens, deterministic=deterministic)
        quantizes &= as_codes and is_gated
        x, options = _operand(x, self.gate_up, routing, deterministic=deterministic)
        rows = kernels.moe_gemm(
            x,
            self.gate_up,
            routing,
            bias=None if self.gate_up_bias is None else self.gate_up_bias.data,
            activation=self.activation if is_gated else None,
            alpha=self.alpha,
            limit=self.limit,
            deterministic=deterministic,
            pdl=True,
            quantize_out=quantizes,
            num_experts=num_experts,
            **options,
        )
        if quantizes:
            codes, scales = rows
            return QuantizedRows(codes, scales, options.get("out_dtype", x.dtype))
        return rows if is_gated else kernels.relu(rows, squared=True, out=rows)

    def second_product(
        self,
        rows: Any,
        routing: kernels.Routing,
        *,
        deterministic: bool,
        num_experts: int | None = None,
        out: Any = None,
    ) -> Any:
        """Return (T, k, N) for the rows of `first_product`, in `out` (T k, N) if given."""
        rows, options = _operand(rows, self.down, routing, deterministic=deterministic)
        pairs = kernels.moe_gemm(
            rows,
            self.down,
            routing,
            bias=None if self.down_bias is None else self.down_bias.data,
            scatter=True,
            deterministic=deterministic,
            pdl=True,
            num_experts=num_experts,
            out=out,
            **options,
        )
        return pairs.reshape(*routing.experts.shape, pairs.shape[1])


def _multiplies_codes(weight: Weight, num_tokens: int, *, deterministic: bool) -> bool:
    """Tell whether a product multiplies codes of x; for few tokens it does not."""
    is_large = deterministic or num_tokens >= _QUANTIZED_FROM
    return weight.format.block == _QUANTIZED_BLOCK and is_large


def _operand(
    x: Any, weight: Weight, routing: kernels.Routing, *, deterministic: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the rows of a product, given an array or `QuantizedRows`, and options for them."""
    if isinstance(x, QuantizedRows):
        return x.codes, {"x_scales": x.scales, "out_dtype": x.dtype}
    num_tokens = routing.experts.shape[0]
    has_codes = _multiplies_codes(weight, num_tokens, deterministic=deterministic)
    return x, {"quantize_x": has_codes}


class MoE:
    """Mixture of experts: the weighted sum of a token's experts, and in some families a shared one.

    Used in place of an `MLP`. It consists of kernel launches only: the number of rows per expert
    stays on the device.

    Parameters
    ----------
    params : RoutingParams
    router : Linear
        (E, N); its float32 output is the router's logits.
    experts : Experts
    correction : (E,) array of float32, optional
        Added to the scores when experts are selected.
    expert_scale : (E,) array of float32, optional
        Factor on the weights of each expert.
    shared : MLP, optional
        Shared expert, applied to every token. A shared expert like the others is one of `experts`
        instead (`RoutingParams.num_shared`).
    shared_scale : float
        Factor on the output of `shared`.
    shared_gate : Linear, optional
        (1, N): the sigmoid of its output scales the output of `shared`.
    latent : (Linear, Linear), optional
        (L, N) and (N, L): the experts read the first one's output, and the second one reads the
        weighted sum of theirs.
    deterministic : bool
        Batch invariance: a token's bits do not depend on the rest of the batch.

    Attributes
    ----------
    load : (E,) array of int64
        Number of tokens that each expert but a shared one has computed, on the weights' device.
    is_summed_next : bool
        `after_add` may return the outputs (T, k, N) of each token's experts: the norm that follows
        sums them. False at first.
    """

    __slots__ = (
        *("correction", "deterministic", "expert_scale", "experts", "load", "params", "router"),
        *("is_summed_next", "latent", "shared", "shared_factor", "shared_gate"),
    )

    def __init__(
        self,
        params: RoutingParams,
        router: Linear,
        experts: Experts,
        *,
        correction: Any = None,
        expert_scale: Any = None,
        shared: MLP | None = None,
        shared_scale: float = 1.0,
        shared_gate: Linear | None = None,
        latent: tuple[Linear, Linear] | None = None,
        deterministic: bool = False,
    ) -> None:
        self.params = params
        self.latent = latent
        self.router = router
        self.experts = experts
        self.correction = correction
        self.expert_scale = expert_scale
        self.shared = shared
        self.shared_gate = shared_gate
        self.deterministic = deterministic
        matrix = router.weight.data
        xp = array_module(matrix)
        self.shared_factor = None if shared_scale == 1.0 else xp.full(1, shared_scale, _FLOAT32)
        self.load = xp.zeros(matrix.shape[0] - params.num_shared, np.int64)
        self.is_summed_next = False

    @property
    def num_chosen(self) -> int:
        """Number of experts per token."""
        return self.params.top_k + self.params.num_shared

    @property
    def is_plain_sum(self) -> bool:
        """Whether the output is a plain sum of the outputs of each token's experts."""
        others = (self.shared, self.latent, self.shared_gate)
        is_whole = type(self) is MoE and type(self.experts) is Experts
        return is_whole and not self.experts.num_identity and all(one is None for one in others)

    @property
    def input_format(self) -> Format | None:
        """None: router and experts read the same input, and the router reads no codes."""
        return None

    def coded_format(self, num_tokens: int) -> Format | None:
        """Return the weight format for which a norm may quantize the input, keeping its numbers.

        See `Experts.coded_format`.
        """
        return self.experts.coded_format(num_tokens) if self._reads_input else None

    def _routes_with_codes(self, num_tokens: int) -> bool:
        return self._reads_input and self.experts.routes_with_codes(num_tokens)

    @property
    def _reads_input(self) -> bool:
        """Whether the experts read the router's input itself."""
        return self.latent is None and not self.params.scales_input

    @property
    def num_multiplied(self) -> int:
        """Number of matrix elements multiplied per token."""
        total = self.router.weight.num_elements + self.num_chosen * self.experts.num_elements
        if self.shared is not None:
            total += self.shared.num_multiplied
        return total + sum(one.weight.num_elements for one in self.latent or ())

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array."""
        yield from arrays_of(
            router=self.router,
            experts=self.experts,
            shared=self.shared,
            shared_gate=self.shared_gate,
        )
        if self.latent is not None:
            yield from arrays_of(latent_in=self.latent[0], latent_out=self.latent[1])
        yield "load", self.load
        for name in ("correction", "expert_scale", "shared_factor"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    def __call__(
        self, x: Any, *, norm: Norm | None = None, residual: Any = None, slots: Any = None
    ) -> Any:
        """Return the output (T, N) for `x` (T, N), or for ``norm(x)``.

        `x` is an array or `QuantizedRows` with numbers. With a `residual` (T, N), which may be `x`,
        the output is added to it. With `slots` (T,) int64, padding (a negative slot) is not counted
        in `load`.
        """
        return self.combined(*self.normed_and_routed(x, norm, slots), residual=residual)

    def after_add(self, x: Any, residual: Any, norm: Norm, *, slots: Any = None) -> tuple[Any, Any]:
        """Return the output (T, N) for norm(h), and h = norm.branch_scale * x + residual.

        With `is_summed_next` the output may be (T, k, N), not yet summed over a token's experts.
        SAFETY: nothing else may hold a view of `x` or `residual` (T, N), or read them afterwards.
        """
        num_tokens = x.shape[0]
        if not self.fuses(norm):
            form = self.coded_format(num_tokens)
            x, residual = norm.add_for(form, x, residual, keeps_numbers=True)
            return self(x, slots=slots), residual
        y, routing, *codes, h = self._fused(
            x,
            norm,
            slots,
            residual=residual,
            quantize_out=self._routes_with_codes(num_tokens),
            out=x,
            residual_out=residual,
        )
        rows = QuantizedRows(codes[0], codes[1], y.dtype, y) if codes else y
        if self.is_summed_next and num_tokens in SUMMED_NEXT and _combines_apart():
            return self.experts(rows, routing), h
        return self.combined(y, routing, rows), h

    def combined(self, x: Any, routing: kernels.Routing, rows: Any, *, residual: Any = None) -> Any:
        """Return the output (T, N) for tokens `x` (T, N), of which experts read `rows`.

        `rows` (T, N) is an array or `QuantizedRows`.
        """
        if self.latent is not None:
            return self._combined_latents(x, routing, rows, residual)
        return self.experts.combined(
            rows,
            routing,
            deterministic=self.deterministic,
            shared=self._shared_output(rows if self._shares(rows) else x),
            shared_gate=None if self.shared_gate is None else self.shared_gate(x),
            residual=residual,
            out=residual,
        )

    def _combined_latents(self, x: Any, routing: kernels.Routing, rows: Any, residual: Any) -> Any:
        """Do the same with experts that read projected rows."""
        assert self.latent is not None and self.shared_gate is None
        into, out_of = self.latent
        y = out_of(self.experts.combined(into(rows), routing, deterministic=self.deterministic))
        if self.shared is not None:
            y = kernels.residual_add(self._shared_output(x), y, out=y)
        return y if residual is None else kernels.residual_add(y, residual, out=residual)

    def _shares(self, rows: Any) -> bool:
        """Tell whether the shared expert multiplies the same codes as the others."""
        if self.shared is None or not isinstance(rows, QuantizedRows):
            return False
        own = self.shared.input_format
        return own is not None and own.block == self.experts.gate_up.format.block

    def _shared_output(self, x: Any) -> Any:
        """Return the shared expert's output (T, N), or None."""
        if self.shared is None:
            return None
        y = self.shared(x)
        factor = self.shared_factor
        return y if factor is None else kernels.scale_rows(y, factor, out=y)

    def normed_and_routed(
        self, x: Any, norm: Norm | None, slots: Any
    ) -> tuple[Any, kernels.Routing, Any]:
        """Return (numbers, routing, rows) of `x`, normalised by `norm` if given.

        `rows` are the experts' input: these numbers, or `x` itself if it is `QuantizedRows`.
        """
        p = self.params
        if isinstance(x, QuantizedRows):
            assert norm is None and x.numbers is not None
            _, routing, _ = self.normed_and_routed(x.numbers, None, slots)
            return x.numbers, routing, x
        if p.scales_input:
            x = x if norm is None else norm(x)
            return x, *self._routed_by_input(x, slots)
        if norm is not None and norm.is_plain and self._can_fuse:
            y, routing = self._fused(x, norm, slots)
            return y, routing, y
        x = x if norm is None else norm(x)
        logits = self.router(x, out_dtype=_FLOAT32)
        return x, kernels.moe_route(logits, p.top_k, **self._options(slots)), x

    def _options(self, slots: Any) -> dict[str, Any]:
        """Return the keywords of `kernels.moe_route`."""
        p = self.params
        options = {
            "score": p.score,
            "correction": self.correction,
            "expert_scale": self.expert_scale,
            "num_groups": p.num_groups,
            "top_groups": p.top_groups,
            "renormalize": p.renormalize,
            "scale": p.scale,
            "num_shared": p.num_shared,
            "slots": slots,
            "load": self.load,
        }
        return options | ({"jitter": p.jitter} if p.score == "sparsemixer" else {})

    def fuses(self, norm: Norm) -> bool:
        """Tell whether one op adds, normalises and routes in `after_add`."""
        return norm.is_plain_add and self._can_fuse

    @property
    def _can_fuse(self) -> bool:
        is_dense = self.router.weight.format.is_dense
        is_known = not self.params.scales_input and self.params.score != "sparsemixer"
        return is_dense and is_known and not self.deterministic

    def _fused(self, x: Any, norm: Norm, slots: Any, **others: Any) -> tuple[Any, ...]:
        return kernels.rmsnorm_moe_route(
            x,
            norm.weight,
            self.router.weight.data,
            self.params.top_k,
            bias=self.router.bias,
            eps=norm.eps,
            weight_offset=norm.offset,
            pdl=True,  # no kernel writes the weights or the bias
            **self._options(slots),
            **others,
        )

    def _routed_by_input(self, x: Any, slots: Any) -> tuple[kernels.Routing, Any]:
        """Return a routing with the weight 1, and `x` times the sigmoid of its expert's logit.

        Two experts whose sigmoids round to the same value still differ in their softmax.
        """
        logits = self.router(x, out_dtype=_FLOAT32)
        routing = kernels.moe_route(logits, 1, slots=slots, load=self.load)
        sigmoid = kernels.moe_route(logits, 1, score="sigmoid", renormalize=False).weights
        return routing, kernels.scale_rows(x, sigmoid.reshape(-1))


def _combines_apart() -> bool:
    """Tell whether no function of the user's replaces the second product with its sum."""
    return not current_overrides().has_any(("moe_gemm_combine",))


class DenseAndExperts:
    """An MLP and experts side by side (Gemma 4), each branch with norms of its own.

    Parameters
    ----------
    dense : MLP
    moe : MoE
    router_norm, moe_norm : Norm
        Norms of the residual stream, for the router and for the experts.
    post_dense_norm, post_moe_norm : Norm
        Norms of the branches' outputs.
    """

    __slots__ = ("dense", "moe", "moe_norm", "post_dense_norm", "post_moe_norm", "router_norm")

    def __init__(
        self,
        dense: MLP,
        moe: MoE,
        *,
        router_norm: Norm,
        moe_norm: Norm,
        post_dense_norm: Norm,
        post_moe_norm: Norm,
    ) -> None:
        self.dense = dense
        self.moe = moe
        self.router_norm = router_norm
        self.moe_norm = moe_norm
        self.post_dense_norm = post_dense_norm
        self.post_moe_norm = post_moe_norm

    @property
    def input_format(self) -> Format | None:
        """Weight format of the MLP's first product. See `MLP`."""
        return self.dense.input_format

    @property
    def num_multiplied(self) -> int:
        """Number of matrix elements multiplied per token."""
        return self.dense.num_multiplied + self.moe.num_multiplied

    @property
    def load(self) -> Any:
        """Number of tokens that each expert has computed, (E,) int64."""
        return self.moe.load

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, array) for every array."""
        yield from arrays_of(
            dense=self.dense,
            moe=self.moe,
            router_norm=self.router_norm,
            moe_norm=self.moe_norm,
            post_dense_norm=self.post_dense_norm,
            post_moe_norm=self.post_moe_norm,
        )

    def __call__(self, x: Any, *, stream: Any, slots: Any = None) -> Any:
        """Return the sum of both branches (T, N).

        `stream` (T, N) is the residual stream, which the router and the experts read, and `x` its
        norm, which the MLP reads. `slots`: see `MoE`.
        """
        dense = self.dense(x)
        dense = self.post_dense_norm(dense, out=dense)
        _, routing, _ = self.moe.normed_and_routed(stream, self.router_norm, slots)
        given = self.moe_norm(stream)
        y = self.moe.combined(given, routing, given)
        y = self.post_moe_norm(y, out=y)
        return kernels.residual_add(dense, y, out=y)
