"""Skinny GEMM on the CPU: few rows times a large matrix, blocked and multithreaded."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from engine import threads
from engine.kernels import gemm
from engine.kernels._cpu import few_rows


def operands(num_rows, shape=(1037, 576), seed=0):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal(shape, dtype=np.float32)
    return rng.standard_normal((num_rows, shape[1]), dtype=np.float32), matrix


@pytest.mark.parametrize("shape", [(1037, 576), (96, 4096), (8, 40000), (3, 100000), (300, 7)])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 16])
def test_it_is_the_product(num_rows, shape):
    x, matrix = operands(num_rows, shape)
    y = few_rows.multiply_few_rows(x, matrix)
    right = x.astype(np.float64) @ matrix.T.astype(np.float64)
    assert y.dtype == np.float32 and y.flags.c_contiguous
    np.testing.assert_allclose(y, right, rtol=0, atol=2e-6 * np.sqrt(shape[1]) * 40)


def test_the_bits_do_not_depend_on_the_threads(monkeypatch):
    x, matrix = operands(8, (4001, 576))
    results = []
    for count in (1, 2, 3, 5):
        monkeypatch.setattr(threads, "count", lambda count=count: count)
        results.append(few_rows.multiply_few_rows(x, matrix))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_several_threads_may_multiply_at_once():
    x, matrix = operands(4)
    right, wrong = few_rows.multiply_few_rows(x, matrix), []

    def work():
        for _ in range(20):
            if not np.array_equal(few_rows.multiply_few_rows(x, matrix), right):
                wrong.append(1)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_gemm_uses_it_where_it_pays(monkeypatch):
    calls = []
    multiply = few_rows.multiply_few_rows
    monkeypatch.setattr(few_rows, "cpu_features", lambda: {"AVX512_SKX"})
    monkeypatch.setattr(
        few_rows, "multiply_few_rows", lambda x, w: calls.append(len(x)) or multiply(x, w)
    )
    for num_rows in (1, 2, 16, 17):
        x, matrix = operands(num_rows)
        y = gemm(x, matrix)
        np.testing.assert_allclose(y, x @ matrix.T, rtol=0, atol=1e-3)
    gemm(*operands(4, (64, 64)))  # small
    gemm(*operands(4), deterministic=True)
    assert calls == [2, 16]
    x, matrix = operands(4)
    assert few_rows.pays(x, matrix)
    assert not few_rows.pays(x, np.asfortranarray(matrix))  # rows are not contiguous
    assert not few_rows.pays(x.astype(np.float16), matrix.astype(np.float16))
