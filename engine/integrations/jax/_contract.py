"""The contract of an op while JAX traces it: shapes and dtypes are known, values are not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

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
        """Check an array of any integer dtype and return it as int32.

        Ids that int32 does not hold stay outside any table: -1, or the largest int32.
        """
        self._check_array(name, value)
        if not jnp.issubdtype(value.dtype, jnp.integer):
            raise DTypeError(f"{self.op}: {name}: must be integers; got {value.dtype}")
        # NumPy clamps a NumPy array, since jnp.asarray may cut an int64 to int32.
        xp = jnp if isinstance(value, jax.Array) else np
        limits = np.iinfo(INT32)
        if jnp.iinfo(value.dtype).max > limits.max:
            value = xp.minimum(value, limits.max)
        if jnp.iinfo(value.dtype).min < limits.min:
            value = xp.where(value < limits.min, -1, value)
        return self.array(name, jnp.asarray(value.astype(INT32)), shape, INT32)

    def _as_array(self, name: str, value: Any) -> Any:
        self._check_array(name, value)
        return _gathered(jnp.asarray(value))

    def _check_array(self, name: str, value: Any) -> None:
        if not isinstance(value, jax.Array | np.ndarray | np.generic):
            raise DTypeError(f"{self.op}: {name}: must be an array; got {type(value).__name__}")

    def _check_module(self, name: str, array: Any) -> None:
        """JAX places the arrays of a call on one device itself."""


def _gathered(array: Any) -> Any:
    """Return an array whole on each device, if its type divides it among explicit mesh axes.

    XLA gathers arrays of other meshes itself, since it cannot partition the operations.
    """
    sharding = jax.typeof(array).sharding
    if all(axis is None for axis in sharding.spec):
        return array
    whole = PartitionSpec(*(None for _ in sharding.spec))
    return jax.sharding.reshard(array, jax.NamedSharding(sharding.mesh, whole))
