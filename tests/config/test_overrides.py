"""How command lines and recipes become a config, and what is said when they cannot."""

import pytest

from burnish.config.errors import ConfigError
from burnish.config.overrides import load_config
from burnish.config.schema import (
    ConvertConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    JobLogsConfig,
    JobSubmitConfig,
    RunConfig,
)
from burnish.errors import BurnishError


@pytest.fixture(autouse=True)
def _no_token_in_the_environment(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)


def run(*args: str) -> RunConfig:
    return load_config(RunConfig, ["load_parameters_path=m", *args])


def problem(*args: str) -> str:
    with pytest.raises(ConfigError) as error:
        run(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "args",
    [
        ["rl.num_generations=4", "learning_rate=2e-5", "resume=true", "run_name=r"],
        ["--rl.num_generations=4", "--learning_rate=2e-5", "--resume=true", "--run_name=r"],
        ["--rl.num_generations", "4", "--learning_rate", "2e-5", "--resume", "--run_name", "r"],
        ["--rl.num-generations", "4", "--learning-rate", "2E-5", "--resume", "TRUE", "--run-name=r"],
    ],
)
def test_all_spellings_give_the_same_config(args):
    cfg = run(*args)
    assert (cfg.rl.num_generations, cfg.learning_rate, cfg.resume, cfg.run_name) == (4, 2e-5, True, "r")


def test_a_flag_does_not_swallow_what_follows(tmp_path):
    recipe = tmp_path / "a.yaml"
    recipe.write_text("run_name: r")
    cfg = run("--resume", str(recipe), "--debug", "batch_size=2")
    assert (cfg.resume, cfg.debug, cfg.batch_size) == (True, True, 2)


def test_negative_numbers_are_values():
    assert run("--num_test_batches", "-1").num_test_batches == -1


@pytest.mark.parametrize("text", ["2024-01-01", "20241130", "1e5", "yes", "12:30", "null-model", "007"])
@pytest.mark.parametrize("where", ["command line", "recipe"])
def test_texts_stay_the_texts_that_were_typed(text, where, tmp_path):
    recipe = tmp_path / "a.yaml"
    recipe.write_text(f"model_name: {text}\n")
    assert run(str(recipe) if where == "recipe" else f"model_name={text}").model_name == text


@pytest.mark.parametrize("text", ["2e-5", "2.0e-5", "0.00002", "2E-5", ".00002"])
def test_numbers_of_every_notation_are_numbers_in_recipes_too(text, tmp_path):
    recipe = tmp_path / "a.yaml"
    recipe.write_text(f"learning_rate: {text}\n")
    assert run(str(recipe)).learning_rate == run(f"learning_rate={text}").learning_rate == 2e-5


@pytest.mark.parametrize(
    ("text", "value"), [("True", True), ("false", False), ("1", True), ("0", False), ("no", False)]
)
def test_truth_values(text, value):
    assert run(f"debug={text}").debug is value


@pytest.mark.parametrize("text", ["null", "None", "", "~"])
def test_null_unsets_what_may_be_null(text):
    assert run("max_num_seqs=3", f"max_num_seqs={text}").max_num_seqs is None


def test_lists_are_yaml_or_json_and_one_text_is_a_list_of_one():
    assert run("""stop_strings=["</answer>", "a,b"]""").stop_strings == ("</answer>", "a,b")
    assert run("stop_strings=[</answer>, '1']").stop_strings == ("</answer>", "1")
    assert run("stop_strings=</answer>").stop_strings == ("</answer>",)
    assert run("stop_strings={").stop_strings == ("{",)
    cfg = run("reward_functions_path=r.py", "reward_functions=one, two")
    assert cfg.reward_functions == ("one", "two")


def test_values_may_hold_equal_signs_spaces_and_newlines():
    cfg = load_config(GenerateConfig, ["load_parameters_path=m", "prompt=a = b\nc=d"])
    assert cfg.prompt == "a = b\nc=d"


