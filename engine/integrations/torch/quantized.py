"""Linear layers with a quantized weight: e4m3, int8, or 4 to 8 bits in groups.

A layer holds the arrays of an `engine.weights.Weight` as buffers. All are integers: scales are kept
as their bits, so that `module.half()` or `module.to(torch.bfloat16)` leaves them alone.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from engine import device, kernels
from engine.errors import ContractError, ShapeError
from engine.integrations.torch._core import define, to_autocast_dtype
from engine.integrations.torch._transforms import fold_rows
from engine.layers.linear import PRODUCTS
from engine.weights import Format, Weight, format_of
from engine.weights.formats import TILE_COLUMNS, TILE_ROWS
from engine.weights.quantize import quantize, resolve_format

__all__ = ["QuantizedLinear", "quantize_linears", "quantized_linear"]

_PLANES = ("data", "scales", "high", "super_scales")
_BITS = {torch.float16: torch.int16, torch.float32: torch.int32}  # scales as integers
_CODES = "Tensor data, Tensor scales, Tensor? high, Tensor? super_scales"


def _weight(arrays: tuple[Any, ...], name: str, shape: tuple[int, int]) -> Weight:
    return Weight(format_of(name), shape=shape, **dict(zip(_PLANES, arrays, strict=True)))


def _product(
    x: Any, data: Any, scales: Any, high: Any, supers: Any, bias: Any, name: str, n: int, k: int
) -> Any:
    weight = _weight((data, scales, high, supers), name, (n, k))
    y = PRODUCTS[name].plain(x.reshape(-1, k), weight, bias=bias)
    return y.reshape(*x.shape[:-1], n)


def _dequantized(
    data: Any, scales: Any, high: Any, supers: Any, name: str, n: int, k: int, dtype: str
) -> Any:
    return kernels.dequantize(_weight((data, scales, high, supers), name, (n, k)), dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, *codes, _, ctx.format, ctx.n, ctx.k = inputs
    ctx.dtype = str(x.dtype).removeprefix("torch.")
    ctx.save_for_backward(*codes)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Return dx = dy W, with W dequantized and the rounding of x ignored, and dbias."""
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        dx = dy @ _DEQUANTIZE(*ctx.saved_tensors, ctx.format, ctx.n, ctx.k, ctx.dtype)
    if ctx.needs_input_grad[5]:
        dbias = dy.reshape(-1, ctx.n).sum(0)
    return dx, *(None,) * 4, dbias, *(None,) * 3


_DEQUANTIZE = define(
    f"dequantize({_CODES}, str format, int n, int k, str dtype) -> Tensor",
    _dequantized,
    lambda data, s, h, u, f, n, k, dtype: data.new_empty((n, k), dtype=getattr(torch, dtype)),
)
_LINEAR = define(
    f"quantized_linear(Tensor x, {_CODES}, Tensor? bias, str format, int n, int k) -> Tensor",
    _product,
    lambda x, *rest: x.new_empty((*x.shape[:-1], rest[-2])),
    backward=_backward,
    setup_context=_setup,
    vmap=fold_rows("quantized_linear", 0),
)


def quantized_linear(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    format: str,
    shape: tuple[int, int],
    high: Tensor | None = None,
    super_scales: Tensor | None = None,
) -> Tensor:
    """Return ``x Wᵀ + bias`` for a weight given by its codes.

    Parameters
    ----------
    x : (..., K) tensor of float16 or bfloat16
        On the CPU, and with 8-bit activations ("fp8", "fp8_block", "int8"), also float32. Cast to
        autocast's dtype. Differentiable, with the rounding of activations ignored.
    data, scales, high, super_scales : tensor
        Arrays of `engine.weights.Weight`, without a gradient.
    bias : (N,) tensor, optional
        Cast to x's dtype.
    format : str
        Name of the weight's format.
    shape : (N, K)
        Out and in features.

    Returns
    -------
    y : (..., N) tensor of x's dtype

    Raises
    ------
    ShapeError, DTypeError, ContractError, WeightsError
    """
    if x.shape[-1:] != shape[1:]:
        wanted = f"quantized_linear: x: must have shape (..., {shape[1]})"
        raise ShapeError(f"{wanted}; got {tuple(x.shape)}")
    (x,) = to_autocast_dtype(x)
    bias = None if bias is None else bias.to(x.dtype)
    result: Tensor = _LINEAR(x, data, scales, high, super_scales, bias, format, *shape)
    return result


