"""The `burnish` program from outside: what it prints, how it exits, what it imports."""

import errno
import os
import subprocess
import sys
import types

import pytest

from burnish.cli.commands import COMMANDS
from burnish.cli.main import main
from burnish.config.fields import options_of
from burnish.config.schema import COMMANDS as CONFIGS
from burnish.errors import BurnishError

HEAVY = ("jax", "transformers", "numpy", "datasets", "orbax", "grain", "pyarrow", "matplotlib")


def exit_code(*args: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(list(args))
    return exit_.value.code or 0


@pytest.fixture
def calls(monkeypatch):
    """Every command's function replaced by one that records its config."""
    recorded = []
    for command in COMMANDS:
        module_name, _, function = command.function.partition(":")
        module = sys.modules.get(module_name)
        if module is None or not hasattr(module, "_recorder"):
            module = types.ModuleType(module_name)
            module._recorder = True  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module_name, module)
        setattr(module, function, lambda config, name=command.name: recorded.append((name, config)))
    return recorded


def raising(monkeypatch, error: BaseException) -> None:
    def fail(config):
        raise error

    module = types.ModuleType("burnish.rl.train")
    module.train = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "burnish.rl.train", module)


@pytest.mark.parametrize("args", [["--help"], ["train-rl", "--help"], ["to_huggingface", "--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy(args):
    script = (
        "import sys\nfrom burnish.cli.main import main\n"
        f"try: main({args!r})\nexcept SystemExit as e: assert not e.code, e.code\n"
        f"heavy = [m for m in {HEAVY!r} if m in sys.modules]\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)


def test_every_command_has_options_and_every_set_of_options_a_command():
    assert {command.name for command in COMMANDS} == set(CONFIGS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_lists_every_option_and_the_examples(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert exit_code(*command.name.split(), "--help") == 0
    printed = capsys.readouterr().out
    assert command.summary in printed
    assert all(example in printed for example in command.examples)
    assert all(f"\n{info.name} " in printed for info in options_of(CONFIGS[command.name]))


def test_help_wins_over_options_before_and_after_it(capsys, calls):
    assert exit_code("train-rl", "batch_size=0", "--help", "nonsense=1") == 0
    assert "rl.num_generations" in capsys.readouterr().out
    assert calls == []


def test_the_programs_help_lists_each_command_once(capsys):
    assert exit_code("--help") == 0
    printed = capsys.readouterr().out
    assert all(command.name.split()[0] in printed for command in COMMANDS)
    assert "train_rl" not in printed


def test_version(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out.startswith("burnish ")


@pytest.mark.parametrize("spelling", ["train-rl", "train_rl"])
def test_arguments_reach_the_commands_function_as_a_config(spelling, calls):
    assert exit_code(spelling, "--batch_size", "4", "load_parameters_path=m", "--resume", "run_name=r") == 0
    ((name, config),) = calls
    assert name == "train-rl"
    assert (config.batch_size, config.resume, config.run_name) == (4, True, "r")


NEEDED = {
    "demo": (),
    "to-maxtext": ("hf_model_path=m", "base_output_directory=o"),
    "convert": ("m", "o", "--to", "hf"),
    "inspect": ("m",),
    "plan": ("topology=cpu-8",),
    "compare": ("m", "o"),
    "job config set": ("cluster", "c"),
    "job submit": ("--name=n", "--compute-type=v6e-8"),
    "job logs": ("n",),
    "job describe": ("n",),
    "job inspect": ("n",),
    "job cancel": ("n",),
    "cluster create": ("c", "--compute-type=v6e-8"),
    "cluster delete": ("c",),
    "vm create": ("m",),
    "vm ssh-command": ("m",),
    "vm delete": ("m",),
}


def test_every_command_calls_its_own_function(calls):
    required = {"load_parameters_path": "m", "base_output_directory": "o"}
    for command in COMMANDS:
        names = CONFIGS[command.name].model_fields
        given = [f"{name}={value}" for name, value in required.items() if name in names]
        for name in filter(None, (command.name, command.alias)):
            assert exit_code(*name.split(), *NEEDED.get(command.name, given)) == 0
            assert calls.pop()[0] == command.name


def test_wrong_options_exit_with_two_and_no_traceback(capsys, calls):
    assert exit_code("train-rl", "load_parameters_path=m", "batch_size=0", "num_batches=0") == 2
    printed = capsys.readouterr()
    assert [line.split("=")[0] for line in printed.err.splitlines()] == [
        "error: batch_size",
        "error: num_batches",
    ]
    assert printed.out == ""
    assert calls == []


def program(args: list[str], **options) -> subprocess.CompletedProcess:
    """The program in the C locale with Python's own repairs of it turned off."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment.pop("PYTHONIOENCODING", None)
    command = [sys.executable, "-m", "burnish.cli.main", *args]
    return subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=60, **options)


def test_help_is_printed_also_where_the_terminal_knows_ascii_only():
    done = program(["train-rl", "--help"], stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"rl.num_generations" in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["--help"], ["train-rl", "--help"], ["--version"]])
def test_a_full_device_ends_with_one_line(args, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        done = program(args, stdout=full)
    assert done.returncode == 1
    assert done.stderr == b"error: standard output cannot be written to: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_ends_without_a_word(unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    read, write = os.pipe()
    os.close(read)
    done = program(["train-rl", "--help"], stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), BrokenPipeError(errno.EPIPE, "closed")])
def test_a_full_disk_elsewhere_keeps_its_traceback(monkeypatch, error):
    raising(monkeypatch, error)
    with pytest.raises(OSError, match=r"full|closed"):
        main(["train-rl", "load_parameters_path=m"])


def test_arguments_that_the_locale_cannot_read_are_utf8(monkeypatch, calls):
    def escaped(text: str) -> str:
        return text.encode("utf-8").decode("ascii", "surrogateescape")

    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("ascii", "surrogateescape"))
    prompt = "prompt=Wie hei\u00df?"
    monkeypatch.setattr(sys, "argv", ["burnish", "generate", "load_parameters_path=m", escaped(prompt)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    assert calls[0][1].prompt == "Wie hei\u00df?"


def test_an_argument_that_is_not_utf8_exits_with_two(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["burnish", "generate", "prompt=\udcff"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "error: argument 2 is not UTF-8 text, byte 7\n"


def test_an_unknown_command_exits_with_two(capsys):
    assert exit_code("trian") == 2
    assert "trian" in capsys.readouterr().err


def test_user_errors_of_other_rooms_end_with_their_own_code(monkeypatch, capsys):
    raising(monkeypatch, BurnishError("the disk is full", exit_code=7))
    assert exit_code("train-rl", "load_parameters_path=m") == 7
    assert capsys.readouterr().err == "error: the disk is full\n"


def test_an_exit_code_of_the_trainer_is_the_programs(monkeypatch):
    raising(monkeypatch, SystemExit(85))
    assert exit_code("train-rl", "load_parameters_path=m") == 85


def test_an_interrupt_exits_with_130(monkeypatch):
    raising(monkeypatch, KeyboardInterrupt())
    assert exit_code("train-rl", "load_parameters_path=m") == 130


@pytest.mark.parametrize("error", [RuntimeError("bug"), ValueError("bug"), EOFError("bug")])
def test_faults_of_the_program_keep_their_traceback(monkeypatch, error):
    raising(monkeypatch, error)
    with pytest.raises(type(error), match="bug"):
        main(["train-rl", "load_parameters_path=m"])
