"""What each command accepts, and what it refuses before anything expensive starts."""

import shlex

import pytest
from pydantic import ValidationError

from burnish.config.describe import EVAL_SAMPLING, eval_sampling
from burnish.config.errors import ConfigError
from burnish.config.fields import options_of
from burnish.config.groups import KNOWN_DATASETS
from burnish.config.overrides import load_config
from burnish.config.schema import (
    COMMANDS,
    ChatConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    RunConfig,
    SFTConfig,
)
from burnish.data import sources

# The command lines of the two public tutorials, with shorter paths.
WORKFLOW_A_TRAIN = shlex.split("""
    model_name=llama3.1-8b-Instruct load_parameters_path=/dev/shm/mt-format/0/items
    run_name=2024-11-30-16-13 base_output_directory=/dev/shm/post-train/ chips_per_vm=8 num_batches=50
    num_test_batches=10 rollout_data_parallelism=1 rollout_tensor_parallelism=-1
""")
WORKFLOW_A_EXPORT = shlex.split("""
    model_name=llama3.1-8b load_parameters_path=/dev/shm/run/checkpoints/actor/50/model_params
    base_output_directory=/dev/shm/hf-trained/ scan_layers=True use_multimodal=False weight_dtype=bfloat16
""")
WORKFLOW_B_TRAIN = shlex.split("""
    run_name=rl base_output_directory=gs://b/trained/ model_name=gemma4-26b scan_layers=False
    load_parameters_path=gs://b/max-text-format/0/items/ hf_access_token=secret
    data_template_path=maxtext/examples/chat_templates/openmathinstruct2_rl.json num_batches=50 batch_size=4
    train_micro_batch_size=2 max_target_length=640 max_prefill_predict_length=256 mu_dtype=bfloat16
    grad_dtype=bfloat16 rollout_tensor_parallelism=4 rollout_expert_parallelism=1 trainer_devices_fraction=0.5
    sampler_devices_fraction=0.5 tokenizer_path=google/gemma-4-26b-a4b-it ici_tensor_parallelism=2
    ici_expert_parallelism=4 ici_fsdp_parallelism=-1 hbm_utilization_vllm=0.7 remat_policy=full
    async_scheduling=False allow_split_physical_axes=true ragged_gather_reduce_fallback=True
    enable_dp_attention=False decode_sampling_temperature=0.8 decode_sampling_top_k=50
    decode_sampling_nucleus_p=0.95 learning_rate=2e-5 learning_rate_schedule_steps=100 rl.num_generations=4
    rl.reshard_chunk_size=4 debug=True vllm_hf_overrides="{'architectures': ['Gemma4']}"
    vllm_additional_config='{"sharding": {"strategy": 1}}'
""")
VLLM_OF_WORKFLOW_B = ("hbm_utilization_vllm", "vllm_hf_overrides", "vllm_additional_config")
WORKFLOW_B_EXPORT = shlex.split("""
    model_name=gemma4-26b hf_access_token=secret load_parameters_path=gs://b/checkpoints/actor/50/model_params/
    base_output_directory=gs://b/hf-trained/ skip_jax_distributed_system=true hardware=cpu scan_layers=False
    use_multimodal=False weight_dtype=bfloat16 --override_model_architecture
""")


def run(*args: str) -> RunConfig:
    return load_config(RunConfig, ["load_parameters_path=m", *args])


def problem(*args: str) -> str:
    with pytest.raises(ConfigError) as error:
        run(*args)
    return str(error.value)


def test_command_lines_of_the_one_host_tutorial_are_accepted():
    cfg = load_config(RunConfig, WORKFLOW_A_TRAIN)
    assert (cfg.run_name, cfg.num_batches, cfg.num_test_batches) == ("2024-11-30-16-13", 50, 10)
    export = load_config(ExportConfig, WORKFLOW_A_EXPORT)
    assert export.weight_dtype == "bfloat16"


def test_command_line_of_the_many_host_tutorial_is_accepted_with_the_engine_that_it_samples_with():
    cfg = load_config(RunConfig, [*WORKFLOW_B_TRAIN, "rollout_engine=vllm"])
    assert (cfg.learning_rate, cfg.rl.num_generations, cfg.debug, cfg.mu_dtype) == (2e-5, 4, True, "bfloat16")
    assert (cfg.hbm_utilization_vllm, cfg.ici_expert_parallelism, cfg.trainer_devices_fraction) == (0.7, 4, 0.5)


