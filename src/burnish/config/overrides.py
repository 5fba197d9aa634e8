"""Reads a command line into a config: recipe files, then key=value, --key=value, --key value, --flag or -f.

Every value is taken as the text that was typed, in recipes too, and converted by the option's own type. So a
run named 2024-01-01 stays a text, 2e-5 is a number, and YAML's older rules (dates, base 60) never apply.
Later values win, a command line over its recipes; those of a repeatable option add up. An unknown key is an error
that names the nearest ones.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from burnish.config.errors import ConfigError
from burnish.config.fields import OptionInfo, allows_none, container_opening, is_bool, options_of, value_words
from burnish.config.schema import COMMANDS, CommandConfig
from burnish.text import decode

Config = TypeVar("Config", bound=CommandConfig)

_ASSIGNMENT = re.compile(r"(?:--)?([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_SWITCH = re.compile(r"--([A-Za-z_][\w.-]*)")
_TRUTH_VALUES = {"true", "false", "yes", "no", "on", "off", "1", "0", "t", "f", "y", "n"}
_NULL_TEXTS = {"", "null", "none", "~"}


def load_config(cls: type[Config], args: Sequence[str], positional: Sequence[str] = ()) -> Config:
    """The config that `args` ask for. The environment's HF_TOKEN fills hf_access_token where it is not given.

    `positional` names the options that words without a name fill, in order; a command without such options
    takes these words for recipes.

    Raises ConfigError with one line per problem.
    """
    infos = {info.name: info for info in options_of(cls)}
    given: dict[str, Any] = {}
    for name, value in _assignments(args, cls, infos, positional):
        if name not in infos:
            raise ConfigError(_unknown(name, cls, infos))
        converted = _converted(infos[name], value)
        given[name] = (*given.get(name, ()), *_items(converted)) if infos[name].repeatable else converted
    token = os.environ.get("HF_TOKEN")
    if token and "hf_access_token" in infos and given.get("hf_access_token") is None:
        given["hf_access_token"] = token
    try:
        return cls.model_validate(_nested(given))
    except ValidationError as error:
        raise ConfigError("\n".join(_problems(error, infos, given))) from None


def _assignments(
    args: Sequence[str], cls: type[CommandConfig], infos: Mapping[str, OptionInfo], positional: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """(dotted name, value as text, list or mapping) in order; recipes come before everything else."""
    pending: list[tuple[str, Any]] = []
    rest, unnamed = list(args), list(positional)
    letters = {f"-{info.short}": f"--{info.name}" for info in infos.values() if info.short}
    while rest:
        token = rest.pop(0)
        token = letters.get(token, token)
        if match := _ASSIGNMENT.fullmatch(token):
            pending.append((match[1].replace("-", "_"), match[2]))
        elif match := _SWITCH.fullmatch(token):
            name = match[1].replace("-", "_")
            if name in infos and is_bool(infos[name].field):
                typed = bool(rest) and rest[0].lower() in _TRUTH_VALUES
                pending.append((name, rest.pop(0) if typed else "true"))
            elif name not in infos:  # what follows may be its value, a secret even: it is not looked at
                raise ConfigError(_unknown(name, cls, infos))
            elif not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} needs a value: {infos[name].type_words}")
            else:
                pending.append((name, rest.pop(0)))
        elif token.startswith("-"):
            typed_name = token.partition("=")[0]
            raise ConfigError(f"{typed_name}: options are written key=value, --key=value or --key value")
        elif unnamed:
            pending.append((unnamed.pop(0), token))
        elif positional:
            verb = "is" if len(positional) == 1 else "are"
            raise ConfigError(f"{token}: only {' and '.join(positional)} {verb} given without a name")
        else:
            yield from _flat(_read_recipe(token, infos), "")
    yield from pending


class _TextLoader(yaml.BaseLoader):
    """YAML whose scalars are all texts, and in which a key may be given once only."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read_recipe(path: str, names: Iterable[str]) -> dict[str, Any]:
    """A recipe's content. `names` are the options that may have been meant where there is no such file."""
    try:
        if "://" in path:
            from etils import epath

            data = epath.Path(path).read_bytes()
        else:
            with open(path, "rb") as file:
                data = file.read()
    except FileNotFoundError:
        near = difflib.get_close_matches(path.replace("-", "_"), names, n=1, cutoff=0.7)
        if near:
            raise ConfigError(f"{path}: no such recipe file; an option is written {near[0]}=…") from None
        shown = "hf_…" if path.startswith("hf_") else path  # a token that has lost its option
        raise ConfigError(f"{shown}: no such recipe file; options are written key=value") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    recipe = _parse_yaml(path, decode(data, path, ConfigError))
    if recipe in (None, ""):
        return {}
    if not isinstance(recipe, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of options to values, as in `batch_size: 8`")
    return recipe


def _parse_yaml(source: str, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_TextLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}: not YAML{where}: {getattr(error, 'problem', None) or error}") from None


def _flat(mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted names of a recipe; only groups of options (rl) nest, other mappings are values."""
    for key, value in mapping.items():
        if prefix + key in _GROUPS and isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


_GROUPS = {info.name.rpartition(".")[0] for command in COMMANDS.values() for info in options_of(command)} - {""}


def _converted(info: OptionInfo, value: Any) -> Any:
    """Null texts become None where the option can be null; lists and mappings are parsed out of texts."""
    if not isinstance(value, str):
        return value
    if allows_none(info.field) and value.lower() in _NULL_TEXTS:
        return None
    opening = container_opening(info.field)
    if opening and value.startswith(opening):
        return _parse_yaml(f"{info.name}={value}", value)
    return value


def _items(value: Any) -> Iterable[Any]:
    """What one value of a repeatable option adds to the others."""
    if isinstance(value, Mapping):
        return value.items()
    return value if isinstance(value, list) else (value,)


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in given.items():
        *groups, leaf = name.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[leaf] = value
    return tree


def _unknown(name: str, cls: type[CommandConfig], infos: Mapping[str, OptionInfo]) -> str:
    """One line that says what may have been meant: a near name, the same leaf elsewhere, another command."""
    near = difflib.get_close_matches(name, infos, n=3, cutoff=0.7)
    leaf = name.rpartition(".")[2]
    near += [other for other in infos if other.rpartition(".")[2] == leaf and other not in near]
    near += [
        other
        for other in infos
        if other not in near and difflib.SequenceMatcher(None, leaf, other.rpartition(".")[2]).ratio() > 0.8
    ]
    message = f"unknown option {name}"
    if name in _GROUPS:
        members = [other for other in infos if other.startswith(f"{name}.")]
        return f"{name} is a group of options: {', '.join(members)}" if members else message
    if near:
        return f"{message}; nearest: {', '.join(near[:3])}"
    others = [command for command, other in COMMANDS.items() if other is not cls and name in _names(other)]
    if others:
        return f"{message}; it belongs to {', '.join(others)}"
    return f"{message}; --help lists the options"


def _names(cls: type[CommandConfig]) -> set[str]:
    return {info.name for info in options_of(cls)}


def _problems(error: ValidationError, infos: Mapping[str, OptionInfo], given: Mapping[str, Any]) -> Iterator[str]:
    """One line per option at fault: what was given, what would be right."""
    seen = set()
    for detail in error.errors(include_url=False, include_context=False):
        name = ".".join(str(part) for part in detail["loc"])
        info = next((infos[known] for known in _prefixes(name) if known in infos), None)
        if info is None:
            yield detail["msg"].removeprefix("Value error, ")
        elif info.name not in seen:
            seen.add(info.name)
            yield _problem(detail["type"], info, given)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:n]) for n in range(len(parts), 0, -1))


def _problem(kind: str, info: OptionInfo, given: Mapping[str, Any]) -> str:
    if kind == "missing":
        return f"{info.name} is required: {info.meaning}"
    value = "…" if info.name == "hf_access_token" or info.repeatable else value_words(given[info.name])
    device = info.single_device
    if kind == "not_supported_yet" and device is not None:
        return f"{info.name}={value} is not supported yet ({device.why}); accepted: {device.words}"
    return f"{info.name}={value} is refused: expected {info.type_words}. {info.meaning}"
