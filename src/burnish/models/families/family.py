"""What a family is: everything that differs between model families, as one value."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from burnish.models.families.tensors import TensorMapping
from burnish.models.spec import ModelSpec


@dataclass(frozen=True)
class Family:
    """One family of models. docs/guides/new-model.md shows how to write one."""

    model_types: tuple[str, ...]
    """Values of model_type in config.json that it reads; a ModelSpec's `family` is one of them."""

    spec_from_hf: Callable[[Mapping[str, Any]], ModelSpec]
    """config.json -> ModelSpec. Raises ModelError naming the field that cannot be honoured."""

    tensor_map: Callable[[ModelSpec], list[TensorMapping]]
    """Every tensor of the checkpoint, in file order, and its place in the tree."""

    left_out: re.Pattern[str] | None = None
    """Names of tensors that a checkpoint may hold and that are not read: vision and audio towers."""

    text_only: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Model types that are multimodal -> (model type, architecture) of their text part as a model of its own."""

    presets: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The config.json of published models, by the names that model_name takes."""
