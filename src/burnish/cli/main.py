"""The commands of `burnish`. Each reads its options and calls one function, imported only then.

MaxText's spellings train_rl and to_huggingface are accepted too, so that its command lines run here with
only the program's name changed. Errors that are the user's to fix end with one line and their own exit code;
anything else shows its traceback.
"""

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from burnish import __version__
from burnish.cli.commands import COMMANDS, GROUPS, Command
from burnish.errors import BurnishError


@dataclass(frozen=True)
class Job:
    """A parsed command line; it runs after typer is done, so that typer's error handling stays out of it."""

    command: Command
    args: tuple[str, ...]

    def run(self) -> None:
        from burnish.config.overrides import load_config
        from burnish.config.schema import COMMANDS as CONFIGS
        from burnish.parallel import absent_tpu

        config = load_config(CONFIGS[self.command.name], self.args, self.command.positional)
        # transformers advises to install torch, which nothing here needs.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        # Compiled programs are kept: a second start, and above all a resumed run, does not compile again.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/burnish/jax"))
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        absent_tpu.settle()
        module, _, function = self.command.function.partition(":")
        getattr(importlib.import_module(module), function)(config)


class OptionsCommand(TyperCommand):
    """A command whose arguments are all left for load_config, and whose help lists the schema's options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        super().parse_args(ctx, [arg for arg in args if arg == "--help"])
        ctx.args = list(args)
        return ctx.args

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from burnish.cli.help import print_help

        words: list[str] = []
        while ctx.parent is not None:
            words.insert(0, ctx.info_name)
            ctx = ctx.parent
        name = " ".join(words)
        print_help(next(command for command in COMMANDS if name in (command.name, command.alias)))


app = typer.Typer(
    name="burnish",
    help="Reinforcement-learning post-training for open-weight language models.\n\n"
    "A Hugging Face checkpoint goes in, GRPO polishes it, a Hugging Face checkpoint comes out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"burnish {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass


def _add(command: Command, groups: Mapping[str, typer.Typer]) -> None:
    def collect(ctx: typer.Context) -> None:
        ctx.obj.append(Job(command, tuple(ctx.args)))

    for name in filter(None, (command.name, command.alias)):
        group, _, word = name.rpartition(" ")
        groups[group].command(word, cls=OptionsCommand, help=command.summary, hidden=name == command.alias)(collect)


def _with_groups() -> dict[str, typer.Typer]:
    """The groups of commands by name, each in the one that its name begins with; "" is the program itself."""
    groups = {"": app}
    for name, summary in GROUPS.items():
        outer, _, word = name.rpartition(" ")
        groups[name] = typer.Typer(no_args_is_help=True)
        groups[outer].add_typer(groups[name], name=word, help=summary)
    return groups


_groups = _with_groups()
for _command in COMMANDS:
    _add(_command, _groups)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the program and exits: 0 done, 1 when standard output cannot be written to, 2 wrong options, 130
    interrupted, or the error's own code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding shows what it can
    try:
        try:
            _run(_arguments() if argv is None else argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE) or not _output_fails():
            raise
        if error.errno != errno.EPIPE:  # who closes a pipe (head) has read enough
            with contextlib.suppress(OSError):
                print(f"error: standard output cannot be written to: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def _arguments() -> list[str]:
    """The command line's arguments. Bytes that the locale's encoding does not know are read as UTF-8."""
    arguments = []
    for number, argument in enumerate(sys.argv[1:], start=1):
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError:
            try:
                argument = os.fsencode(argument).decode("utf-8")
            except UnicodeDecodeError as error:
                print(f"error: argument {number} is not UTF-8 text, byte {error.start}", file=sys.stderr)
                sys.exit(2)
        arguments.append(argument)
    return arguments


def _output_fails() -> bool:
    """Whether it was standard output that could not be written to: then it cannot take another line either. What is
    still to be written is thrown away, or else Python would fail on it once more at its exit."""
    try:
        print(flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _run(argv: Sequence[str]) -> NoReturn:
    jobs: list[Job] = []
    try:
        app(args=argv, obj=jobs)
    except SystemExit as exit_:
        if exit_.code not in (0, None) or not jobs:
            raise
    try:
        for job in jobs:
            job.run()
    except BurnishError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


if __name__ == "__main__":
    main()
