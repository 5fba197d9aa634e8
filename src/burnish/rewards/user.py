"""A user's own reward functions: loading the file, calling a function, checking what it returns.

`reward_functions_path` + `reward_functions` replace the built-in rewards. The functions run in one worker
process (see `pool`), loaded once, so that a hanging or crashing function can be stopped; what is here runs
in that worker."""

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.rewards.types import RewardError

ARGUMENTS = ("prompts", "completions", "answer", "question")
_MODULE_NAME = "burnish_user_rewards"
_LARGEST = 1e6  # squares of such scores are still exact enough for a group's statistics


@dataclass(frozen=True)
class UserFunction:
    name: str
    path: str
    call: Callable[..., Any]

    def __str__(self) -> str:
        return describe(self.name, self.path)


def describe(name: str, path: str) -> str:
    """How every message names a function."""
    return f"reward function {name!r} in {path}"


def load_functions(path: str, names: Sequence[str]) -> dict[str, UserFunction]:
    """Import the file and look the names up. Raises RewardError when the file is not there or fails to
    import, and when a name is missing, is no function or does not take the four keyword arguments."""
    if not Path(path).is_file():
        raise RewardError(f"reward_functions_path={path}: there is no such file.")
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward_functions_path={path} is not a Python file; its name has to end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module  # dataclasses and pickle look their module up by name
    sys.path.insert(0, str(Path(path).resolve().parent))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"reward_functions_path={path} cannot be imported: {type(error).__name__}: {error}\n"
            f"{traceback_from(error, spec.origin)}"
        ) from error
    functions = {}
    for name in names:
        function = getattr(module, name, None)
        if not callable(function):
            found = sorted(
                key
                for key, value in vars(module).items()
                if inspect.isfunction(value) and value.__module__ == _MODULE_NAME and not key.startswith("_")
            )
            raise RewardError(
                f"reward_functions: {path} has no function {name!r}; it has {', '.join(found) or 'no functions'}."
            )
        try:
            inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS, ()))
        except TypeError as error:
            raise RewardError(
                f"{describe(name, path)} is called with the keyword arguments {', '.join(ARGUMENTS)},"
                f" which it does not take: {error}. Give it **kwargs for those that it does not need."
            ) from None
        functions[name] = UserFunction(name, path, function)
    return functions


def call_function(function: UserFunction, columns: dict[str, list[str]]) -> list[float | None]:
    """Scores of the batch, None where the function could not score an item. `columns` holds one list of
    strings per argument, which the function may change. Raises RewardError when the function returns something
    that is no list of that many numbers of a sane size; what the function itself raises goes through."""
    num_items = len(columns["completions"])  # counted first: the function may empty its lists
    returned = function.call(**columns)
    if isinstance(returned, str | bytes | dict | set | frozenset) or not hasattr(returned, "__len__"):
        raise RewardError(
            f"{function} returned {_show(returned)}; it has to return a list with one number (or None) per completion."
        )
    values = returned.tolist() if hasattr(returned, "tolist") else list(returned)
    if len(values) != num_items:
        raise RewardError(
            f"{function} returned {len(values)} scores for {num_items} completions; it has to return one"
            " number (or None) per completion, in their order."
        )
    return [None if value is None else _number(function, index, value) for index, value in enumerate(values)]


def _number(function: UserFunction, index: int, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise RewardError(
            f"{function} returned {_show(value)} as score {index}; it has to be a number, or None when the"
            " completion cannot be scored."
        ) from None
    if not math.isfinite(number):
        raise RewardError(
            f"{function} returned {number} as score {index}; it has to be finite, or None when the completion"
            " cannot be scored."
        )
    if abs(number) > _LARGEST:
        raise RewardError(
            f"{function} returned {number:g} as score {index}; it has to lie between {-_LARGEST:g} and"
            f" {_LARGEST:g}, beyond which advantages lose their meaning."
        )
    return number


def traceback_from(error: BaseException, file: str | None) -> str:
    """The traceback from the first frame in `file` on: how the file was called is no concern of its author. All
    of it where `file` is None."""
    trace = error.__traceback__
    while file is not None and trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