def test_options_of_vllm_are_refused_where_it_does_not_sample():
    assert run("rollout_engine=vllm", "hbm_utilization_vllm=0.5").hbm_utilization_vllm == 0.5
    for option in (
        "hbm_utilization_vllm=0.5",
        "vllm_hf_overrides={a: 1}",
        "rollout_timeout=5",
        "async_scheduling=true",
    ):
        message = problem(option)
        assert option.split("=")[0] in message
        assert "rollout_engine=vllm" in message
    message = problem(*WORKFLOW_B_TRAIN)  # all of them at once, so that they are left out at once
    assert all(f"{name}=" in message for name in VLLM_OF_WORKFLOW_B)
    run(*(arg for arg in WORKFLOW_B_TRAIN if arg.partition("=")[0] not in VLLM_OF_WORKFLOW_B))
    assert "vllm_python=/no/such/python" in problem("rollout_engine=vllm", "vllm_python=/no/such/python")


def test_export_of_the_many_host_tutorial_is_accepted_whole():
    cfg = load_config(ExportConfig, WORKFLOW_B_EXPORT)
    assert cfg.override_model_architecture
    assert cfg.scan_layers is False


def test_image_parts_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"^use_multimodal=true is not supported yet .*; accepted: false$"):
        load_config(ExportConfig, [*WORKFLOW_B_EXPORT, "use_multimodal=true"])


def test_defaults_are_those_of_the_tutorials():
    cfg = run()
    assert (cfg.batch_size, cfg.num_batches, cfg.num_test_batches) == (1, 4, 5)
    assert (cfg.rl.num_generations, cfg.rl.num_iterations, cfg.rl.grpo_beta) == (2, 1, 0.08)
    assert (cfg.rl.grpo_epsilon, cfg.rl.resolved_epsilon_high) == (0.2, 0.2)
    assert (cfg.rl.loss_algo, cfg.rl.loss_agg_mode) == ("grpo", "sequence-mean-token-mean")
    assert (cfg.learning_rate, cfg.adam_b1, cfg.adam_b2) == (3e-6, 0.9, 0.99)
    assert cfg.gradient_clipping_threshold == 0.1
    assert (cfg.max_prefill_predict_length, cfg.max_target_length) == (256, 1024)
    assert (cfg.decode_sampling_temperature, cfg.decode_sampling_top_k, cfg.decode_sampling_nucleus_p) == (
        0.9,
        50,
        1,
    )
    assert (cfg.reward_exact_answer, cfg.reward_white_space_format_match, cfg.reward_exact_format_match) == (
        1,
        1,
        0.1,
    )
    assert (cfg.checkpoint_period, cfg.max_num_checkpoints_to_keep, cfg.enable_checkpointing) == (
        50,
        10,
        True,
    )
    assert (cfg.dataset_name, cfg.data_template_path, cfg.data_shuffle_seed) == (
        "openai/gsm8k",
        "gsm8k_rl.json",
        42,
    )
    assert (cfg.math_verify_timeout, cfg.num_epoch, cfg.train_fraction) == (120, 1, 1)


@pytest.mark.parametrize("config", dict.fromkeys(COMMANDS.values()))
def test_every_option_has_a_section_and_one_sentence_of_meaning(config):
    for info in options_of(config):
        assert info.section, info.name
        assert info.meaning, info.name
        assert not info.meaning.endswith("."), info.name
        assert info.type_words, info.name


@pytest.mark.parametrize(
    "args",
    [
        ["batch_size=0"],
        ["num_batches=0"],
        ["rl.num_generations=1"],
        ["rl.num_iterations=0"],
        ["rl.grpo_epsilon=1"],
        ["rl.epsilon_high=0"],
        ["rl.loss_algo=ppo"],
        ["learning_rate=0"],
        ["learning_rate=nan"],
        ["learning_rate=inf"],
        ["learning_rate=1e30"],
        ["eval_sampling_strategy=gready"],
        ["eval_mode=best"],
        ["num_eval_passes=0"],
        ["num_test_batches=-2"],
        ["train_micro_batch_size=0"],
        ["max_num_seqs=0"],
        ["decode_sampling_nucleus_p=0"],
        ["decode_sampling_top_k=-1"],
        ["optimizer=sgd"],
        ["run_name=a/b"],
        ["run_name=.."],
        ["train_fraction=0"],
        ["penalty_incorrect_answer=1"],
        ["max_failed_scores_fraction=1.5"],
        ["chips_per_vm=0"],
    ],
)
def test_values_out_of_range_are_refused_by_name_and_value(args):
    assert problem(*args).startswith(f"{args[0]} is refused: expected ")


