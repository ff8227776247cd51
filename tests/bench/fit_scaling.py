"""`python -m tests.bench.fit_scaling`: find the constants of `engine.scaling` by least squares.

The errors are those of the logarithms of the times of all measured points (`scaling_points`); the
unknowns are logarithms, too. A weak pull to the present constants decides what no point tells.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from engine.scaling import Constants
from tests.bench.scaling_points import Point, measured_points

__all__ = ["FITTED", "fit"]

FITTED = (
    *("read", "read_codes", "read_packed", "read_super", "read_experts", "read_expert_codes"),
    *("read_page_codes", "tensor_16", "tensor_8", "tensor_packed", "packed_tile", "super_tile"),
    *("packed_rows", "launch_us", "elementwise_us", "sequence_us", "route_us", "step_us"),
)  # fmt: skip
"""Names of the constants that are fitted; the others are measured by themselves."""

_PULL = 0.03  # weight of a constant's change beside a point's error
_WEIGHTS = {"one request": 2.0}  # of an error; other groups: 1
_STEPS, _DELTA = 8, 1e-4


def _with(constants: Constants, logs: np.ndarray) -> Constants:
    values = {name: float(np.exp(log)) for name, log in zip(FITTED, logs, strict=True)}
    return replace(constants, **values)


def _errors(points: list[Point], constants: Constants) -> np.ndarray:
    weights = [_WEIGHTS.get(point.group, 1.0) for point in points]
    return np.array(
        [w * math.log1p(p.error(constants)) for w, p in zip(weights, points, strict=True)]
    )


def fit(points: list[Point], start: Constants) -> Constants:
    """Return the constants with the least sum of squared errors, by Gauss-Newton steps."""
    first = np.log([getattr(start, name) for name in FITTED])
    logs = first.copy()
    for _ in range(_STEPS):
        errors = _errors(points, _with(start, logs))
        slopes = np.empty((len(points), len(FITTED)))
        for column in range(len(FITTED)):
            moved = logs.copy()
            moved[column] += _DELTA
            slopes[:, column] = (_errors(points, _with(start, moved)) - errors) / _DELTA
        system = np.vstack([slopes, _PULL * np.eye(len(FITTED))])
        right = np.concatenate([-errors, _PULL * (first - logs)])
        logs += np.clip(np.linalg.lstsq(system, right, rcond=None)[0], -0.3, 0.3)
    return _with(start, logs)


def main() -> None:
    """Print the constants and every point's error with them."""
    points, start = measured_points(), Constants()
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