class QuantizedLinear(torch.nn.Module):
    """Linear layer with a quantized weight; `from_linear` quantizes a `torch.nn.Linear`.

    The weight of a new layer is 0 until a state is loaded. It takes a quarter ("int4") or half (8
    bits) of the bytes of bfloat16, plus scales: 16 bits per group, 32 per row or block.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
        Hold a bias, a parameter as in `torch.nn.Linear`. The weight's codes are buffers.
    format : str
        "fp8" (scales of rows), "fp8_block" (of 128 x 128), "int8"; with 16-bit activations "int4"
        (in groups of 128), "int4_g32", "int4_g128_zp", "int8_g64", "mxfp4", and the other names in
        `engine.weights.quantize.QUANTIZABLE`.
    device, dtype
        Device of the layer, and dtype of the bias.

    Raises
    ------
    WeightsError
        If the format is unknown.

    Examples
    --------
    >>> layer = QuantizedLinear.from_linear(torch.nn.Linear(256, 64), format="int4")
    >>> layer(torch.zeros(3, 256)).shape, layer.num_bytes
    (torch.Size([3, 64]), 8448)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        format: str = "int4",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        form = resolve_format(format)
        self.in_features = in_features
        self.out_features = out_features
        self.format = form.name
        layout = _layout(form, out_features, in_features)
        self._dtypes = {name: kind for name, (_, kind) in layout.items()}
        for name in _PLANES:
            buffer = None
            if name in layout:
                shape, kind = layout[name]
                buffer = torch.zeros(shape, dtype=_BITS.get(kind, kind), device=device)
            self.register_buffer(name, buffer)
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if zeros is None else torch.nn.Parameter(zeros))

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, format: str = "int4") -> QuantizedLinear:
        """Return a layer with the weight of `linear` rounded to `format`, on its device.

        Raises
        ------
        WeightsError
            If the format is unknown, or the weight contains a NaN or an infinity.
        """
        weight = linear.weight
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            format=format,
            device=weight.device,
            dtype=weight.dtype,
        )
        if weight.is_meta:
            return layer
        for name, tensor in _quantized(weight.detach(), format_of(layer.format)).items():
            getattr(layer, name).copy_(tensor.view(getattr(layer, name).dtype))
        if linear.bias is not None:
            with torch.no_grad():
                layer.bias.copy_(linear.bias)
            layer.bias.requires_grad_(linear.bias.requires_grad)
        return layer.train(linear.training)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight: codes, scales and padding."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x Wᵀ + bias``; see `quantized_linear`."""
        planes = self._planes()
        return quantized_linear(
            x,
            planes.pop("data"),
            planes.pop("scales"),
            self.bias,
            format=self.format,
            shape=(self.out_features, self.in_features),
            **planes,
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight (out, in) that the layer multiplies by, rounded to `dtype`."""
        shape = (self.out_features, self.in_features)
        name = str(dtype).removeprefix("torch.")
        result: Tensor = _DEQUANTIZE(*self._planes().values(), self.format, *shape, name)
        return result

    def extra_repr(self) -> str:
        """Return sizes and format, for `repr`."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, format={self.format!r}"

    def _planes(self) -> dict[str, Any]:
        """Return the buffers in the dtypes of `Weight`."""
        views = {name: getattr(self, name).view(kind) for name, kind in self._dtypes.items()}
        return {name: views.get(name) for name in _PLANES}


def quantize_linears(
    module: torch.nn.Module, format: str = "int4", *, skip: Container[str] = ("lm_head",)
) -> torch.nn.Module:
    """Replace every `torch.nn.Linear` below `module` by a `QuantizedLinear`, in place.

    Parameters
    ----------
    module : torch.nn.Module
    format : str
        See `QuantizedLinear`.
    skip : container of str
        Names of layers to leave alone, whole ("model.layers.0.mlp.gate") or the last part.

    Returns
    -------
    torch.nn.Module
        `module` itself.

    Raises
    ------
    ContractError
        If `skip` is a str: put a single name in a tuple.
    WeightsError
        If the format is unknown, or a weight contains a NaN or an infinity.

    Examples
    --------
    >>> quantize_linears(torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.ReLU()), "fp8")
    Sequential(
      (0): QuantizedLinear(in_features=64, out_features=8, bias=True, format='fp8')
      (1): ReLU()
    )
    """
    if isinstance(skip, str):  # `in` would find parts of the name
        raise ContractError(f"quantize_linears: skip: must be a tuple of names; got {skip!r}")
    made: dict[torch.nn.Module, QuantizedLinear] = {}  # modules may share a layer
    for name, child in list(module.named_modules(remove_duplicate=False)):
        last = name.rpartition(".")[2]
        if type(child) is not torch.nn.Linear or not name or name in skip or last in skip:
            continue
        if child not in made:
            made[child] = QuantizedLinear.from_linear(child, format)
        setattr(module.get_submodule(name.rpartition(".")[0]), last, made[child])
    return module


def _layout(form: Format, n: int, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each array that `quantize` returns for a weight (N, K)."""
    if not form.is_packed:
        assert form.block is not None
        high, wide = form.block
        blocks = (-(-n // high), *([-(-k // wide)] if wide else []))
        codes = torch.int8 if form.code == "int" else torch.uint8
        return {"data": ((n, k), codes), "scales": (blocks, torch.float32)}
    high = -(-n // TILE_ROWS)
    wide = -(-k // TILE_COLUMNS)
    last = (2,) if form.offset else ()
    bytes_per_tile = TILE_ROWS * TILE_COLUMNS * (8 if form.bits == 8 else 4) // 8
    scales = torch.int8 if form.super_block else torch.float16
    scales = torch.uint8 if form.code == "e2m1" else scales
    groups = -(-wide * TILE_COLUMNS // form.group)
    layout: dict[str, Any] = {
        "data": ((high, wide, bytes_per_tile), torch.uint8),
        "scales": ((high, groups, 8, 2, *last), scales),
    }
    if form.bits == 6:
        layout["high"] = ((high, wide, TILE_ROWS * TILE_COLUMNS // 4), torch.uint8)
    if form.super_block:
        supers = -(-k // form.super_block)
        layout["super_scales"] = ((high, supers, 8, 2, *last), torch.float16)
    return layout


def _quantized(weight: Tensor, form: Format) -> dict[str, Tensor]:
    """Return the arrays of the rounded weight: NumPy's on the CPU, CuPy's copied from the GPU."""
    if not weight.is_cuda:
        made = quantize(weight.float().numpy(), form)
        return {name: torch.from_numpy(array) for name, array in made.arrays()}
    cupy = device.cupy()
    current = _Stream(torch.cuda.current_stream(weight.device).cuda_stream)
    with cupy.cuda.Device(weight.get_device()), cupy.cuda.Stream.from_external(current):
        made = quantize(cupy.from_dlpack(weight.float().contiguous()), form)
        return {name: torch.from_dlpack(array).clone() for name, array in made.arrays()}


class _Stream:
    """A stream of torch's as the CUDA stream protocol passes it, which older ones lack."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer
