"""`python -m tests.bench.fit_scaling`: fit the constants of `engine.scaling` by least squares.

Errors are differences of log time at all measured points (`scaling_points`); the unknowns are
logarithms too. A weak pull towards the current constants fixes those that no point determines.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engine.scaling import NCCL, OURS, Collective, Constants, find_card
from tests.bench.scaling_points import UNFITTED, Point, collective_points, measured_points

__all__ = ["FITTED", "best_us", "fit", "fit_collectives"]

FITTED = (
    *("read", "read_codes", "read_packed", "read_super", "read_experts", "read_expert_codes"),
    *("read_packed_experts", "read_page_codes", "tensor_16", "tensor_8", "tensor_packed"),
    *("tensor_experts", "packed_tile", "super_tile", "packed_rows"),
    *("launch_us", "elementwise_us", "sequence_us", "route_us"),
)  # fmt: skip
"""Names of the constants to fit; the others are kept."""

_WEIGHTS = {"one request": 2.0}  # error weight by group; default 1
_PULL = 0.03  # weight of a constant's change relative to a point's error
_STEPS, _DELTA, _LONGEST = 8, 1e-4, 0.3


def _least_squares(errors: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """Minimise the sum of squared errors with Gauss-Newton steps; return the logarithms."""
    logs = start.copy()
    for _ in range(_STEPS):
        here = errors(logs)
        slopes = np.empty((len(here), len(logs)))
        for column in range(len(logs)):
            moved = logs.copy()
            moved[column] += _DELTA
            slopes[:, column] = (errors(moved) - here) / _DELTA
        system = np.vstack([slopes, _PULL * np.eye(len(logs))])
        right = np.concatenate([-here, _PULL * (start - logs)])
        step = np.linalg.lstsq(system, right, rcond=None)[0]
        logs += np.clip(step, -_LONGEST, _LONGEST)
    return logs


def fit(points: list[Point], start: Constants) -> Constants:
    """Return the constants of the step-time model."""

    def with_logs(logs: np.ndarray) -> Constants:
        values = {name: float(np.exp(log)) for name, log in zip(FITTED, logs, strict=True)}
        return replace(start, **values)

    def errors(logs: np.ndarray) -> np.ndarray:
        constants = with_logs(logs)
        found = [_WEIGHTS.get(p.group, 1.0) * math.log1p(p.error(constants)) for p in points]
        return np.array(found)

    return with_logs(_least_squares(errors, np.log([getattr(start, name) for name in FITTED])))


def fit_collectives(
    points: list[tuple[int, float]], ways: tuple[Collective, ...], link_rate: float
) -> tuple[Collective, ...]:
    """Fit latency and bandwidth of each all-reduce algorithm to points (bytes, us) on two GPUs."""

    def with_logs(logs: np.ndarray) -> tuple[Collective, ...]:
        values = np.exp(logs).reshape(-1, 2).tolist()
        return tuple(
            replace(way, latency_us=us, link_share=share)
            for way, (us, share) in zip(ways, values, strict=True)
        )

    def errors(logs: np.ndarray) -> np.ndarray:
        found = with_logs(logs)
        return np.array([math.log(best_us(found, size, link_rate) / us) for size, us in points])

    start = np.log([number for way in ways for number in (way.latency_us, way.link_share)])
    return with_logs(_least_squares(errors, start))


def best_us(ways: tuple[Collective, ...], num_bytes: float, link_rate: float) -> float:
    """Return the time of an all-reduce over two GPUs with the fastest algorithm."""
    return min(way.us(num_bytes, 2, link_rate) for way in ways)


def _print_collectives() -> None:
    for whose, start in (("ours", OURS), ("NCCL", NCCL)):
        points, link_rate = collective_points(whose), find_card("h200").link_rate
        ways = fit_collectives(points, start, link_rate)
        for way in ways:
            print(f"    {whose}, {way.name}: latency_us {way.latency_us:.3g}, "
                  f"link_share {way.link_share:.3g}")  # fmt: skip
        for size, us in points:
            found = best_us(ways, size, link_rate)
            error = 100 * (found / us - 1)
            print(f"    {size:>10,} bytes: {us:7.1f} us, {found:7.1f}, {error:+.1f} %")


def left_out_errors(points: list[Point], start: Constants, folds: int) -> list[float]:
    """Return each point's cross-validation error: constants fitted to the other folds."""
    errors: dict[int, float] = {}
    for fold in range(folds):
        mine = range(fold, len(points), folds)
        found = fit([p for index, p in enumerate(points) if index not in mine], start)
        errors |= {index: points[index].error(found) for index in mine}
    return [errors[index] for index in range(len(points))]


def main() -> None:
    """Print the constants and every point's error."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fit_scaling")
    parser.add_argument("--folds", type=int, help="instead, errors of points left out of the fit")
    folds = parser.parse_args().folds
    start = Constants()
    points = [point for point in measured_points() if point.group not in UNFITTED]
    if folds is not None:
        errors = left_out_errors(points, start, folds)
        for point, error in zip(points, errors, strict=True):
            print(f"{point.group:15} {point.case:58} {100 * error:+6.1f} %")
        sizes = np.abs(errors)
        print(f"mean {100 * sizes.mean():.1f} %, largest {100 * sizes.max():.1f} %")
        return
    _print_collectives()
    found = fit(points, start)
    for name in FITTED:
        print(f"    {name}: float = {getattr(found, name):.3g}  # was {getattr(start, name):.3g}")
    for point in points:
        predicted = point.predict(found)
        print(f"{point.group:15} {point.case:58} {point.measured:10.4g} {predicted:10.4g} "
              f"{point.unit:9} {100 * point.error(found):+6.1f} % of time "
              f"(before {100 * point.error(start):+.1f})")  # fmt: skip
    errors = np.abs([point.error(found) for point in points])
    print(f"mean {100 * errors.mean():.1f} %, largest {100 * errors.max():.1f} %")


if __name__ == "__main__":
    main()
