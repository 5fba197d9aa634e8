"""Each command names a function that exists; found without importing it, since that would import jax."""

import ast
from pathlib import Path

import pytest

import burnish
from burnish.cli.commands import COMMANDS


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_function_of_a_command_exists_and_takes_a_config(command):
    module, _, function = command.function.partition(":")
    path = Path(burnish.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    assert path.is_file(), f"{command.name} runs {command.function}: no such module"
    defined = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    (definition,) = [node for node in defined if node.name == function]
    assert definition.args.args, f"{command.function} takes no config"
