"""The contract of an op while JAX traces it: shapes and dtypes are known, values are not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.errors import DTypeError
from engine.kernels._contract import INT32, Contract

__all__ = ["TraceContract"]


class TraceContract(Contract):
    """A `Contract` of JAX's arrays and tracers; see `array` and `integers`."""

    __slots__ = ()

    def __init__(self, op: str) -> None:
        super().__init__(op)
        self.xp = np  # allows float64 where the mirror has it; lowering for CUDA rejects it

    def array(self, name: str, value: Any, shape: str, dtype: Any, *, layout: str = "any") -> Any:
        """Check an argument and return it as JAX's array. See `Contract.array`."""
        return super().array(name, value, shape, dtype, layout=layout)

    def integers(self, name: str, value: Any, shape: str) -> Any:
        """Check an array of any integer dtype and return it as int32."""
        array = self._as_array(name, value)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise DTypeError(f"{self.op}: {name}: must be integers; got {array.dtype}")
        return self.array(name, array.astype(INT32), shape, INT32)

    def _as_array(self, name: str, value: Any) -> Any:
        if not isinstance(value, jax.Array | np.ndarray | np.generic):
            raise DTypeError(f"{self.op}: {name}: must be an array; got {type(value).__name__}")
        return jnp.asarray(value)

    def _check_module(self, name: str, array: Any) -> None:
        """JAX places the arrays of a call on one device itself."""
