"""Arrays of every dtype, with the values that are easily lost on the way."""

from __future__ import annotations

import ml_dtypes
import numpy as np

INTS = [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]


def arrays() -> dict[str, np.ndarray]:
    """By dtype, of shape [2, 3]."""
    found = {
        "BOOL": np.array([[True, False, True], [False, False, True]]),
        "FP16": np.array([[0.1, -0.0, 65504], [6e-8, 1 / 3, -1]], np.float16),
        "FP32": np.array([[0.1, -0.0, 3.4e38], [1e-45, 1 / 3, -1]], np.float32),
        "FP64": np.array([[0.1, -0.0, 1.7e308], [5e-324, 1 / 3, -1]], np.float64),
        "BF16": np.array([[1.5, -0.0, 2.0], [0.0078125, -3.0, 1e30]], ml_dtypes.bfloat16),
        "BYTES": np.array([[b"", b"a\x00b", "grün".encode()], [b"\xff\xfe", b"x" * 300, b"last"]], dtype=np.object_),
    }
    for dtype in INTS:
        info = np.iinfo(dtype.lower())
        found[dtype] = np.array([[info.min, 0, info.max], [1, info.max - 1, 7]], dtype.lower())
    return found


def same(left: np.ndarray, right: np.ndarray) -> bool:
    """Every bit."""
    if left.dtype == np.object_:
        return left.shape == right.shape and [bytes(x) for x in left.ravel()] == [bytes(x) for x in right.ravel()]
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
