"""Routing of tokens to experts, and the sort by expert: `cuda_src/moe_route.cu`."""

from __future__ import annotations

from typing import Any

from engine import reference
from engine.kernels._contract import FLOAT32, FLOAT64, INT32, INT64, Contract
from engine.kernels._launch import Kernel, ceil_div
from engine.kernels._module import ModuleSpec
from engine.kernels._workspace import workspace
from engine.reference import Routing

__all__ = [
    "MAX_CHOICES",
    "MAX_EXPERTS",
    "MAX_GROUPS",
    "MAX_MIXED",
    "MAX_TOP_K",
    "PARAMS",
    "SCORES",
    "WIDTHS",
    "Routing",
    "checked_groups",
    "checked_offsets",
    "checked_options",
    "checked_order",
    "checked_routing",
    "chunk_tokens",
    "moe_route",
    "new_routing",
    "place_pairs",
    "specs",
]

MAX_EXPERTS = 512  # experts with matrices
MAX_CHOICES = 768  # with those that return their input
MAX_GROUPS = 32
MAX_TOP_K = 16
SCORES = ("softmax", "sigmoid")
_ALL_SCORES = (*SCORES, "sparsemixer")
MAX_MIXED = 32  # experts of a sparsemixer

# Constants of moe_route.cu.
_WARP = 32
_FEW_TOKENS = 16
_THREADS = 512
_MAX_CHUNKS = 128  # maximum blocks: about one per multiprocessor of a large chip
WIDTHS = (32, 64, 128, 256, 512)  # maximum number of experts of each entry point
_ALL_WIDTHS = (*WIDTHS, MAX_CHOICES)

PARAMS = (
    "logits:ptr correction:ptr expert_scale:ptr experts:ptr weights:ptr order:ptr offsets:ptr "
    "slots:ptr load:ptr counts:ptr num_tokens:i32 num_experts:i32 top_k:i32 num_shared:i32 "
    "is_sigmoid:i32 num_groups:i32 top_groups:i32 renormalize:i32 scale:f32 "
    "chunk_tokens:i32 jitter:f32"
)


def _kernels(name: str) -> dict[int, Kernel]:
    entry = f"moe_route_{name}"
    return {n: Kernel(f"{entry}_{n}", PARAMS, struct="MoeRouteParams") for n in _ALL_WIDTHS}


_FEW, _CHOOSE, _PLACE = (_kernels(name) for name in ("few", "choose", "place"))
_FEW_MIXER, _CHOOSE_MIXER = (
    Kernel(f"moe_route_{name}_mixer", PARAMS, struct="MoeRouteParams") for name in ("few", "choose")
)

