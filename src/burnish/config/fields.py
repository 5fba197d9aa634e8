"""How an option is declared: a pydantic field with one sentence of meaning, a unit, and its range in words.

The words are made from the same constraints that pydantic checks, so that an error message, `--help` and
docs/options.md cannot say anything else than what is enforced.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import annotated_types as at
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, PydanticUndefined, core_schema

SECTIONS = (
    "Plan",
    "Job",
    "Hosts",
    "Environment",
    "Ends and restarts",
    "Cluster objects",
    "Pathways",
    "Cluster",
    "Machine",
    "Network",
    "Where",
    "Prompts",
    "Model",
    "Export",
    "Conversion",
    "Run",
    "Fine-tuning",
    "Data",
    "Lengths",
    "Steps",
    "Algorithm",
    "Sampling",
    "Engine",
    "Rewards",
    "Tags",
    "Evaluation",
    "Optimizer",
    "Compute",
    "Devices and other engines",
    "Output",
)


class Options(BaseModel):
    """Base of every group of options. `section` is the heading under which help and docs show its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)
    section: ClassVar[str] = ""


def option(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    default_words: str = "",
    short: str = "",
    repeatable: bool = False,
    **constraints: Any,
) -> Any:
    """A field. `meaning` is one sentence without its full stop; `default_words` says a default that is
    computed; `short` is its letter (-f); what a `repeatable` list or mapping is given several times adds up;
    `constraints` are pydantic's (ge, gt, le, lt, default_factory)."""
    extra: dict[str, Any] = {
        "unit": unit,
        "default_words": default_words,
        "short": short,
        "repeatable": repeatable,
    }
    if "default_factory" not in constraints:
        constraints["default"] = default
    return Field(description=meaning, json_schema_extra=extra, **constraints)


@dataclass(frozen=True)
class Allowed:
    """A range that pydantic has no word for, such as "-1 or at least 1"."""

    words: str
    test: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def check(value: Any) -> Any:
            if not self.test(value):
                raise PydanticCustomError("not_allowed", "not allowed")
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))


@dataclass(frozen=True)
class OneDevice:
    """An option whose subject this version does not have: it takes the values that ask for what happens
    anyway on one device with the built-in engine, and refuses every other one instead of ignoring it.

    `accepted` lists those values (None in it means null; an empty tuple: every value of the type, all mean
    the same here).
    """

    accepted: tuple[Any, ...]
    why: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        def check(value: Any) -> Any:
            if self.accepted and value not in self.accepted:
                raise PydanticCustomError("not_supported_yet", "not supported yet")
            return value

        return core_schema.no_info_after_validator_function(check, handler(source))

    @property
    def words(self) -> str:
        return " or ".join(value_words(value) for value in self.accepted)


# -1 stands for "all of them" in MaxText's names.
AllOrCount = Annotated[int, Allowed("-1 or at least 1", lambda n: n == -1 or n >= 1)]
TestCount = Annotated[int, Allowed("-1 or at least 0", lambda n: n >= -1)]


@dataclass(frozen=True)
class OptionInfo:
    """One option as help, docs and error messages need it."""

    name: str  # dotted, as on the command line
    section: str
    field: FieldInfo

    @property
    def meaning(self) -> str:
        return self.field.description or ""

    @property
    def _extra(self) -> dict[str, Any]:
        return typing.cast(dict[str, Any], self.field.json_schema_extra)

    @property
    def unit(self) -> str:
        return self._extra["unit"]

    @property
    def short(self) -> str:
        """The letter of its short form, "" for none."""
        return self._extra["short"]

    @property
    def repeatable(self) -> bool:
        return self._extra["repeatable"]

    @property
    def single_device(self) -> OneDevice | None:
        return next((m for m in _metadata(self.field) if isinstance(m, OneDevice)), None)

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default_words(self) -> str:
        if words := self._extra["default_words"]:
            return words
        return "required" if self.required else value_words(self.field.default)

    @property
    def type_words(self) -> str:
        """What a right value is, in words, with unit: "integer, at least 1 (prompts)"."""
        device = self.single_device
        if device is not None and device.accepted:
            words = device.words
        else:
            words = _type_words(self.field.annotation, _metadata(self.field))
        if self.repeatable:
            words = {"mapping": "NAME=VALUE", "list of texts": "text"}[words] + ", may be given several times"
        return f"{words} ({self.unit})" if self.unit else words


