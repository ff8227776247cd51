"""The columns of other libraries in `python -m tests.bench`, and the reasons for empty ones."""

from __future__ import annotations

import contextlib
import sys
import warnings
from types import SimpleNamespace

import pytest

from engine.testing import bench_case
from engine.testing.bench_case import BenchCase, measure
from engine.testing.timing import L2_BYTES, Timing, measure_gpu, num_copies
from tests.bench import __main__ as bench
from tests.bench import sdpa
from tests.bench.bench_attention_decode import CASES


def _raise(error):
    raise error


def _row(monkeypatch, **peers):
    """Return what is printed for a case that took 2 us on a fake GPU."""
    freed = []
    pool = SimpleNamespace(free_all_blocks=lambda: freed.append(True))
    monkeypatch.setattr(bench_case, "measure_gpu", lambda *_, **__: Timing((2e-6, 2e-6)))
    case = BenchCase("one", lambda xp, seed: (seed,), lambda x: x, nbytes=8000, peers=peers)
    row = measure(case, SimpleNamespace(get_default_memory_pool=lambda: pool)).row()
    assert freed == [True]
    return row, bench._line({"op": "an_op", **row})


def test_a_peers_columns(monkeypatch):
    row, line = _row(monkeypatch, other=lambda: 8e-6)
    assert row["other us"] == pytest.approx(8) and row["x other"] == pytest.approx(4)
    assert row["other GB/s"] == pytest.approx(1)
    assert line == "an_op  one  us 2  GB/s 4  other us 8  other GB/s 1  x other 4"


class _FakeStream:
    """A stream on which one call takes `seconds`, and cuBLAS refuses to be captured."""

    def __init__(self, seconds):
        self.seconds, self.now, self.is_capturing, self.captured = seconds, 0.0, False, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def launch(self, is_cublas=False):
        if self.is_capturing and is_cublas:
            raise NotImplementedError("calling cuBLAS API during stream capture")
        if self.is_capturing:
            self.captured += 1
        else:
            self.now += self.seconds

    def begin_capture(self):
        self.is_capturing, self.captured = True, 0

    def end_capture(self):
        self.is_capturing = False
        return SimpleNamespace(launch=lambda stream: self.replay())

    def replay(self):
        self.now += self.captured * self.seconds


class _FakeEvent:
    def record(self, stream):
        self.at = stream.now

    def synchronize(self):
        pass


def _fake_cupy(monkeypatch, seconds, result_bytes=0):
    """A GPU of 1 GB; a call takes `seconds`, and keeps `result_bytes`."""
    stream = _FakeStream(seconds)
    used = iter((0, result_bytes))
    pool = SimpleNamespace(used_bytes=lambda: next(used, 0), free_bytes=lambda: 0)
    cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(synchronize=lambda: None),
        Stream=lambda non_blocking: stream,
        Event=_FakeEvent,
        get_elapsed_time=lambda start, stop: 1e3 * (stop.at - start.at),
        runtime=SimpleNamespace(memGetInfo=lambda: (1 << 30, 1 << 30)),
    )
    cupy = SimpleNamespace(cuda=cuda, get_default_memory_pool=lambda: pool)
    monkeypatch.setattr("engine.device.cupy", lambda: cupy)
    return stream


def test_calls_that_cannot_be_captured_are_timed_between_events(monkeypatch):
    stream = _fake_cupy(monkeypatch, 2e-4)
    captured = measure_gpu([stream.launch] * 2)
    assert not captured.has_launches and captured.median == pytest.approx(2e-4)
    calls = [lambda: stream.launch(is_cublas=True)] * 2
    timing = measure_gpu(calls, needs_graph=False)
    assert timing.has_launches and timing.median == pytest.approx(2e-4)
    assert len(timing.samples) == 20 and not stream.is_capturing
    with pytest.raises(NotImplementedError, match="cuBLAS"):
        measure_gpu(calls)


def test_a_slow_call_is_repeated_less_often(monkeypatch):
    stream = _fake_cupy(monkeypatch, 0.1)
    assert measure_gpu([stream.launch] * 2, replays=5, seconds=3.0).median == pytest.approx(0.1)
    assert stream.captured == 6 and stream.now == pytest.approx(0.1 * (2 + 2 + 6 + 5 * 6))


def test_results_take_half_the_memory_at_most(monkeypatch):
    stream = _fake_cupy(monkeypatch, 1e-3, result_bytes=100 << 20)
    assert measure_gpu([stream.launch] * 2).median == pytest.approx(1e-3)
    assert stream.captured == 10  # five times two calls, which keep 100 MiB together


