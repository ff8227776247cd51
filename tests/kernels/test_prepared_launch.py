"""The driver's launches, outside what every kernel's test launches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engine import kernels
from engine.device import to_numpy
from engine.kernels._prepared_call import ArrayLayout, prepare
from engine.testing import cases


@pytest.mark.gpu
def test_the_first_cuda_call_of_a_thread_is_a_launch(cp):
    """Such a thread has no context yet: torch's autograd engine starts threads like that."""
    x = cases.normal((4, 64), "float32", seed=1)
    arrays = [cp.asarray(x), cp.full(x.shape, np.nan, x.dtype)]
    call = prepare(kernels.silu, [ArrayLayout.contiguous(x.shape, x.dtype)])
    stream = cp.cuda.get_current_stream()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call.run, [array.data.ptr for array in arrays], stream.ptr).result()
    np.testing.assert_allclose(to_numpy(arrays[1]), kernels.silu(x), rtol=1e-5, atol=1e-6)