def test_a_micro_batch_must_divide_the_batch_and_both_numbers_are_named():
    assert problem("batch_size=8", "train_micro_batch_size=3") == (
        "train_micro_batch_size=3 does not divide batch_size=8; it can be 1, 2, 4, 8"
    )
    assert "rollout_micro_batch_size=16 does not divide batch_size=8" in problem(
        "batch_size=8", "rollout_micro_batch_size=16"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["max_prefill_predict_length=1024"], ["max_prefill_predict_length=1024", "max_target_length=1024"]),
        (["reward_functions_path=r.py"], ["reward_functions_path=r.py", "needs reward_functions"]),
        (["reward_functions=a,b"], ["reward_functions=a,b", "needs reward_functions_path"]),
        (["reward_functions_path=r.py", "reward_functions=a-b"], ["'a-b'"]),
        (["reward_functions_path=r.py", "reward_functions=a,a"], ["'a' is given twice"]),
        (["dataset_name=builtin", "question_column=nope"], ["question_column=nope", "builtin"]),
        (["dataset_name=builtin", "answer_column=nope"], ["answer_column=nope", "builtin"]),
        (["dataset_name=builtin", "train_split=nope"], ["train_split=nope", "splits train and test"]),
        (["eval_dataset_name=builtin", "eval_split=nope"], ["eval_split=nope", "splits train and test"]),
        (["stop_strings=['a', '']"], ["stop_strings", "needs a character"]),
        (["stop_strings=[]"], ["stop_strings"]),
        (["resume=true"], ["run_name"]),
        (["resume=true", "run_name=r", "enable_checkpointing=false"], ["enable_checkpointing=false"]),
        (["decode_sampling_temperature=0"], ["decode_sampling_temperature=0"]),
        (["decode_sampling_top_k=1"], ["decode_sampling_top_k=1"]),
        (["num_eval_passes=4"], ["num_eval_passes=4", "greedy"]),
        (["num_batches=20", "learning_rate_schedule_steps=10"], ["learning_rate_schedule_steps=10", "20"]),
        (["num_batches=5", "rl.num_iterations=4", "learning_rate_schedule_steps=10"], ["20 updates"]),
        (["dataset_name=json"], ["hf_train_files"]),
        (["dataset_name=openai/gsm9k"], ["dataset_name=openai/gsm9k", "openai/gsm8k", "question_column"]),
        (["dataset_name=builtin", "hf_train_files=a.jsonl"], ["builtin", "hf_train_files"]),
        (["eval_dataset_name=builtin", "hf_eval_files=a.jsonl"], ["builtin", "hf_eval_files"]),
        (["eval_dataset_name=json"], ["json", "hf_eval_files"]),
        (["solution_end_token=<answer>"], ["solution_end_token=<answer>"]),
        (["reasoning_start_token="], ["reasoning_start_token"]),
        (
            ["reward_exact_answer=0", "reward_white_space_format_match=0", "reward_exact_format_match=0"],
            ["nothing can be learnt"],
        ),
        (
            ["rollout_tensor_parallelism=-1"],
            ["rollout_data_parallelism=-1 and rollout_tensor_parallelism=-1"],
        ),
        (["ici_data_parallelism=-1"], ["ici_data_parallelism=-1 and ici_fsdp_parallelism=-1"]),
        (["trainer_devices_fraction=0.5"], ["trainer_devices_fraction=0.5 and sampler_devices_fraction=1 overlap"]),
        (["trainer_devices_fraction=0.7", "sampler_devices_fraction=0.5"], ["overlap", "0.5 and 0.5"]),
        (["rl.off_policy_steps=1"], ["rl.off_policy_steps=1", "sampler_devices_fraction=0.5"]),
    ],
)
def test_options_that_contradict_each_other_are_refused_in_one_line(args, words):
    message = problem(*args)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_data_sets_known_by_name_are_those_that_the_data_room_can_read():
    assert set(KNOWN_DATASETS) == {"builtin", "json", "parquet", *sources._LAYOUTS}


