"""Least squares without negative parts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def least_squares(rows: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Fit ``rows @ x = seconds`` with relative errors and no negative part.

    Columns with a negative part are left out, the most negative first.
    """
    table = np.array(rows) / np.array(seconds)[:, None]
    used = list(range(table.shape[1]))
    result = [0.0] * table.shape[1]
    while used:
        found = np.linalg.lstsq(table[:, used], np.ones(len(rows)), rcond=None)[0]
        if found.min() >= 0:
            for place, value in zip(used, found, strict=True):
                result[place] = float(value)
            break
        used.pop(int(found.argmin()))
    return result