# Fields of MoeRouteParams that only the choice of experts reads.
_UNUSED: dict[str, Any] = {
    **dict.fromkeys(("logits", "correction", "expert_scale", "slots", "load")),
    **dict.fromkeys(("is_sigmoid", "num_groups", "top_groups", "renormalize"), 0),
    "scale": 1.0,
    "jitter": 0.0,
}


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the module of the op: one for all dtypes, since logits are float32."""
    return (ModuleSpec("moe_route.cu", "float32"),)


def moe_route(
    logits: Any,
    top_k: int,
    *,
    score: str = "softmax",
    jitter: float = 0.0,
    correction: Any = None,
    expert_scale: Any = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    num_shared: int = 0,
    slots: Any = None,
    load: Any = None,
) -> Routing:
    """Choose the `top_k` experts of each token, and sort the pairs (token, expert) by expert.

    Parameters
    ----------
    logits : (T, E + num_shared) array of float32
        The router's output, for at most 768 experts (of which `moe_gemm` multiplies 512), then the
        logit of the shared expert.
    top_k : int
        Experts that each token chooses, from 1 to 16 and at most E.
    score : "softmax", "sigmoid" or "sparsemixer"
        Scores of the experts: softmax of the logits, or the sigmoid of each. With "sparsemixer",
        for at most 32 experts, the largest logits are chosen, and the weight of one is its share
        of a softmax over itself and those of the smaller ones that are close to it. It allows no
        correction, no groups, no shared expert, and nothing to renormalize.
    jitter : float
        With "sparsemixer": logits a and b < a are close if a - b <= 2 jitter max(abs(b), a).
    correction : (E,) array of float32, optional
        Added to the scores to choose the experts, but not to compute their weights.
    expert_scale : (E,) array of float32, optional
        Factor on the weights of each expert, after they are renormalized.
    num_groups, top_groups : int
        Choose a token's experts from its `top_groups` best groups, out of `num_groups` groups (at
        most 32) of consecutive experts. A group ranks by its best score or, with a
        `correction`, by the sum of its two best.
    renormalize : bool
        Divide the weights of a token by their sum. With "softmax" this equals a softmax over the
        chosen experts' logits.
    scale : float
        Factor on all weights, except those of a shared expert.
    num_shared : 0 or 1
        1: every token's last expert is a shared one, with the index E and the sigmoid of its logit
        as its weight. It is not counted in `load`.
    slots : (T,) array of int64, optional
        The `slot_mapping` of `kv_store`. A token with a negative slot is padding: it is routed but
        not counted in `load`.
    load : (E,) array of int64, optional
        Pairs routed to each expert so far; the pairs of this call are added.

    Returns
    -------
    Routing
        experts (T, k) int32, weights (T, k) float32, order (T·k,) int32, with k = top_k +
        num_shared; offsets (E + num_shared + 1,) int32. Ties are resolved in favour of the lower
        expert index.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    The sort is a stable counting sort, so the result is deterministic. Softmax routing follows
    [1]_; groups and correction follow [2]_; sparsemixer follows [3]_, in inference.

    References
    ----------
    .. [1] Shazeer et al.: Outrageously large neural networks, arXiv:1701.06538.
    .. [2] DeepSeek-AI: DeepSeek-V3 technical report, arXiv:2412.19437.
    .. [3] Liu et al.: GRIN: gradient-informed mixture of experts, arXiv:2409.12136.

    Examples
    --------
    >>> import numpy as np
    >>> logits = np.log(np.array([[1, 2, 5], [6, 1, 3]], np.float32))
    >>> routing = moe_route(logits, 2, renormalize=False)
    >>> routing.experts.tolist(), routing.weights.round(3).tolist()
    ([[2, 1], [0, 2]], [[0.625, 0.25], [0.6000000238418579, 0.30000001192092896]])
    >>> routing.order.tolist(), routing.offsets.tolist()
    ([2, 1, 0, 3], [0, 1, 2, 4])
    """
    call = Contract("moe_route")
    logits = call.array("logits", logits, "T E", (FLOAT32, FLOAT64))
    call.check("score", score in _ALL_SCORES, f"one of {_ALL_SCORES}", score)
    is_mixed = score == "sparsemixer"
    options = checked_options(
        call,
        "logits",
        top_k,
        num_shared=num_shared,
        score="softmax" if is_mixed else score,
        correction=correction,
        expert_scale=expert_scale,
        num_groups=num_groups,
        top_groups=top_groups,
        renormalize=renormalize,
        scale=scale,
        slots=slots,
        load=load,
    )
    top_k = int(top_k)
    options |= {"score": score, "jitter": call.number("jitter", jitter, low=0.0)}
    if is_mixed:
        _check_mixed(call, options)
    if call.on_cpu:
        return reference.moe_route(logits, top_k, **options)
    routing = new_routing(call, top_k, num_shared)
    _launch(logits, routing, top_k, **options)
    return routing


def checked_routing(call: Contract, routing: Any) -> Routing:
    """Return `routing` after checking its type; its arrays are checked where they are used."""
    if not isinstance(routing, Routing):
        wanted = "a Routing, as moe_route returns it"
        call.check("routing", False, wanted, type(routing).__name__)
    found: Routing = routing
    return found


def checked_order(call: Contract, order: Any) -> Any:
    """Return the `order` of a routing after checking it; `call` has bound P."""
    order = call.array("routing.order", order, "P", INT32)
    call.indices("routing.order", order, 0, call["P"] - 1)
    return order


def checked_offsets(call: Contract, offsets: Any, size: int | str) -> Any:
    """Return the `offsets` of a routing after checking them; `call` has bound P."""
    offsets = call.array("routing.offsets", offsets, str(size), INT32)
    call.indices("routing.offsets", offsets, 0, call["P"])
    return offsets


def new_routing(call: Contract, top_k: int, num_shared: int = 0) -> Routing:
    """Return new arrays for the routing of T tokens to E experts (with a shared one).

    `call` has bound both.
    """
    tokens = call["T"]
    k = top_k + num_shared
    return Routing(
        call.output("experts", None, (tokens, k), INT32),
        call.output("weights", None, (tokens, k), FLOAT32),
        call.output("order", None, (tokens * k,), INT32),
        call.output("offsets", None, (call["E"] + 1,), INT32),
    )


def checked_options(
    call: Contract,
    source: str,
    top_k: int,
    *,
    score: str,
    correction: Any,
    expert_scale: Any = None,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
    num_shared: int = 0,
    slots: Any,
    load: Any,
) -> dict[str, Any]:
    """Check and return the options of `moe_route`.

    Argument `source` has bound T and E, the number of experts with a shared one.
    """
    num_shared = call.integer("num_shared", num_shared, 0, 1, "0 or 1")
    num_experts = call["E"] - num_shared
    chosen = f"{num_experts}" if num_shared else "E"
    call.check(
        source, 1 <= num_experts <= MAX_CHOICES, f"of 1 to {MAX_CHOICES} experts", num_experts
    )
    limit = min(num_experts, MAX_TOP_K)
    call.integer("top_k", top_k, 1, limit, f"from 1 to {limit}")
    call.check("score", score in SCORES, f"one of {SCORES}", score)
    if correction is not None:
        correction = call.array("correction", correction, chosen, FLOAT32)
    if expert_scale is not None:
        expert_scale = call.array("expert_scale", expert_scale, chosen, FLOAT32)
    num_groups, top_groups = checked_groups(
        call, num_experts, top_k, num_groups, top_groups, has_correction=correction is not None
    )
    call.number("scale", scale)
    if slots is not None:
        slots = call.array("slots", slots, "T", INT64)
    if load is not None:
        load = call.written("load", load, chosen, INT64)
    return {
        "score": score,
        "correction": correction,
        "expert_scale": expert_scale,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "renormalize": bool(renormalize),
        "scale": scale,
        "num_shared": num_shared,
        "slots": slots,
        "load": load,
    }


def _check_mixed(call: Contract, options: dict[str, Any]) -> None:
    """Check what "sparsemixer" does not support."""
    call.check("logits", call["E"] <= MAX_MIXED, f"of at most {MAX_MIXED} experts", call["E"])
    for name, plain in (("correction", None), ("num_groups", 1), ("num_shared", 0)):
        given = options[name]
        is_plain = given is None if plain is None else given == plain
        call.check(name, is_plain, f"{plain} with sparsemixer", given)
    call.check("renormalize", not options["renormalize"], "False with sparsemixer", True)


def checked_groups(
    call: Contract,
    num_experts: int,
    top_k: int,
    num_groups: int,
    top_groups: int,
    *,
    has_correction: bool,
) -> tuple[int, int]:
    """Check and return `num_groups` and `top_groups` as Python ints."""
    wanted = f"a divisor of the {num_experts} experts"
    num_groups = call.integer("num_groups", num_groups, 1, num_experts, wanted)
    call.check("num_groups", num_experts % num_groups == 0, wanted, num_groups)
    call.check("num_groups", num_groups <= MAX_GROUPS, f"at most {MAX_GROUPS}", num_groups)
    per_group = num_experts // num_groups
    if num_groups > 1 and has_correction:
        call.check("num_groups", per_group >= 2, f"at most {num_experts // 2}", num_groups)
    top_groups = call.integer("top_groups", top_groups, 1, num_groups, f"from 1 to {num_groups}")
    has_room = num_groups == 1 or top_groups * per_group >= top_k
    call.check("top_groups", has_room, f"groups with {top_k} experts together", top_groups)
    return num_groups, top_groups


def chunk_tokens(num_tokens: int) -> int:
    """Return the tokens per block, a multiple of its warps; 0 means one block for all tokens.

    Examples
    --------
    >>> chunk_tokens(16), chunk_tokens(17), chunk_tokens(4096), chunk_tokens(5000)
    (0, 16, 32, 48)
    """
    if num_tokens <= _FEW_TOKENS:
        return 0
    warps = _THREADS // _WARP
    return ceil_div(ceil_div(num_tokens, _MAX_CHUNKS), warps) * warps


def _launch(
    logits: Any,
    routing: Routing,
    top_k: int,
    *,
    score: str,
    jitter: float,
    correction: Any,
    expert_scale: Any,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scale: float,
    num_shared: int,
    slots: Any,
    load: Any,
) -> None:
    num_tokens = logits.shape[0]
    num_experts = logits.shape[1] - num_shared
    chunk = chunk_tokens(logits.shape[0])
    num_chunks = ceil_div(num_tokens, chunk) if chunk else 1
    width = next(n for n in _ALL_WIDTHS if n >= num_experts)
    arguments = {
        "logits": logits,
        "correction": correction,
        "expert_scale": expert_scale,
        **routing._asdict(),
        "counts": workspace(num_chunks * num_experts) if chunk else None,
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "top_k": top_k,
        "num_shared": num_shared,
        "is_sigmoid": score == "sigmoid",
        "num_groups": num_groups,
        "top_groups": top_groups,
        "renormalize": renormalize,
        "scale": scale,
        "jitter": jitter,
        "slots": slots,
        "load": load,
        "chunk_tokens": chunk,
    }
    spec = specs("float32")[0]
    is_mixed = score == "sparsemixer"
    if not chunk:
        threads = _WARP * max(1, num_tokens)
        few = _FEW_MIXER if is_mixed else _FEW[width]
        few.launch(spec, (1,), (threads,), pdl=True, **arguments)
        return
    choose = _CHOOSE_MIXER if is_mixed else _CHOOSE[width]
    choose.launch(spec, (num_chunks,), (_THREADS,), pdl=True, **arguments)
    place_pairs(
        routing,
        arguments["counts"],
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        num_shared=num_shared,
        chunk_tokens=chunk,
    )


def place_pairs(
    routing: Routing,
    counts: Any,
    *,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    num_shared: int = 0,
    chunk_tokens: int,
) -> None:
    """Sort the pairs of experts that a kernel has chosen and counted; `specs` has the module.

    Parameters
    ----------
    routing : Routing
        `order` and `offsets` are written, but for the pairs of a shared expert in `order`.
    counts : array
        (ceil(num_tokens / chunk_tokens), E) int32: pairs of each chunk of tokens, per expert.
    """
    _PLACE[next(n for n in _ALL_WIDTHS if n >= num_experts)].launch(
        specs("float32")[0],
        (max(1, ceil_div(num_tokens, chunk_tokens)),),  # without tokens: the offsets, all 0
        (_THREADS,),
        pdl=True,
        **routing._asdict() | {"weights": None},
        counts=counts,
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        num_shared=num_shared,
        chunk_tokens=chunk_tokens,
        **_UNUSED,
    )
