"""Token sampling: `cuda_src/sample/sample.cu`, mirror `reference/sample.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine import reference
from engine.kernels._chip import sm_count
from engine.kernels._contract import FLOAT32, INT32, INT64, Contract
from engine.kernels._launch import Kernel, ceil_div, round_up
from engine.kernels._module import ModuleSpec
from engine.reference.sample import SampleResult

__all__ = [
    "MAX_LOGPROBS",
    "MAX_VOCAB",
    "Config",
    "SampleResult",
    "choose_config",
    "sample",
    "specs",
]

MAX_LOGPROBS = 20
MAX_VOCAB = 1 << 21

_UINT64 = np.dtype(np.uint64)

# Constants of the CUDA sources in cuda_src/sample.
_SCAN_THREADS = 128
_CHOOSE_THREADS = 512
_SEGMENT = 128  # logits per segment
_TILE = 1024  # logits per tile
_TILES_PER_BLOCK = 4
_MAX_SEGMENTS = 2048
# Sizes of a Tile, a DrawState, the WalkQueue and a Walk in 8-byte words; CUDA checks them.
_TILE_WORDS = 2
_STATE_WORDS = 2
_QUEUE_WORDS = 130
_WALK_WORDS = 4104
_MACROS = (
    ("TILE_WORDS", _TILE_WORDS),
    ("STATE_WORDS", _STATE_WORDS),
    ("QUEUE_WORDS", _QUEUE_WORDS),
    ("WALK_WORDS", _WALK_WORDS),
)
_MAX_WALKS = 256

_PENALTIES = "repetition_penalty:ptr presence_penalty:ptr frequency_penalty:ptr "
_PENALTY_NAMES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_PROCESSING_NAMES = (
    *("history", "history_lens", "prompt_lens", *_PENALTY_NAMES),
    *("logit_bias_ids", "logit_bias_values", "cu_logit_bias", "allowed", "allowed_rows"),
)
_LOGITS = "logits:ptr stride:i64 vocab:i32 "
_FILTERS = "temperature:ptr top_k:ptr top_p:ptr min_p:ptr "
_STAGES = (
    "num_top:i32 num_tiles:i32 num_segments:i32 shift:i32 keys:ptr tiles:ptr states:ptr queue:ptr "
)
_SCAN_PARAMS = (
    f"{_LOGITS}{_FILTERS}{_STAGES}history:ptr max_history:i32 history_lens:ptr prompt_lens:ptr "
    f"{_PENALTIES}logit_bias_ids:ptr logit_bias_values:ptr cu_logit_bias:ptr num_bias:i32 "
    "allowed:ptr allowed_rows:ptr num_allowed:i32 "
    "processed:ptr processed_stride:i64 is_processed:ptr"
)
_SCAN = Kernel("sample_scan", _SCAN_PARAMS, struct="SampleScanParams")
_SCAN_PROCESS = Kernel("sample_scan_process", _SCAN_PARAMS, struct="SampleScanParams")
_CHOOSE = Kernel(
    "sample_choose",
    f"{_LOGITS}processed:ptr processed_stride:i64 is_processed:ptr {_FILTERS}seeds:ptr "
    f"positions:ptr {_PENALTIES}{_STAGES}walks:ptr token_ids:ptr status:ptr num_kept:ptr "
    "logprobs:ptr top_ids:ptr top_logprobs:ptr",
    struct="SampleChooseParams",
)


@dataclass(frozen=True)
class Config:
    """Tiling of the rows of logits.

    Attributes
    ----------
    num_tiles : int
        Tiles of 1024 logits per row, one per warp of `sample_scan`.
    shift : int
        2**shift segments of 128 logits share one key, so that no row has more than 2048 keys.
    num_segments : int
        Keys per row.
    draw_blocks : int
        Blocks of `sample_choose` that share the draw of one unfiltered row.
    """

    num_tiles: int
    shift: int
    num_segments: int
    draw_blocks: int


def specs(dtype: str, **_: Any) -> tuple[ModuleSpec, ...]:
    """Return the module of the op: one for all dtypes, since logits are float32."""
    return (ModuleSpec("sample/sample.cu", "float32", _MACROS),)


def choose_config(num_rows: int, vocab_size: int, *, num_sms: int) -> Config:
    """Choose the tiling of `num_rows` rows of `vocab_size` logits on `num_sms` multiprocessors.

    Examples
    --------
    >>> choose_config(1, 151936, num_sms=132)
    Config(num_tiles=149, shift=0, num_segments=1187, draw_blocks=75)
    """
    num_segments = ceil_div(vocab_size, _SEGMENT)
    shift = 0
    while num_segments > _MAX_SEGMENTS:
        num_segments = ceil_div(num_segments, 2)
        shift = shift + 1
    per_row = ceil_div(vocab_size, 4 * _CHOOSE_THREADS)
    draw_blocks = min(per_row, num_sms // max(num_rows, 1))
    return Config(ceil_div(vocab_size, _TILE), shift, num_segments, max(draw_blocks, 1))


def sample(
    logits: Any,
    *,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seeds: Any,
    positions: Any,
    history: Any = None,
    history_lens: Any = None,
    prompt_lens: Any = None,
    repetition_penalty: Any = None,
    presence_penalty: Any = None,
    frequency_penalty: Any = None,
    logit_bias_ids: Any = None,
    logit_bias_values: Any = None,
    cu_logit_bias: Any = None,
    allowed: Any = None,
    allowed_rows: Any = None,
    num_logprobs: int | None = None,
) -> SampleResult:
    """Sample one token per row.

    Parameters
    ----------
    logits : (B, V) array of float32
        Rows may be strided. Not modified.
    temperature : (B,) array of float32
        0 selects the largest processed logit (the lowest id of ties), whatever the filters.
    top_k : (B,) array of int32
        Maximum number of candidates; 0 or less means all.
    top_p : (B,) array of float32
        In (0, 1]: probability mass that the candidates must reach.
    min_p : (B,) array of float32
        In [0, 1]: minimum probability of a candidate, relative to the largest.
    seeds : (B,) array of uint64
    positions : (B,) array of int64
        Random numbers depend only on (seed, position, token id), not on the row's index in the
        batch, the other rows, or the number of GPUs.
    history : (B, L) array of int32, optional
        Ids so far: row b has ``history_lens[b]`` of them, of which the first ``prompt_lens[b]`` are
        the prompt. Ids outside [0, V) are skipped.
    history_lens, prompt_lens : (B,) array of int32, optional
        Required with `history`.
    repetition_penalty, presence_penalty, frequency_penalty : (B,) array of float32, optional
        Require `history`; neutral at 1, 0 and 0.
    logit_bias_ids, logit_bias_values : (M,) array of int32 and float32, optional
        Row b's entries are [cu_logit_bias[b], cu_logit_bias[b+1]); the ids of a row are distinct.
        A value may be -inf.
    cu_logit_bias : (B+1,) array of int32, optional
        Required with the logit biases.
    allowed : (B or A, ceil(V/32)) array of int32, optional
        Bit i of word w allows id 32 w + i. One row per row of logits; with `allowed_rows`, any
        number A of rows.
    allowed_rows : (B,) array of int32, optional
        Row of `allowed` for each row of logits; if outside [0, A), every id is allowed. Requires
        `allowed`.
    num_logprobs : int, optional
        None: no log-probabilities; 0: of the sampled tokens only; n: also of the n most likely ids.

    Returns
    -------
    SampleResult
        token_ids (B,) int32; -1 if the status is not 0.
        status (B,) int32: 0 sampled; 1 the logits contain NaN or +inf, or all are -inf; 2 a
        parameter of the row is out of range.
        logprobs (B,) float32 of the sampled tokens, top_ids (B, n) int32 and top_logprobs (B, n)
        float32 in descending order (the lowest id of ties first); None unless requested; NaN and -1
        if the status is not 0.
        num_kept (B,) int32: number of candidates in the draw.

    Raises
    ------
    ShapeError, DTypeError, ContractError
        If an argument breaks the contract.

    Notes
    -----
    In float32, one rounding per operation, in this order [1]_:

    1. logit += bias; ids that are not allowed become -inf; ids of prompt or output:
       logit = logit / r if logit > 0 else logit * r; ids of the output:
       logit -= frequency * count, then logit -= presence.
    2. x = (logit - largest logit) * (log2(e) / temperature), so p = 2**x up to a factor.
       Candidates have x >= -40: no other id could win the draw.
    3. Candidates have x >= log2(min_p).
    4. Of these, the first `top_k` in the order (logit descending, id ascending).
    5. Of these, the shortest prefix whose mass reaches `top_p` of their total. The mass of a token
       is 2**x in whole steps of 2**-40, so that sums do not depend on their order; `top_p` is
       rounded up to steps of 2**-24.
    6. The candidate with the largest x - log2(-log2(u)) (Gumbel-max trick); u in (0, 1) is word
       ``id % 4`` of Philox4x32-10 [2]_ for counter (id // 4, position) and key `seed`.

    Log-probabilities are computed from the unprocessed logits, before bias, mask, penalties and
    temperature: vLLM's `raw_logprobs`. Penalties precede min_p, and min_p precedes top_k and top_p,
    as in vLLM.

    References
    ----------
    .. [1] Holtzman et al.: The Curious Case of Neural Text Degeneration, arXiv:1904.09751 (top_p);
       Nguyen et al.: Turning Up the Heat, arXiv:2407.01082 (min_p); Keskar et al.: CTRL,
       arXiv:1909.05858 (repetition penalty).
    .. [2] Salmon et al.: Parallel random numbers: as easy as 1, 2, 3, SC 2011.

    Examples
    --------
    >>> import numpy as np
    >>> one = np.ones(1, np.float32)
    >>> sample(np.array([[1.0, 3.0, 2.0]], np.float32), temperature=0 * one,
    ...        top_k=np.zeros(1, np.int32), top_p=one, min_p=0 * one,
    ...        seeds=np.zeros(1, np.uint64), positions=np.zeros(1, np.int64)).token_ids
    array([1], dtype=int32)
    """
    args = dict(locals())
    call = Contract("sample")
    args["logits"] = call.array("logits", args.pop("logits"), "B V", FLOAT32, layout="rows")
    call.check("logits", 0 < call["V"] <= MAX_VOCAB, f"of V in 1..{MAX_VOCAB}", call["V"])
    _check_rows(call, args)
    _check_processing(call, args)
    limit = min(call["V"], MAX_LOGPROBS)
    if num_logprobs is not None:
        wanted = f"None or a whole number in 0..{limit}"
        call.integer("num_logprobs", num_logprobs, 0, limit, wanted)
    if call.on_cpu:
        return reference.sample(args.pop("logits"), **args)
    return _launch(call, args)


def _launch(call: Contract, args: dict[str, Any]) -> SampleResult:
    xp = call.xp
    num_rows = call["B"]
    vocab_size = call["V"]
    num_logprobs = args["num_logprobs"]
    spec = specs("float32")[0]
    config = choose_config(num_rows, vocab_size, num_sms=sm_count())
    rows = {name: args[name] for name in ("logits", "temperature", "top_k", "top_p", "min_p")}
    rows |= {
        "stride": args["logits"].strides[0] // 4,
        "vocab": vocab_size,
        "num_top": -1 if num_logprobs is None else num_logprobs,
        "num_tiles": config.num_tiles,
        "num_segments": config.num_segments,
        "shift": config.shift,
        "keys": xp.empty((num_rows, 2 * _MAX_SEGMENTS), np.uint32),
        "tiles": xp.empty((num_rows, config.num_tiles * _TILE_WORDS), _UINT64),
        "states": xp.empty((num_rows, _STATE_WORDS), _UINT64),
        "queue": xp.empty(_QUEUE_WORDS, _UINT64),
    }
    grid = (num_rows * ceil_div(config.num_tiles, _TILES_PER_BLOCK),)
    processing = _processing(call, args)
    scan = _SCAN if processing["is_processed"] is None else _SCAN_PROCESS
    scan.launch(spec, grid, (_SCAN_THREADS,), **rows, **processing)
    result = SampleResult(
        token_ids=xp.empty(num_rows, INT32),
        status=xp.empty(num_rows, INT32),
        logprobs=None if num_logprobs is None else xp.empty(num_rows, FLOAT32),
        top_ids=xp.empty((num_rows, num_logprobs), INT32) if num_logprobs else None,
        top_logprobs=xp.empty((num_rows, num_logprobs), FLOAT32) if num_logprobs else None,
        num_kept=xp.empty(num_rows, INT32),
    )
    shared = ("processed", "processed_stride", "is_processed", *_PENALTY_NAMES)
    _CHOOSE.launch(
        spec,
        (num_rows, config.draw_blocks),
        (_CHOOSE_THREADS,),
        **rows,
        **{name: processing[name] for name in shared},
        walks=xp.empty((min(num_rows, _MAX_WALKS), _WALK_WORDS), _UINT64),
        seeds=args["seeds"],
        positions=args["positions"],
        **result._asdict(),
    )
    return result


def _processing(call: Contract, args: dict[str, Any]) -> dict[str, Any]:
    """Return the kernel arguments for processing; `is_processed` is None if no row can change."""
    params: dict[str, Any] = {name: args[name] for name in _PROCESSING_NAMES}
    params["max_history"] = call["L"] if args["history"] is not None else 0
    params["num_bias"] = call["M"] if args["cu_logit_bias"] is not None else 0
    params["num_allowed"] = 0 if args["allowed"] is None else args["allowed"].shape[0]
    params["processed"] = params["is_processed"] = None
    params["processed_stride"] = round_up(call["V"], 4)
    if any(args[name] is not None for name in ("history", "cu_logit_bias", "allowed")):
        params["processed"] = call.xp.empty((call["B"], params["processed_stride"]), FLOAT32)
        params["is_processed"] = call.xp.empty(call["B"], INT32)
    return params


def _check_rows(call: Contract, args: dict[str, Any]) -> None:
    floats = ("temperature", "top_p", "min_p")
    for name in floats:
        args[name] = call.array(name, args[name], "B", FLOAT32)
    args["top_k"] = call.array("top_k", args["top_k"], "B", INT32)
    args["seeds"] = call.array("seeds", args["seeds"], "B", _UINT64)
    args["positions"] = call.array("positions", args["positions"], "B", INT64)


def _check_processing(call: Contract, args: dict[str, Any]) -> None:
    """Check the optional arrays, and that arrays required together are all given."""
    bias = ("logit_bias_ids", "logit_bias_values", "cu_logit_bias")
    _check_together(call, args, "history", ("history_lens", "prompt_lens"))
    _check_together(call, args, "cu_logit_bias", bias[:2])
    has_history = args["history"] is not None
    for name in _PENALTY_NAMES:
        call.check(name, args[name] is None or has_history, "None without history", args[name])
    shapes = {"history": "B L", "history_lens": "B", "prompt_lens": "B", "logit_bias_ids": "M"}
    num_masks = "B" if args["allowed_rows"] is None else "A"
    call.check(
        "allowed_rows",
        args["allowed_rows"] is None or args["allowed"] is not None,
        "None without allowed",
        args["allowed_rows"],
    )
    shapes |= {"allowed": f"{num_masks} {ceil_div(call['V'], 32)}", "allowed_rows": "B"}
    shapes |= {"cu_logit_bias": str(call["B"] + 1)}
    for name, shape in shapes.items():
        if args[name] is not None:
            args[name] = call.array(name, args[name], shape, INT32)
    for name in (*_PENALTY_NAMES, "logit_bias_values"):
        if args[name] is not None:
            shape = "M" if name == "logit_bias_values" else "B"
            args[name] = call.array(name, args[name], shape, FLOAT32)
    if call.on_cpu:
        _check_values(call, args)


def _check_together(
    call: Contract, args: dict[str, Any], first: str, others: tuple[str, ...]
) -> None:
    for name in others:
        together = (args[name] is None) == (args[first] is None)
        call.check(name, together, f"given exactly when {first} is", args[name])


def _check_values(call: Contract, args: dict[str, Any]) -> None:
    """Check the arrays' values, on the host only; the kernels clamp them."""
    if args["history"] is not None:
        lens = args["history_lens"]
        prompt = args["prompt_lens"]
        ok = bool(((lens >= 0) & (lens <= call["L"])).all())
        call.check("history_lens", ok, f"in 0..{call['L']}", lens)
        call.check(
            "prompt_lens",
            bool(((prompt >= 0) & (prompt <= lens)).all()),
            "in 0..history_lens",
            prompt,
        )
    if args["cu_logit_bias"] is not None:
        cu = args["cu_logit_bias"]
        ids = args["logit_bias_ids"]
        rising = cu[0] == 0 and cu[-1] == ids.size and bool((cu[1:] >= cu[:-1]).all())
        call.check("cu_logit_bias", rising, f"rising from 0 to {ids.size}", cu)
        inside = bool(((ids >= 0) & (ids < call["V"])).all())
        call.check("logit_bias_ids", inside, f"in [0, {call['V']}) (the vocabulary)", ids)
