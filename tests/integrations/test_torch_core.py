"""Operators of `torch.library`: registration, streams, memory, graphs, views and errors."""

from __future__ import annotations

import copy
import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from engine import kernels  # noqa: E402
from engine.errors import ConfigError  # noqa: E402
from engine.integrations import torch as ops  # noqa: E402

F = torch.nn.functional


def _values(*shape, where, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(where, dtype)


def _close(got, want, tolerance=2e-6):
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


def test_a_view_gives_the_values_of_its_copy(where):
    wide = _values(3, 5, 96, where=where)
    weight = _values(32, where=where, seed=1)
    for view in (
        wide[..., 8:40],
        wide[:, ::2, :32],
        wide.transpose(0, 1)[..., 64:],
        wide[:0, :, :32],
    ):
        _close(ops.rmsnorm(view, weight), F.rms_norm(view, (32,), weight, 1e-6))
        _close(ops.swiglu(view), F.silu(view[..., :16]) * view[..., 16:])


def test_a_call_with_other_values_and_addresses_uses_them(where):
    """The launches are prepared once; each later call passes its own addresses."""
    for seed in range(4):
        x = _values(7, 64, where=where, seed=seed)
        weight = _values(64, where=where, seed=10 + seed)
        _close(ops.rmsnorm(x, weight), F.rms_norm(x, (64,), weight, 1e-6))


@pytest.mark.parametrize("skipped", [1, 2, 3])
def test_an_address_that_is_no_multiple_of_16_bytes(where, skipped):
    x = _values(7 * 64 + skipped, where=where)[skipped:].view(7, 64)
    weight = _values(64 + skipped, where=where, seed=1)[skipped:]
    _close(ops.rmsnorm(x, weight), F.rms_norm(x, (64,), weight, 1e-6))
    _close(ops.swiglu(x), F.silu(x[:, :32]) * x[:, 32:])


def test_options_are_part_of_a_call(where):
    x = _values(2, 64, where=where)
    weight = _values(64, where=where, seed=1)
    for eps in (0.0, 1e-6, 0.5):
        for offset in (0.0, 1.0):
            want = F.rms_norm(x, (64,), weight + offset, eps)
            _close(ops.rmsnorm(x, weight, eps, weight_offset=offset), want)


def test_compile_makes_one_graph(where):
    x = _values(4, 64, where=where)
    weight = _values(32, where=where, seed=1)

    def layer(x):
        return ops.rmsnorm(ops.swiglu(x), weight) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    _close(compiled(x), layer(x))
    _close(compiled(_values(9, 64, where=where)), layer(_values(9, 64, where=where)))


def test_vmap_folds_the_mapped_axis(where):
    x = _values(3, 4, 6, 32, where=where)
    weights = _values(4, 32, where=where, seed=1)
    _close(torch.vmap(ops.swiglu, 1, 1)(x), ops.swiglu(x))
    got = torch.vmap(ops.rmsnorm, (1, 0), 1)(x, weights)
    _close(got, F.rms_norm(x, (32,), None, 1e-6) * weights[:, None])


def test_another_dtype_of_the_weight_is_cast(where):
    x = _values(3, 64, where=where, dtype=torch.bfloat16)
    weight = _values(64, where=where, seed=1)
    assert ops.rmsnorm(x, weight).dtype == torch.bfloat16
    assert torch.equal(ops.rmsnorm(x, weight), ops.rmsnorm(x, weight.bfloat16()))


def test_bad_input_names_the_argument(where):
    x = _values(3, 64, where=where)
    with pytest.raises(
        ValueError, match=r"rmsnorm: weight: must have shape \(N,\); N = 64 from x; got"
    ):
        ops.rmsnorm(x, _values(63, where=where))
    with pytest.raises(TypeError, match=r"rmsnorm: x: must be float32 .*; got int64"):
        ops.rmsnorm(x.long(), x[0].long())
    _close(ops.rmsnorm(x, x[0]), F.rms_norm(x, (64,), x[0], 1e-6))  # later calls go on


def test_a_list_or_a_complex_tensor_is_an_error_that_names_the_argument(where):
    with pytest.raises(RuntimeError, match="'Tensor' for argument 'x'"):
        ops.swiglu([1.0, 2.0])
    with pytest.raises(TypeError, match=r"swiglu: x: must be float32 .*; got complex64"):
        ops.swiglu(torch.ones(2, 4, dtype=torch.complex64, device=where))


def test_no_axes(where):
    x = torch.tensor(2.0, device=where, requires_grad=True)
    y = ops.silu(x)
    assert y.shape == ()
    _close(y.detach(), F.silu(x.detach()))
    assert torch.autograd.grad(y, x)[0].shape == ()


def test_a_negated_view(where):
    """Its memory holds the negative of its values."""
    x = torch.complex(_values(3, 8, where=where), _values(3, 8, where=where, seed=1)).conj().imag
    assert x.is_neg()
    _close(ops.silu(x), F.silu(x.resolve_neg()))


def test_meta_tensors():
    q = torch.empty(2, 3, 4, 8, device="meta")
    assert ops.attention(q, q, q).is_meta
    assert ops.linear_cross_entropy(q[0, 0], q[0, 0], torch.zeros(4, device="meta").long()).is_meta
    with pytest.raises(ValueError, match="must be on one device; got cpu and meta"):
        ops.rmsnorm(torch.ones(3, 8), torch.ones(8, device="meta"))


@pytest.mark.gpu
def test_tensors_of_two_devices_are_an_error():
    x = _values(3, 64, where="cuda")
    with pytest.raises((ValueError, RuntimeError), match="device"):
        ops.rmsnorm(x, torch.ones(64))


@pytest.mark.gpu
def test_the_current_stream_is_used():
    """A kernel on another stream would read x before the slow product has written it."""
    weight = torch.ones(4096, device="cuda")
    side = torch.cuda.Stream()
    big = torch.randn(8192, 8192, device="cuda")
    with torch.cuda.stream(side):
        x = (big @ big)[:, :4096]
        got = ops.rmsnorm(x, weight)
    side.synchronize()
    torch.testing.assert_close(got, F.rms_norm(x, (4096,), weight, 1e-6), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_call():
    """Also if the first call of this layout is made during the capture."""
    x = torch.randn(5, 640, device="cuda")
    weight = torch.randn(640, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.rmsnorm(x, weight, 3e-5)
    for _ in range(2):
        x.normal_()
        graph.replay()
        _close(got, F.rms_norm(x, (640,), weight, 3e-5))


@pytest.mark.gpu
def test_memory_comes_from_torch():
    import cupy

    x = torch.randn(4096, 4096, device="cuda")
    weight = torch.ones(4096, device="cuda")
    ops.rmsnorm(x, weight)
    before = cupy.get_default_memory_pool().total_bytes()
    allocated = torch.cuda.memory_allocated()
    kept = [ops.rmsnorm(x, weight) for _ in range(4)]
    assert cupy.get_default_memory_pool().total_bytes() == before
    assert torch.cuda.memory_allocated() - allocated == sum(y.nbytes for y in kept)


def _zeros():
    return kernels.define(
        name="zeros",
        signature="x: (T, N) float -> (T, N) like x",
        reference=lambda x: 0 * x,
        source="""
extern "C" __global__ void zeros(const scalar_t* x, scalar_t* out, int64_t T, int64_t N) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < T * N) out[i] = from_float<scalar_t>(0.0f);
}
""",
        launch=lambda call: call.grid1d(call["T"] * call["N"], 256),
    )


def test_an_override_holds_in_its_block(where):
    x = _values(3, 64, where=where)
    zeros = _zeros()
    for _ in range(2):
        _close(ops.silu(x), F.silu(x))
        with kernels.override("silu", zeros):
            assert not ops.silu(x).any()


@pytest.mark.gpu
def test_cuda_tensors_need_an_op_as_override():
    x = _values(3, 64, where="cuda")
    with (
        kernels.override("silu", lambda x: x * 2),
        pytest.raises(ConfigError, match=r"override of CUDA tensors must be an op .* for silu"),
    ):
        ops.silu(x)
    _close(ops.silu(x), F.silu(x))


def test_threads_have_calls_of_their_own(where):
    x = [_values(6, 64, where=where, seed=i) for i in range(4)]
    weight = torch.ones(64, device=where)
    wrong = []

    def work(i):
        for _ in range(50):
            got = ops.rmsnorm(x[i], weight)
            if not torch.allclose(got, F.rms_norm(x[i], (64,), weight, 1e-6), atol=1e-5):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_module_that_calls_an_op_is_copied_and_saved(where):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.Parameter(torch.randn(64))

        def forward(self, x):
            return ops.rmsnorm(x, self.norm)

    block = Block().to(where)
    x = _values(2, 64, where=where)
    twin = copy.deepcopy(block)
    other = Block().to(where)
    other.load_state_dict(block.state_dict())
    with torch.no_grad():
        _close(twin(x), block(x))
        _close(other(x), block(x))
