"""What the pages say to type is what the program reads: command lines, options and their defaults.

Every `burnish …` of README.md, the guides and the commands' own help is parsed and validated as a config, with the
command's function replaced; nothing is computed. What stands for something else (… for more options) is left out. Two
scripts are run; those of the rehearsal are run in tests/launch/test_local_workflow.py.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from burnish.cli.commands import COMMANDS
from burnish.cli.main import main
from burnish.config.fields import options_of
from burnish.config.schema import COMMANDS as CONFIGS

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "options.md"
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page != GENERATED)]
NAMES = {name for command in COMMANDS for name in (command.name, command.alias) if name}
CONFIG_OF = {name: CONFIGS[command.name] for command in COMMANDS for name in (command.name, command.alias) if name}
OPTIONS = {info.name: info for config in CONFIGS.values() for info in options_of(config)}
FENCED = re.compile(r"^```.*?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^    .*\n?)+", re.MULTILINE)


def command_lines(text: str) -> list[list[str]]:
    """Arguments of every call of the program in a script, of those inside --command='…' too."""
    text = re.sub(r"(^|\s)#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    text = re.sub(r"<[^<>\n]*>(?:/config\.yaml)?", "…", text)
    lexer = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars=";&|()>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    found: list[list[str]] = []
    current: list[str] | None = None
    for token in lexer:
        if token == "burnish":
            current = []
            found.append(current)
        elif set(token) <= set(";&|()>"):
            current = None
        elif current is not None:
            current.append(token)
            if token.startswith("--command=") and "burnish" in token:
                found += command_lines(token.partition("=")[2])
    return found


def of_page(page: Path) -> list[list[str]]:
    text = page.read_text(encoding="utf-8")
    blocks = FENCED.findall(text)
    rest = FENCED.sub("", text)
    blocks += [re.sub(r"^    ", "", block, flags=re.MULTILINE) for block in INDENTED.findall(rest)]
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]*)`", INDENTED.sub("", rest))]
    lines = [args for block in blocks for args in command_lines(block)]
    excerpts = [span for span in spans if span.startswith("burnish ") and "=" in span]
    lines += [args for span in excerpts for args in command_lines(f"{span} …")]
    return [filled for filled in map(fill, lines) if filled]


def fill(args: list[str]) -> list[str]:
    """A command line whose … stands for what is required; [] where it names no command."""
    name = next((name for n in (3, 2, 1) if (name := " ".join(args[:n])) in NAMES), None)
    if name is None:
        return []
    left_out = "…" in args or "job.yaml" in args
    args = [arg.replace("=…", "=x") for arg in args if arg not in ("…", "job.yaml") and not arg.startswith("[")]
    needed = {info.name for info in options_of(CONFIG_OF[name]) if info.field.is_required()}
    given = {arg.lstrip("-").partition("=")[0].replace("-", "_") for arg in args}
    stands_for = {"compute_type": "v6e-8"}
    return args + [f"{option}={stands_for.get(option, 'x')}" for option in sorted(needed - given) if left_out]


@pytest.fixture
def read(monkeypatch, tmp_path):
    """Reads a command line -> its config, where the pages assume that programs and files are there."""
    recorded: list = []
    for command in COMMANDS:
        module_name, _, function = command.function.partition(":")
        if not hasattr(sys.modules.get(module_name), "_recorder"):
            module = types.ModuleType(module_name)
            module._recorder = True  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module_name, module)
        setattr(sys.modules[module_name], function, recorded.append)
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.chdir(ROOT)

    def read_line(args: list[str]):
        with pytest.raises(SystemExit) as exit_:
            main(args)
        return None if exit_.value.code else recorded.pop()

    return read_line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_line_of_a_page_is_read(page, read, capsys):
    refused = []
    for args in of_page(page):
        if read(args) is None:
            refused.append((args, capsys.readouterr().err))
    assert not refused


def test_the_command_lines_are_found():
    """The tests above would pass on pages in which nothing is found."""
    found = {page.stem: of_page(page) for page in PAGES}
    assert {"many-devices", "plan", "vllm", "README", "gke", "tpu-vm", "one-machine"} <= {
        k for k, v in found.items() if v
    }
    assert ["plan", "recipes/llama3.1-8b-v6e-8.yaml", "topology=v6e-8"] in found["plan"]
    assert any("rollout_engine=vllm" in args for args in found["vllm"])
    assert any(args[0] == "to_maxtext" for args in found["gke"])  # inside --command='…'


def test_every_example_of_the_help_is_read(read, capsys):
    for command in COMMANDS:
        for example in command.examples:
            for args in map(fill, command_lines(example)):
                assert read(args) is not None, (args, capsys.readouterr().err)


def script(page: Path, containing: str) -> str:
    """The block of a page with this in it, as it stands there."""
    text = page.read_text(encoding="utf-8")
    (block,) = (b for b in [*FENCED.findall(text), *INDENTED.findall(FENCED.sub("", text))] if containing in b)
    return block


def run_script(text: str, directory: Path) -> str:
    """Runs it where `burnish` is the program of these tests -> standard output."""
    program = directory / "burnish"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m burnish.cli.main "$@"\n')
    program.chmod(0o755)
    own = {"PATH": f"{directory}{os.pathsep}{os.environ['PATH']}"}
    own |= {f"XDG_{name}_HOME": str(directory / name) for name in ("CONFIG", "STATE")}
    done = subprocess.run(
        ["bash", "-euc", text], env=os.environ | own, cwd=directory, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_job_of_the_readme_runs_as_it_is_written(tmp_path):
    lines = run_script(script(ROOT / "README.md", "--name=rehearsal"), tmp_path).splitlines()
    for host in range(8):
        assert f"[main-job-0-{host}] host {host}: --xla_force_host_platform_device_count=4" in lines


@pytest.mark.slow
def test_virtual_devices_of_the_guide_train(tmp_path):
    """As it is written, but for shorter completions and fewer steps."""
    block = script(ROOT / "docs" / "guides" / "many-devices.md", "device_count=8 burnish")
    fewer = " num_batches=1 num_test_batches=0 max_prefill_predict_length=64 max_target_length=96 rl.grpo_beta=0"
    printed = run_script(block.rstrip() + fewer, tmp_path)
    assert "Devices: 8 train (data 2 × fsdp 4) and sample (data 8) in turn." in printed
    assert "\n 1/1 " in printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_and_defaults_that_a_page_names_are_those_of_the_program(page):
    text = page.read_text(encoding="utf-8")
    tables = re.findall(r"^\| option \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    named = {
        name
        for table in tables
        for row in table.splitlines()[2:]
        for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    }
    assert not named - set(OPTIONS)
    for name, default in re.findall(r"`([a-z_.]+)` \((-?\d+)\)", text):
        if name in OPTIONS:
            assert OPTIONS[name].field.default == int(default), name