def options_of(model: type[Options], prefix: str = "") -> Iterator[OptionInfo]:
    """Every option of a command by section, nested groups flattened to dotted names."""
    fields = sorted(model.model_fields.items(), key=lambda item: SECTIONS.index(_owner(model, item[0]).section))
    for name, field in fields:
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Options):
            yield from options_of(annotation, f"{prefix}{name}.")
        else:
            yield OptionInfo(prefix + name, _owner(model, name).section, field)


def allows_none(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def is_bool(field: FieldInfo) -> bool:
    return bool in (field.annotation, *get_args(field.annotation))


def container_opening(field: FieldInfo) -> str:
    """The character with which a command line opens the option's list or mapping as YAML; "" for a scalar."""
    for kind in (field.annotation, *get_args(field.annotation)):
        origin = get_origin(get_args(kind)[0] if get_origin(kind) is Annotated else kind)
        if origin in (tuple, dict):
            return "[" if origin is tuple else "{"
    return ""


def assigned(value: Any) -> Any:
    """The mapping of a sequence of NAME=VALUE texts and (name, value) pairs, of which a later one wins; for a
    validator before that of a dict. Raises ValueError where a text has no name."""
    if not isinstance(value, (list, tuple)):
        return value
    pairs = [item.partition("=")[::2] if isinstance(item, str) and "=" in item else item for item in value]
    if not all(isinstance(pair, tuple) and pair[0] for pair in pairs):
        raise ValueError("expected NAME=VALUE")
    return dict(pairs)


def value_words(value: Any) -> str:
    """A value as one would type it."""
    if value is None or value is PydanticUndefined:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    if isinstance(value, str):
        return value or "''"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(value_words, value)) + "]"
    return str(value)


def _owner(model: type[Options], name: str) -> type[Options]:
    """The most basic class that declares the field (a command may change only its default)."""
    owners = [cls for cls in model.__mro__ if name in inspect.get_annotations(cls)]
    return typing.cast(type[Options], owners[-1])


def _metadata(field: FieldInfo) -> tuple[Any, ...]:
    """Constraints of the field and of the Annotated members of its union."""
    inner = [m for kind in get_args(field.annotation) for m in getattr(kind, "__metadata__", ())]
    return (*field.metadata, *inner)


def _type_words(annotation: Any, metadata: tuple[Any, ...]) -> str:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        words = " or ".join(_type_words(kind, metadata) for kind in kinds)
        return f"{words}, or null" if type(None) in get_args(annotation) else words
    if get_origin(annotation) is Literal:
        return " | ".join(value_words(value) for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "list of texts"
    if get_origin(annotation) is dict:
        return "mapping"
    noun = {bool: "true or false", int: "integer", float: "number", str: "text", SecretStr: "text"}[annotation]
    return f"{noun}, {limits}" if (limits := _limits_words(metadata)) else noun


def _limits_words(metadata: tuple[Any, ...]) -> str:
    words = []
    for limit in metadata:
        if isinstance(limit, at.Ge):
            words.append(f"at least {value_words(limit.ge)}")
        elif isinstance(limit, at.Gt):
            words.append(f"above {value_words(limit.gt)}")
        elif isinstance(limit, at.Le):
            words.append(f"at most {value_words(limit.le)}")
        elif isinstance(limit, at.Lt):
            words.append(f"below {value_words(limit.lt)}")
        elif isinstance(limit, Allowed):
            words.append(limit.words)
    return ", ".join(words)
