"""Fixtures of the tests beside other frameworks. Each file skips where its framework is missing."""

import gc

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request):
    """A torch device: the mirrors on the CPU, the kernels on a GPU."""
    return request.param


@pytest.fixture(autouse=True)
def needs_gpu(request):
    """Skip a test marked `gpu` where there is no GPU; free what earlier tests have left.

    A collection within a capture would free their memory and so invalidate the capture.
    """
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("cp")
        gc.collect()
