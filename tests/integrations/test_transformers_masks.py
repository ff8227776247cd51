"""Masks as runs of tokens, beside the dense masks that transformers builds for sdpa."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="transformers' models run on PyTorch")
transformers = pytest.importorskip("transformers", reason="its masks are what is tested")

from transformers import masking_utils  # noqa: E402

from engine.errors import ContractError  # noqa: E402
from engine.integrations import transformers as integration  # noqa: E402
from engine.integrations.transformers import masks  # noqa: E402

BATCH, LENGTH = 3, 11
PADDINGS = {
    "none": ((0, 0), (0, 0), (0, 0)),
    "left": ((4, 0), (0, 0), (1, 0)),
    "right": ((0, 3), (0, 0), (0, 5)),
    "both": ((2, 3), (0, 0), (1, 1)),
    "row": ((0, 0), (LENGTH, 0), (0, 2)),
}
KINDS = {
    "causal": masking_utils.create_causal_mask,
    "window": masking_utils.create_sliding_window_causal_mask,
    "chunks": masking_utils.create_chunked_causal_mask,
    "bidirectional": masking_utils.create_bidirectional_mask,
    "wide window": masking_utils.create_bidirectional_sliding_window_mask,
    "both ways": masking_utils.create_bidirectional_sliding_window_mask,
}

BIDIRECTIONAL = {"bidirectional", "wide window", "both ways"}
_CACHED = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=128)


@pytest.fixture(autouse=True)
def registered():
    integration.register()


@pytest.fixture(params=[False, True], ids=["counted", "traced"])
def traced(request, monkeypatch):
    """Make masks as for eager models, or as in a graph: without reading tensors."""
    monkeypatch.setattr(masks, "_is_traced", lambda: request.param)


def _config(kind, implementation):
    config = transformers.LlamaConfig(num_hidden_layers=1)
    config.sliding_window = 2 * LENGTH if kind == "wide window" else 4
    config.attention_chunk_size = 3
    config._attn_implementation = implementation
    return config


def _padding(name, length=LENGTH):
    mask = torch.ones(BATCH, length, dtype=torch.long)
    for row, (left, right) in zip(mask, PADDINGS[name], strict=True):
        row[:left] = 0
        row[length - right :] = 0
    return mask


def _made(kind, padding, queries=LENGTH, **kwargs):
    """Return our mask and transformers' dense one."""
    made = []
    for implementation in ("engine", "sdpa"):
        config = _config(kind, implementation)
        skip = "allow_is_bidirectional_skip" if kind in BIDIRECTIONAL else "allow_is_causal_skip"
        extra = {skip: False} if implementation == "sdpa" else {}
        embeds = torch.empty(BATCH, queries, 0)
        kwargs.setdefault("cache", None)
        made.append(KINDS[kind](config, embeds, attention_mask=padding, **kwargs, **extra))
    return made


def _dense(mask, queries, keys):
    """Return (B, queries, keys): True where a query sees a key; the meaning of our mask."""
    last = keys if mask.num_keys is None else mask.num_keys
    seen = torch.zeros(BATCH, queries, keys, dtype=torch.bool)
    flat = torch.zeros(BATCH * queries, BATCH * last, dtype=torch.bool)
    if mask.runs is None:
        query_ends = [queries * b for b in range(BATCH + 1)]
        key_ends = [last * b for b in range(BATCH + 1)]
    else:
        query_ends = mask.runs.query_ends.tolist()
        key_ends = (mask.runs.key_rows * last + mask.runs.key_positions).tolist()
        assert mask.runs.is_exact is None or bool(mask.runs.is_exact)
    assert (query_ends[-1], key_ends[-1]) == (BATCH * queries, BATCH * last)
    for q0, q1, k0, k1 in zip(query_ends, query_ends[1:], key_ends, key_ends[1:], strict=False):
        assert q0 <= q1 and k0 <= k1
        if q0 < q1 and k0 < k1 and mask.runs is not None:
            assert q1 - q0 <= mask.runs.max_queries and k1 - k0 <= mask.runs.max_keys
        for query in range(q0, q1):
            end = max(k0, k1 - (q1 - 1 - query)) if mask.causal else k1
            begin = max(k0, end - mask.window) if mask.window else k0
            flat[query, begin:end] = True
            if mask.pattern is not None:
                distance = (query - q0) - (torch.arange(BATCH * last) - k0) + mask.pattern.offset
                flat[query] &= distance % mask.pattern.period < mask.pattern.width
    for b in range(BATCH):
        rows = slice(b * queries, (b + 1) * queries)
        seen[b, :, :last] = flat[rows, b * last : (b + 1) * last]
        assert int(flat[rows].sum()) == int(seen[b].sum()), "a query sees another row's keys"
    return seen


def _check(kind, padding, queries, keys, **kwargs):
    mask, dense = _made(kind, padding, queries, **kwargs)
    expected = dense.expand(BATCH, 1, queries, keys)[:, 0]
    if padding is not None and kind not in ("bidirectional", "wide window"):
        is_token = padding[:, -queries:].bool()
        expected = expected & is_token[:, :, None]  # our padding sees nothing
    torch.testing.assert_close(_dense(mask, queries, keys), expected)
    return mask


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_equals_the_dense_one(kind, padding, traced):
    _check(kind, _padding(padding), LENGTH, LENGTH)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("padding", ["none", "left", "row"])
@pytest.mark.parametrize("kind", ["causal", "window", "chunks"])
def test_queries_after_a_cache(kind, padding, queries, traced):
    cache = _filled(transformers.DynamicCache(), LENGTH - queries)
    _check(kind, _padding(padding), queries, LENGTH, cache=cache)


