"""Where a Hugging Face tensor lives in the parameter tree: one declaration, used in both directions.

Every difference between the two layouts is a reshape that splits or joins head axes, then a transpose.
Both have exact inverses, so import followed by export gives back the same bytes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TensorMapping:
    """One Hugging Face tensor. `hf` reshaped to `split` and transposed by `order` is the array of the
    tree.
    """

    name: str  # as in the safetensors file
    path: tuple[str, ...]  # keys of the parameter tree
    layer: int | None  # index on the stacked axis L; None for arrays that are not stacked
    hf_shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]

    def to_tree(self, hf: np.ndarray) -> np.ndarray:
        """hf_shape -> this layer's shape in the tree; a view where NumPy can give one."""
        return hf.reshape(self.split).transpose(self.order)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `to_tree`."""
        inverse = tuple(int(i) for i in np.argsort(self.order))
        return array.transpose(inverse).reshape(self.hf_shape)

    def slot(self, params: Any) -> Any:
        """This tensor's part of a parameter tree (of NumPy arrays: a view that can be written through)."""
        leaf = params
        for key in self.path:
            leaf = leaf[key]
        return leaf if self.layer is None else leaf[self.layer]