def test_options_that_fit_together_are_accepted():
    run("reward_functions_path=r.py", "reward_functions=a, b", "batch_size=8", "train_micro_batch_size=4")
    run("dataset_name=me/mine", "question_column=q", "answer_column=a")
    run("dataset_name=json", "hf_train_files=[a.jsonl, b.jsonl]")
    run("dataset_name=builtin", "eval_dataset_name=json", "hf_eval_files=a.jsonl")
    run("num_eval_passes=4", "eval_sampling_strategy=standard", "eval_mode=maj")
    run("num_test_batches=0", "learning_rate_schedule_steps=100")


def test_minus_one_and_null_come_to_what_they_stand_for():
    cfg = run("batch_size=8", "rl.num_generations=4", "rl.num_iterations=3", "num_batches=10")
    assert cfg.resolved_train_micro_batch_size == 8
    assert cfg.resolved_rollout_micro_batch_size == 8
    assert cfg.resolved_eval_batch_size == 8
    assert cfg.resolved_max_num_seqs == 32
    assert cfg.num_updates == 30
    assert cfg.resolved_eval_dataset_name == "openai/gsm8k"
    given = run("batch_size=8", "rollout_micro_batch_size=2", "eval_batch_size=5", "rl.epsilon_high=0.3")
    assert (given.resolved_max_num_seqs, given.resolved_eval_batch_size) == (4, 5)
    assert given.rl.resolved_epsilon_high == 0.3


def test_evaluation_strategies_are_those_of_the_tutorials():
    assert eval_sampling(run()) == (0.01, 1, 1.0)
    assert EVAL_SAMPLING["standard"] == (0.7, 50, 0.95)
    assert EVAL_SAMPLING["liberal"] == (0.85, 2000, 1.0)


def test_the_token_is_in_no_dump_and_in_no_message():
    cfg = run("hf_access_token=hf_secret")
    assert cfg.hf_access_token is not None
    assert cfg.hf_access_token.get_secret_value() == "hf_secret"
    assert "hf_access_token" not in cfg.public_dump()
    assert "hf_secret" not in repr(cfg) + cfg.model_dump_json() + problem("hf_access_token=hf_secret", "batch_size=0")
    with pytest.raises(ValidationError) as error:
        RunConfig(load_parameters_path="m", hf_access_token="hf_secret", max_target_length=2)
    assert "hf_secret" not in str(error.value)


@pytest.mark.parametrize("config", [RunConfig, SFTConfig, EvalConfig, GenerateConfig, ChatConfig])
def test_a_config_is_the_same_after_dump_and_load(config):
    cfg = load_config(
        config,
        ["load_parameters_path=m", "stop_strings=['a']"] if config is not SFTConfig else ["load_parameters_path=m"],
    )
    assert config(**cfg.public_dump()) == cfg


def test_a_config_cannot_be_changed_after_it_was_checked():
    with pytest.raises(ValidationError):
        run().batch_size = 0  # type: ignore[misc]


def test_commands_accept_only_what_they_read():
    for config, arg in [
        (ChatConfig, "prompt=x"),
        (EvalConfig, "learning_rate=1"),
        (SFTConfig, "rl.grpo_beta=0"),
    ]:
        with pytest.raises(ConfigError, match="unknown option"):
            load_config(config, ["load_parameters_path=m", arg])


def test_evaluation_of_files_needs_files():
    with pytest.raises(ConfigError, match="hf_eval_files"):
        load_config(EvalConfig, ["load_parameters_path=m", "dataset_name=json"])
    load_config(EvalConfig, ["load_parameters_path=m", "dataset_name=json", "hf_eval_files=a.jsonl"])


def test_prompts_of_generate_come_from_one_place():
    with pytest.raises(ConfigError, match="both given"):
        load_config(GenerateConfig, ["load_parameters_path=m", "prompt=a", "prompts_file=b"])


@pytest.mark.parametrize("cls", [RunConfig, ExportConfig])
def test_an_empty_path_is_no_place_for_weights(cls):
    with pytest.raises(ConfigError, match=r"load_parameters_path= is empty; give a directory"):
        load_config(cls, ["load_parameters_path=", "base_output_directory=out"])