def test_recipes_nest_or_dot_and_later_ones_win_and_the_command_line_wins_over_all(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("batch_size: 4\nnum_batches: 7\nrl:\n  num_generations: 4\n  grpo_beta: 0\n")
    second.write_text("num_batches: 8\nrl.num_generations: 8\nstop_strings: ['x', \"null\"]\n")
    cfg = run("batch_size=2", str(first), str(second))
    assert (cfg.batch_size, cfg.num_batches) == (2, 8)
    assert (cfg.rl.num_generations, cfg.rl.grpo_beta) == (8, 0)
    assert cfg.stop_strings == ("x", "null")


def test_an_empty_recipe_changes_nothing(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert run(str(tmp_path / "a.yaml"), "run_name=r") == run("run_name=r")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", "mapping"),
        ("batch_size: [1\n", "not YAML in line"),
        ("batch_size: 1\nbatch_size: 2\n", "batch_size is given twice"),
        ("batch_sise: 1\n", "unknown option batch_sise; nearest: batch_size"),
        ("rl:\n  num_generation: 4\n", "unknown option rl.num_generation; nearest: rl.num_generations"),
        ("batch_size: true\n", "batch_size=true is refused"),
        ("batch_size: [1, 2]\n", "batch_size="),
        ("rl: 4\n", "rl is a group of options"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_said_in_one_line(text, words, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    assert words in problem(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ("rl.num_generation=8", "unknown option rl.num_generation; nearest: rl.num_generations"),
        ("num_generations=8", "nearest: rl.num_generations"),
        ("rl.batch_size=8", "nearest: batch_size"),
        ("learning_rte=1", "nearest: learning_rate"),
        ("--lerning_rate", "nearest: learning_rate"),
        ("prompt=x", "it belongs to generate"),
        ("random_init=true", "it belongs to sft"),
        ("zzz=1", "--help"),
        ("nothing.yaml", "nothing.yaml: no such recipe file"),
        ("-x", "key=value"),
        ("--learning_rate", "--learning_rate needs a value: number, above 0"),
        ("batch_size=four", "batch_size=four is refused: expected integer, at least 1 (prompts)"),
        ("batch_size=4.5", "batch_size=4.5"),
        ("debug=maybe", "debug=maybe is refused: expected true or false"),
        ("rl=4", "rl is a group of options: rl.num_generations"),
        ("stop_strings=[a: [}", "not YAML"),
    ],
)
def test_what_is_wrong_on_a_command_line_is_said_in_one_line(arg, words):
    assert words in problem(arg)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--hf_acces_token", "hf_SECRET"], "unknown option hf_acces_token; nearest: hf_access_token"),
        (["hf_acces_token=hf_SECRET"], "unknown option hf_acces_token; nearest: hf_access_token"),
        (["hf_acces_token", "hf_SECRET"], "no such recipe file; an option is written hf_access_token=…"),
        (["hf_access_token", "hf_SECRET"], "an option is written hf_access_token=…"),
        (["-hf_acces_token=hf_SECRET"], "-hf_acces_token: options are written key=value"),
        (["hf_SECRET"], "hf_…: no such recipe file"),
    ],
)
def test_a_token_beside_a_misspelt_option_is_not_printed(args, words):
    said = problem(*args)
    assert words in said
    assert "SECRET" not in said


def test_an_option_without_its_dashes_is_suggested():
    assert problem("batch_size", "4") == "batch_size: no such recipe file; an option is written batch_size=…"


def test_a_recipe_that_is_not_utf8_is_said_in_one_line(tmp_path):
    recipe = tmp_path / "a.yaml"
    recipe.write_bytes("run_name: caf\u00e9".encode("latin-1"))
    assert problem(str(recipe)) == f"{recipe}: not UTF-8 text, byte 13 is 0xe9"


def test_every_wrong_value_is_reported_at_once():
    with pytest.raises(ConfigError) as error:
        run("batch_size=0", "rl.num_generations=1", "learning_rate=x")
    names = {line.split("=")[0] for line in str(error.value).splitlines()}
    assert names == {"batch_size", "learning_rate", "rl.num_generations"}


def test_what_is_required_is_named():
    with pytest.raises(ConfigError, match="base_output_directory is required"):
        load_config(ExportConfig, ["load_parameters_path=m"])


def test_errors_are_the_users_and_exit_with_two():
    with pytest.raises(BurnishError) as error:
        run("batch_size=0")
    assert error.value.exit_code == 2
    assert isinstance(error.value, ValueError)
    assert BurnishError("x").exit_code == 1
    assert BurnishError("x", exit_code=7).exit_code == 7


def test_the_token_comes_from_the_environment_unless_it_is_given(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "from_env")
    for args, token in [
        ([], "from_env"),
        (["hf_access_token="], "from_env"),
        (["hf_access_token=mine"], "mine"),
    ]:
        for config in (RunConfig, EvalConfig):
            cfg = load_config(config, ["load_parameters_path=m", *args])
            assert cfg.hf_access_token is not None
            assert cfg.hf_access_token.get_secret_value() == token
    monkeypatch.setenv("HF_TOKEN", "")
    assert run().hf_access_token is None


def test_words_without_a_name_fill_the_options_that_a_command_says():
    positional = ("source", "destination")
    cfg = load_config(ConvertConfig, ["a", "--to", "hf", "b", "scan_layers=false"], positional)
    assert (cfg.source, cfg.destination, cfg.to, cfg.scan_layers) == ("a", "b", "hf", False)
    with pytest.raises(ConfigError, match="c: only source and destination are given without a name"):
        load_config(ConvertConfig, ["a", "b", "c", "--to=hf"], positional)
    with pytest.raises(ConfigError, match="destination is required"):
        load_config(ConvertConfig, ["a", "--to=hf"], positional)


def submit(*args: str) -> JobSubmitConfig:
    return load_config(JobSubmitConfig, ["--name=n", "--compute-type=v6e-8", *args])


def test_a_short_form_is_its_option():
    assert load_config(JobLogsConfig, ["train", "-f"], ("name",)).follow
    assert load_config(JobLogsConfig, ["-f", "train", "-o", "json"], ("name",)).output == "json"
    assert submit("-n", "other").name == "other"
    with pytest.raises(ConfigError, match="--name needs a value"):
        submit("-n")


def test_values_of_a_repeatable_option_add_up_and_a_later_one_of_a_name_wins(tmp_path):
    recipe = tmp_path / "job.yaml"
    recipe.write_text("env: {A: 1, B: '2=3'}\nmount: /a:/a\n")
    cfg = submit(str(recipe), "--env=A=x=y", "--env", "C=", "--mount=/b:/b", "--mount=[/c:/c, /d:/d]", "--env={D: 4}")
    assert cfg.env == {"A": "x=y", "B": "2=3", "C": "", "D": "4"}
    assert cfg.mount == ("/a:/a", "/b:/b", "/c:/c", "/d:/d")


@pytest.mark.parametrize("text", ["--env=A", "--env==1", "--env={A: [1]}", "--env=[{A: 1}]"])
def test_what_is_no_assignment_is_refused_without_its_text(text):
    with pytest.raises(ConfigError, match=r"^env=… is refused: expected NAME=VALUE, may be given several times\. "):
        submit(text)


def test_hyphens_in_names_are_underscores():
    assert submit("--gke-ttl-after-finished=24h").gke_ttl_after_finished == "24h"