@pytest.mark.parametrize(("before", "queries"), [(0, LENGTH), (7, 4), (10, 1)])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("kind", ["causal", "window", "chunks"])
def test_a_static_cache_holds_keys_that_are_not_written_yet(kind, padding, before, queries, traced):
    size = 16
    cache = transformers.StaticCache(config=_CACHED, max_cache_len=size)
    cache = _filled(cache, before)
    _check(kind, _padding(padding), queries, size, cache=cache)


def _filled(cache, tokens):
    shape = (BATCH, _CACHED.num_key_value_heads, tokens, 4)
    if tokens:
        cache.update(torch.zeros(shape), torch.zeros(shape), 0)
    return cache


@pytest.mark.parametrize("kind", ["causal", "window", "chunks"])
def test_position_ids_that_restart_separate_sequences(kind, traced):
    rows = ([4, 7], [11], [1, 1, 9])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    mask = _check(kind, None, LENGTH, LENGTH, position_ids=positions)
    assert mask.runs is not None


def test_a_decode_step_has_two_runs_per_row_and_one_more(traced):
    cache = _filled(transformers.DynamicCache(), LENGTH - 1)
    mask, _ = _made("causal", _padding("left"), 1, cache=cache)
    assert mask.runs.query_ends.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mask.runs.max_queries == 1


def test_nothing_is_built_for_a_plain_mask():
    for padding in (None, _padding("none")):
        mask, _ = _made("causal", padding)
        assert mask == integration.AttentionMask(causal=True)


def test_text_around_an_image_of_one_token_stays_causal():
    ids = torch.full((BATCH, LENGTH), -1)
    ids[:, 3] = 0
    _check("causal", None, LENGTH, LENGTH, block_sequence_ids=ids)


def test_image_tokens_that_see_each_other_are_refused(traced):
    ids = torch.full((BATCH, LENGTH), -1)
    ids[1, 3:6] = 0
    _expect_flaw("see later ones", None, block_sequence_ids=ids)


def test_padding_between_tokens_is_refused(traced):
    padding = _padding("left")
    padding[1, 5] = 0
    _expect_flaw("padding between tokens", padding)


def _expect_flaw(message, padding, **kwargs):
    """Eager masks raise; traced ones say so in a tensor that the layers assert."""
    if masks._is_traced():
        mask, _ = _made("causal", padding, **kwargs)
        assert not mask.runs.is_exact
    else:
        with pytest.raises(ContractError, match=message):
            _made("causal", padding, **kwargs)


def test_padding_within_an_encoders_tokens_is_refused():
    padding = _padding("left")
    padding[1, 5] = 0
    with pytest.raises(ContractError, match="padding between tokens"):
        _made("bidirectional", padding)


@pytest.mark.parametrize("argument", ["or_mask_function", "and_mask_function"])
def test_a_models_own_mask_function_is_refused(argument):
    with pytest.raises(ContractError, match="a mask function of its own"):
        _made("causal", None, **{argument: lambda b, h, q, k: q == k})


def test_a_window_in_both_directions_needs_a_key_per_query():
    embeds = torch.empty(BATCH, LENGTH, 0)
    states = torch.empty(BATCH, LENGTH + 2, 0)
    config = _config("both ways", "engine")
    with pytest.raises(ContractError, match="as many keys as queries, 11; got 13"):
        masking_utils.create_bidirectional_sliding_window_mask(config, embeds, None, states)


@pytest.mark.parametrize("two_way", [False, True])
def test_a_window_taken_for_the_other_kind_is_noticed(two_way):
    """An argument that only encoders' masks have tells the kind; a version may change that."""
    windows = (
        masking_utils.sliding_window_bidirectional_mask_function,
        masking_utils.sliding_window_causal_mask_function,
    )
    arguments = {"allow_is_bidirectional_skip": True} if two_way else {}
    with pytest.raises(ContractError, match="tokens that see later ones"):
        integration.make_mask(
            BATCH, LENGTH, LENGTH, mask_function=windows[two_way](4), local_size=4, **arguments
        )


def test_too_many_packed_sequences_in_a_graph_are_noticed(monkeypatch):
    monkeypatch.setattr(masks, "_is_traced", lambda: True)
    positions = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    mask, _ = _made("causal", None, position_ids=positions)
    assert not mask.runs.is_exact


@pytest.mark.parametrize("count", [1, 3, LENGTH, LENGTH + 1])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", ["causal", "window", "chunks"])
def test_the_mask_of_the_last_queries(kind, padding, count, traced):
    mask, _ = _made(kind, _padding(padding))
    whole = _dense(mask, LENGTH, LENGTH)
    part = mask[:, :, -count:, :]
    torch.testing.assert_close(_dense(part, min(count, LENGTH), LENGTH), whole[:, -count:])
    assert mask[:, :, slice(-0, None), :] == mask


@pytest.mark.parametrize("index", [0, (0, 0, slice(-1, None), slice(None)), (slice(None),) * 3])
def test_another_part_of_a_mask_is_refused(index):
    mask, _ = _made("causal", None)
    with pytest.raises(ContractError, match="attention mask: has no part"):
        mask[index]
    mask, _ = _made("both ways", None)
    with pytest.raises(ContractError, match="attention mask: has no part"):
        mask[:, :, -1:, :]


def test_a_mask_moves_to_the_device_of_a_layer():
    mask, _ = _made("causal", _padding("left"))
    moved = mask.to("meta")
    assert moved.runs.query_ends.device.type == "meta"
    assert moved.runs.max_keys == mask.runs.max_keys
