"""What `burnish <command> --help` prints: summary, examples, and every option by section, from the schema."""

from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from burnish.cli.commands import Command
from burnish.config.fields import options_of
from burnish.config.schema import COMMANDS

_NAME_WIDTH = max(len(info.name) for config in COMMANDS.values() for info in options_of(config))


def print_help(command: Command) -> None:
    console = Console(highlight=False)
    words = " ".join(command.positional).upper() or "[RECIPE.yaml …]"
    usage = f"Usage: burnish {command.name} {words} [key=value | --key=value | --key value] …"
    console.print(Text(f"{usage}\n\n{command.summary}\n{command.explanation}\n\nExamples:"))
    for example in command.examples:
        console.print(Text(f"  {example}"), soft_wrap=True)
    for section, infos in groupby(options_of(COMMANDS[command.name]), key=lambda info: info.section):
        console.print(Text(f"\n{section}", style="bold"))
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(no_wrap=True, style="cyan", min_width=_NAME_WIDTH)
        table.add_column()
        for info in infos:
            default = "required" if info.required else f"default {info.default_words}"
            values = f"[{info.type_words}; {default}]"
            name = f"{info.name} (-{info.short})" if info.short else info.name
            table.add_row(Text(name), Text.assemble(f"{info.meaning}\n", (values, "dim")))
        console.print(table)
