"""What happens to the bytes of a tensor on their way between layouts: transposes, rotary row order, factors,
casts, the check for NaN. Pure functions over NumPy arrays of some rows of a Hugging Face tensor, sized so
that the caller can work through a checkpoint piece by piece.

NumPy's own transposing copy walks one side with a stride of whole rows and is some ten times slower than
memory; here it is done by tiles. bfloat16 is looked at as integers where that is faster and the same.
"""

import ml_dtypes
import numpy as np

from burnish.checkpoints.maxtext_map import Factor, Item

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_CACHE_BYTES = 1 << 15  # rows of a tile together, so that each cache line is read once
_TILE_COLUMNS = 1024
_CHUNK = 1 << 16


def to_leaf(item: Item, rows: np.ndarray) -> np.ndarray:
    """Whole-index rows of a Hugging Face tensor (r, …), of a fused one the item's half (r, R / 2, C), as the
    leaf has them: the shape of the item, with r / rows_per_index on its row axis."""
    shape = _leaf_shape(item, len(rows))
    if item.rope:
        N = item.rows_per_index
        rows = np.ascontiguousarray(rows.reshape(-1, 2, N // 2, rows.shape[-1]).swapaxes(1, 2))
        rows = rows.reshape(-1, rows.shape[-1])
    array = (transposed(rows) if item.transpose else rows).reshape(shape)
    if item.factor is not None:
        array = _times(array, item.factor.times)
    if item.shift:
        array = _plus(array, item.shift)
    return array


def to_hf(item: Item, array: np.ndarray) -> np.ndarray:
    """The inverse of `to_leaf`."""
    rows = array.shape[item.row_axis] * item.rows_per_index
    if item.shift:
        array = _plus(array, -item.shift)
    if item.factor is not None:
        array = _restored(array, item.factor)
    if not item.transpose:
        return array.reshape(rows, *item.hf_shape[1:])
    if item.batched:
        return transposed(array)
    hf = transposed(array.reshape(item.hf_shape[1], rows))
    if item.rope:
        N, D = item.rows_per_index, item.hf_shape[1]
        hf = np.ascontiguousarray(hf.reshape(-1, N // 2, 2, D).swapaxes(1, 2)).reshape(rows, D)
    return hf


def _leaf_shape(item: Item, rows: int) -> tuple[int, ...]:
    axis = item.row_axis
    return (*item.shape[:axis], rows // item.rows_per_index, *item.shape[axis + 1 :])


def transposed(a: np.ndarray) -> np.ndarray:
    """A contiguous copy of (…, R, C) as (…, C, R)."""
    *batch, R, C = a.shape
    out = np.empty((*batch, C, R), a.dtype)
    # Plain integers of the same width: NumPy copies bfloat16 through a slower path.
    integer = np.dtype(f"u{a.dtype.itemsize}")
    source, target = a.reshape(-1, R, C).view(integer), out.reshape(-1, C, R).view(integer)
    height = min(256, max(16, _CACHE_BYTES // (C * a.itemsize)))
    for matrix, result in zip(source, target, strict=True):
        for r in range(0, R, height):
            for c in range(0, C, _TILE_COLUMNS):
                result[c : c + _TILE_COLUMNS, r : r + height] = matrix[r : r + height, c : c + _TILE_COLUMNS].T
    return out


def cast(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`a` in `dtype`, rounded to nearest even; overflow becomes infinity."""
    if a.dtype == dtype:
        return a
    with np.errstate(over="ignore"):
        return a.astype(dtype)


def is_finite(a: np.ndarray) -> bool:
    """Whether no element of a float32, float16 or bfloat16 array is NaN or infinite."""
    exponent = {np.dtype(np.float32): 0x7F800000, np.dtype(np.float16): 0x7C00, BFLOAT16: 0x7F80}[a.dtype]
    flat = np.ascontiguousarray(a).reshape(-1).view(f"u{a.dtype.itemsize}")
    no_sign = flat.dtype.type(np.iinfo(flat.dtype).max >> 1)
    return all(int(np.bitwise_and(flat[i : i + _CHUNK], no_sign).max()) < exponent for i in range(0, flat.size, _CHUNK))


def _times(a: np.ndarray, factor: float) -> np.ndarray:
    return _in_float32(np.multiply, a, factor)


def _restored(a: np.ndarray, factor: Factor) -> np.ndarray:
    if factor.back_times is not None:
        return _times(a, factor.back_times)
    return _in_float32(np.divide, a, factor.times)


def _plus(a: np.ndarray, shift: float) -> np.ndarray:
    return _in_float32(np.add, a, shift)


def _in_float32(operation: np.ufunc, a: np.ndarray, operand: float) -> np.ndarray:
    """The operation in float32, rounded to the dtype of `a`, a few thousand elements at a time."""
    out = np.empty_like(a)
    operation(a, np.float32(operand), out=out, dtype=np.float32, casting="unsafe")
    return out