def test_a_record_says_which_times_include_launches(monkeypatch):
    timings = [Timing((1e-4,)), Timing((2e-4,), has_launches=True), Timing((3e-4,))]
    monkeypatch.setattr(bench_case, "measure_gpu", lambda *_, **__: timings.pop(0))
    rivals = {"cupy": max, "other": max}
    row = measure(BenchCase("one", lambda xp, seed: (), max, 8, baselines=rivals), object()).row()
    assert row["cupy timed"] == "without a graph" and "other timed" not in row


def test_a_peer_that_raises_leaves_its_reason_and_the_others(monkeypatch):
    refusal = RuntimeError("head_dim should be\n a multiple of 8")
    row, line = _row(monkeypatch, first=lambda: _raise(refusal), second=lambda: 2e-6)
    assert row["no first"] == "RuntimeError: head_dim should be a multiple of 8"
    assert not {"first us", "x first"} & row.keys() and row["x second"] == pytest.approx(1)
    assert "  no first (RuntimeError: head_dim should be a multiple of 8)  second us 2" in line


def test_without_torch_the_row_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    row, _ = _row(monkeypatch, **CASES[0].peers)
    for name in sdpa.BACKENDS:
        assert "torch" in row[f"no {name}"] and f"{name} us" not in row


def test_decode_has_peers_that_rotate_over_more_than_the_cache_and_little_more():
    for case in CASES:
        assert ("splits" in case.name) == (case.peers is None)
        copies = sdpa._copies(case.nbytes)
        assert copies * case.nbytes > L2_BYTES
        assert copies == 1 or copies == num_copies(case.nbytes)
        assert copies == 1 or copies * case.nbytes <= sdpa._ONE_COPY_BYTES


def _fake_torch(monkeypatch, refuse):
    functional = SimpleNamespace(scaled_dot_product_attention=refuse)
    attention = SimpleNamespace(
        SDPBackend=SimpleNamespace(CUDNN_ATTENTION=1), sdpa_kernel=contextlib.nullcontext
    )
    for name, module in (("attention", attention), ("functional", functional)):
        monkeypatch.setitem(sys.modules, f"torch.nn.{name}", module)
    for name in ("torch", "torch.nn"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())


def test_a_refusal_has_the_reasons_that_torch_warns_of(monkeypatch):
    def refuse(*_, **__):
        for text in (
            "Flash attention kernel not used because: (Triggered internally at a.cpp:1.)",
            "Flash attention has been runtime disabled. (Triggered internally at a.cpp:2.)",
            "cuDNN attention kernel not used because: (Triggered internally at a.cpp:3.)",
            "head_dim should be a multiple of 8 (Triggered internally at a.cpp:4.)",
        ):
            warnings.warn(text, stacklevel=1)
        raise RuntimeError("No available kernel. Aborting execution.")

    _fake_torch(monkeypatch, refuse)
    with pytest.raises(sdpa.RefusedError, match=r"^head_dim should be a multiple of 8$"):
        sdpa.attend("CUDNN_ATTENTION", None, None, None)


def test_only_a_refusal_is_one(monkeypatch):
    errors = [RuntimeError("cuDNN Frontend error: no plan"), RuntimeError("out of memory")]
    _fake_torch(monkeypatch, lambda *_, **__: _raise(errors.pop(0)))
    with pytest.raises(sdpa.RefusedError, match="cuDNN Frontend error: no plan"):
        sdpa.attend("CUDNN_ATTENTION", None, None, None)
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        sdpa.attend("CUDNN_ATTENTION", None, None, None)
    assert raised.type is RuntimeError


def test_time_is_a_calls_share_of_a_graphs():
    launched, recording = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = len(launched)

        def synchronize(self):
            pass

        def elapsed_time(self, stop):
            return 1.0 * (stop.at - self.at)  # ms: one a launch

    @contextlib.contextmanager
    def record_into(graph, stream):
        before = list(launched)
        yield
        recording.extend(launched[len(before) :])
        launched[:] = before

    cuda = SimpleNamespace(
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: launched.extend(recording)),
        graph=record_into,
        Event=Event,
    )
    calls = [lambda i=i: launched.append(i) for i in range(4)]
    assert sdpa.graph_seconds(cuda, calls) == pytest.approx(1e-3)
    assert recording == [0, 1, 2, 3] * 3  # rotating inputs: none is used twice in a row


def test_the_newest_query_needs_no_mask_and_others_see_up_to_themselves():
    torch = pytest.importorskip("torch")
    like = torch.zeros(1, dtype=torch.bfloat16)
    assert sdpa.newest_mask("CUDNN_ATTENTION", 1, 5, like) is None
    mask = sdpa.newest_mask("CUDNN_ATTENTION", 3, 5, like)
    assert mask.dtype == torch.bfloat16
    assert (mask == 0).tolist() == [[j <= 2 + i for j in range(5)] for i in range(3)]
    assert (mask <= 0).all() and (mask[mask < 0] < -9000).all()
