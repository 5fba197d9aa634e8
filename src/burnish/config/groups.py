"""Groups of options that commands share: one class per subject, one field per option.

Names and meanings are MaxText's where it has the option, so that its command lines run here. A group checks
only its own fields against one another; schema.py puts groups together into commands and checks across them.
"""

import re
import shutil
import time
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, SecretStr, model_validator

from burnish.config.fields import AllOrCount, Allowed, OneDevice, Options, TestCount, option, value_words

Dtype = Literal["float32", "bfloat16"]

TextList = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


def _split_names(value: Any) -> Any:
    return tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value


NameList = Annotated[tuple[str, ...], BeforeValidator(_split_names)]

DirectoryName = Annotated[
    str,
    Allowed(
        "letters, digits, '.', '_' and '-', beginning with a letter or digit",
        lambda text: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is not None,
    ),
]

RepositoryName = Annotated[
    str,
    Allowed(
        "owner/name, each of letters, digits, '.', '_' and '-'",
        lambda text: re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", text, re.ASCII) is not None,
    ),
]


class HubOptions(Options):
    section: ClassVar[str] = "Model"

    model_name: str | None = option(
        None,
        "Name of a preset architecture, e.g. llama3.1-8b-Instruct; used where the checkpoint has no "
        "config.json, "
        "compared with it where it has one",
        default_words="from the checkpoint",
    )
    hf_access_token: SecretStr | None = option(
        None,
        "Hugging Face token for private and gated repositories; never written to disk or shown",
        default_words="environment variable HF_TOKEN",
    )


class WeightsOptions(HubOptions):
    section: ClassVar[str] = "Model"

    load_parameters_path: str = option(
        ...,
        "The weights to start from: a Hugging Face directory, a hub id, a MaxText checkpoint, or a training checkpoint "
        "(…/checkpoints/actor/<step>/model_params)",
    )


class ConversionOptions(HubOptions):
    """What conversions share, whatever the direction."""

    section: ClassVar[str] = "Conversion"

    hf_model_path: str | None = option(
        None,
        "Hugging Face directory or hub id that config.json, tokenizer and the like are taken from (and, by "
        "to-maxtext, the weights)",
        default_words="what was saved with the checkpoint, or model_name's own",
    )
    weight_dtype: Literal["float32", "bfloat16", "float16"] | None = option(
        None, "Type of the written tensors", default_words="each tensor's type in the source checkpoint"
    )
    override_model_architecture: bool = option(
        False, "Where model_name and the checkpoint disagree about the architecture, go by the checkpoint"
    )
    use_multimodal: Annotated[bool, OneDevice((False,), "models read text only")] = option(
        False, "Convert the model's image and audio parts; false leaves them out and says so"
    )
    lazy_load_tensors: Annotated[
        bool, OneDevice((), "conversions always read tensors piece by piece when they are needed")
    ] = option(True, "Changes nothing: tensors are always read when they are needed, never all at the start")
    hardware: Annotated[Literal["cpu"], OneDevice(("cpu",), "conversions run on the CPU")] = option(
        "cpu", "Where the conversion runs"
    )
    skip_jax_distributed_system: Annotated[bool, OneDevice((True,), "a conversion is one process")] = option(
        True, "Run as one process, without starting JAX's distributed system"
    )


class MaxTextStorageOptions(Options):
    """How a MaxText checkpoint is laid out on disk."""

    section: ClassVar[str] = "Conversion"

    checkpoint_storage_use_zarr3: bool = option(True, "Store arrays as Zarr 3; false is Zarr 2, which Pathways wants")
    checkpoint_storage_use_ocdbt: bool = option(
        True, "Store all arrays in one OCDBT store; false gives each its directory, which Pathways wants"
    )


class ModelOptions(WeightsOptions):
    section: ClassVar[str] = "Model"

    tokenizer_path: str | None = option(None, "Tokenizer: a directory or a hub id", default_words="from the checkpoint")
    chat_template_path: str | None = option(
        None,
        "File with a Jinja chat template, for tokenizers that have none or in place of theirs",
        default_words="the tokenizer's",
    )


class ComputeOptions(Options):
    section: ClassVar[str] = "Compute"

    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto",
        "Type of activations and matrix products; auto is bfloat16 on TPU and GPU, float32 on CPU",
    )
    seed: int = option(
        0,
        "Seed of everything random but the data order: sampling, new weights, stochastic rounding",
        ge=0,
        lt=2**31,
    )


class TrainComputeOptions(ComputeOptions):
    weight_dtype: Dtype = option(
        "float32",
        "Type of the trained master weights; bfloat16 halves their memory and rounds every update stochastically",
    )
    grad_dtype: Dtype = option("float32", "Type in which gradients are accumulated over micro-batches")
    remat_policy: Literal["full", "minimal", "none"] = option(
        "full",
        "What the backward pass recomputes: full recomputes each layer from its input, minimal keeps the "
        "results "
        "of matrix products, none keeps everything",
    )


class RunOptions(Options):
    section: ClassVar[str] = "Run"

    base_output_directory: str = option("runs", "Directory under which the run's own directory is made")
    run_name: DirectoryName = option(
        None,
        "Name of the run and of its directory; a directory belongs to one run",
        default_words="date and time of the start",
        default_factory=lambda: time.strftime("%Y-%m-%d-%H-%M-%S"),
    )
    resume: bool = option(False, "Go on from the newest complete checkpoint of run_name instead of starting a new run")
    enable_checkpointing: bool = option(True, "Write checkpoints")
    checkpoint_period: int = option(50, "Steps between checkpoints; the last step is always saved", unit="steps", ge=1)
    max_num_checkpoints_to_keep: int = option(
        10, "Checkpoints kept; older ones are deleted once a newer one is complete", unit="checkpoints", ge=1
    )
    checkpoint_storage_use_ocdbt: bool | None = option(
        None,
        "Store all arrays of a checkpoint in one OCDBT store; false gives each its directory",
        default_words="true, false under Pathways",
    )
    checkpoint_storage_use_zarr3: bool | None = option(
        None, "Store arrays of a checkpoint as Zarr 3; false is Zarr 2", default_words="true, false under Pathways"
    )
    log_period: int = option(1, "Steps between lines in the terminal; metrics.jsonl has every step", unit="steps", ge=1)
    tensorboard_dir: str | None = option(
        None, "Directory for TensorBoard events", default_words="tensorboard/ in the run's directory"
    )
    profiler: Literal["", "xplane"] = option(
        "", "xplane writes a trace of a few steps after warm-up for TensorBoard's profiler"
    )

    @model_validator(mode="after")
    def _resume_has_something_to_resume(self) -> Self:
        if self.resume and "run_name" not in self.model_fields_set:
            raise ValueError("resume=true needs run_name: the run to go on with")
        if self.resume and not self.enable_checkpointing:
            raise ValueError("resume=true and enable_checkpointing=false contradict each other")
        return self


class RLRunOptions(RunOptions):
    debug: bool = option(False, "Show one completion of every step with the parts of its reward")


class OptimizerOptions(Options):
    section: ClassVar[str] = "Optimizer"

    optimizer: Literal["adamw", "adafactor"] = option(
        "adamw",
        "AdamW (Loshchilov & Hutter 2019), or Adafactor (Shazeer & Stern 2018), whose state is much smaller",
    )
    learning_rate: float = option(3e-6, "Peak learning rate; an update moves a weight by about as much", gt=0, le=1)
    warmup_steps_fraction: float = option(
        0.1, "Share of the schedule in which the rate rises linearly from 0 to its peak", ge=0, le=1
    )
    learning_rate_schedule_steps: AllOrCount = option(
        -1,
        "Length of the schedule, warm-up then cosine decay to 0; -1 is the run's own number of updates",
        unit="optimizer updates",
    )
    adam_b1: float = option(0.9, "Decay of the first moment", ge=0, lt=1)
    adam_b2: float = option(0.99, "Decay of the second moment", ge=0, lt=1)
    adam_eps: float = option(1e-8, "Added to the root of the second moment", gt=0)
    adam_weight_decay: float = option(0.0, "Decoupled weight decay, times the learning rate", ge=0)
    gradient_clipping_threshold: float = option(
        0.1, "Largest global norm of the gradient, scaled down to it; 0 clips nothing", ge=0
    )
    mu_dtype: Dtype = option("float32", "Type of the optimizer's first moment")


KNOWN_DATASETS = (
    "builtin",
    "openai/gsm8k",
    "nvidia/OpenMathInstruct-2",
    "nvidia/OpenMathReasoning",
    "open-r1/OpenR1-Math-220k",
    "bethgelab/CuratedThoughts",
    "json",
    "parquet",
)


class DataOptions(Options):
    section: ClassVar[str] = "Data"

    dataset_name: str = option(
        "openai/gsm8k",
        "builtin (generated word problems), json or parquet (files of hf_train_files), or a data set of the "
        "hub; "
        f"known by name: {', '.join(KNOWN_DATASETS)}; any other needs question_column and answer_column",
    )
    eval_dataset_name: str | None = option(None, "Data set of evaluations", default_words="dataset_name")
    train_split: str = option("train", "Split to train on")
    eval_split: str = option(
        "test", "Split to evaluate on; a data set without it is split 95/5, the same way each time"
    )
    hf_subset: str | None = option(
        None,
        "Configuration of the hub data set",
        default_words="main for openai/gsm8k, else the hub's default",
    )
    hf_train_files: TextList | None = option(
        None, "Local files (JSONL or Parquet) to read in place of the hub's training split"
    )
    hf_eval_files: TextList | None = option(
        None, "Local files (JSONL or Parquet) to read in place of the hub's evaluation split"
    )
    question_column: str | None = option(
        None, "Column that holds the question", default_words="the data set's own, else question"
    )
    answer_column: str | None = option(
        None, "Column that holds the answer", default_words="the data set's own, else answer"
    )
    dataset_processor_path: str | None = option(
        None, "Python file whose process_data(row) makes prompt, question and answer of a row"
    )
    data_template_path: str = option(
        "gsm8k_rl.json",
        "JSON file with SYSTEM_PROMPT and TEMPLATE that make the user turn, by path or by the name of a "
        "built-in one "
        "(gsm8k_rl.json, openmathinstruct2_rl.json)",
    )
    data_shuffle_seed: int = option(42, "Seed of the data order and of the 95/5 split", ge=0, lt=2**31)

    @model_validator(mode="after")
    def _data_can_be_found(self) -> Self:
        own_columns = self.dataset_processor_path or (self.question_column and self.answer_column)
        evaluated = self.resolved_eval_dataset_name
        for name, value in (("dataset_name", self.dataset_name), ("eval_dataset_name", evaluated)):
            if value not in KNOWN_DATASETS and not own_columns:
                raise ValueError(
                    f"{name}={value} is none of the data sets known by name ({', '.join(KNOWN_DATASETS)}); "
                    "give question_column and answer_column, or dataset_processor_path"
                )
        for files_option, value, files in (
            ("hf_train_files", self.dataset_name, self.hf_train_files),
            ("hf_eval_files", evaluated, self.hf_eval_files),
        ):
            if value == "builtin" and files:
                raise ValueError(f"builtin data reads no files, but {files_option} is given; give one of the two")
        for split_option, value, split in (
            ("train_split", self.dataset_name, self.train_split),
            ("eval_split", evaluated, self.eval_split),
        ):
            if value == "builtin" and split not in ("train", "test"):
                raise ValueError(f"{split_option}={split}: builtin data has the splits train and test")
        if self.dataset_name == evaluated == "builtin":
            for unread in ("question_column", "answer_column", "dataset_processor_path"):
                if getattr(self, unread) is not None:
                    raise ValueError(
                        f"{unread}={getattr(self, unread)}: builtin data has no rows to read; leave it out"
                    )
        own_split = evaluated == self.dataset_name
        if evaluated in ("json", "parquet") and not (self.hf_eval_files or (own_split and self.hf_train_files)):
            if own_split:
                needed = "hf_train_files (5 % of which are then for evaluation) or hf_eval_files"
                raise ValueError(f"dataset_name={evaluated} needs {needed}")
            raise ValueError(f"eval_dataset_name={evaluated} needs hf_eval_files")
        return self

    @property
    def resolved_eval_dataset_name(self) -> str:
        return self.eval_dataset_name or self.dataset_name


class TrainDataOptions(DataOptions):
    num_epoch: int = option(1, "Largest number of passes over the training data", unit="passes", ge=1)
    train_fraction: float = option(1.0, "Share of the training data that is used", gt=0, le=1)

    @model_validator(mode="after")
    def _train_files_are_given(self) -> Self:
        if self.dataset_name in ("json", "parquet") and not self.hf_train_files:
            raise ValueError(f"dataset_name={self.dataset_name} needs hf_train_files: the files to train on")
        return self


class LengthOptions(Options):
    section: ClassVar[str] = "Lengths"

    max_prefill_predict_length: int = option(
        256, "Longest prompt; longer ones are left out of the data and counted", unit="tokens", ge=1
    )
    max_target_length: int = option(1024, "Longest prompt and completion together", unit="tokens", ge=2)

    @model_validator(mode="after")
    def _completions_have_room(self) -> Self:
        if self.max_prefill_predict_length >= self.max_target_length:
            raise ValueError(
                f"max_prefill_predict_length={self.max_prefill_predict_length} leaves no room for a "
                "completion: "
                f"it must be below max_target_length={self.max_target_length}"
            )
        return self


class StopOptions(Options):
    section: ClassVar[str] = "Sampling"

    stop_strings: TextList | None = option(None, "Texts that end a completion, besides the model's own stop tokens")

    @model_validator(mode="after")
    def _stop_strings_are_texts(self) -> Self:
        if self.stop_strings is not None and (not self.stop_strings or "" in self.stop_strings):
            raise ValueError(
                f"stop_strings={list(self.stop_strings)}: every stop string needs a character; null for none"
            )
        return self


class EngineOptions(Options):
    section: ClassVar[str] = "Engine"

    max_num_seqs: int | None = option(
        None,
        "Completions decoded at the same time; fewer need less memory for keys and values",
        unit="completions",
        default_words="all that are asked for at once",
        ge=1,
    )


class RolloutEngineOptions(EngineOptions):
    """Which engine samples; the options that only vLLM has are None where they are not given."""

    rollout_engine: Literal["builtin", "vllm"] = option(
        "builtin", "What samples completions: burnish's own engine, or vLLM in a process of its own"
    )
    vllm_python: str | None = option(
        None,
        "Python interpreter of the environment that vLLM is installed in",
        default_words="the one that runs burnish",
    )
    rollout_timeout: float | None = option(
        None,
        "Longest silence of vLLM's process before it counts as hung; its start may take three times as long",
        unit="seconds",
        default_words="600",
        gt=0,
    )
    rollout_restarts: int | None = option(
        None, "How often vLLM is started again in a run where its process has died or hangs", default_words="1", ge=0
    )
    hbm_utilization_vllm: float | None = option(
        None, "Share of device memory for vLLM", default_words="vLLM's own; on CPU what is needed", gt=0, le=1
    )
    max_num_batched_tokens: int | None = option(
        None, "Most tokens in one step of vLLM", unit="tokens", default_words="vLLM's own", ge=1
    )
    async_scheduling: bool = option(False, "vLLM's asynchronous scheduler")
    enable_prefix_caching: bool | None = option(
        None, "Share the keys and values of equal beginnings of prompts in vLLM", default_words="true"
    )
    vllm_hf_overrides: dict[str, Any] | None = option(None, "Changes to the model's config for vLLM")
    vllm_additional_config: dict[str, Any] | None = option(None, "Further settings for vLLM's platform")

    @model_validator(mode="after")
    def _options_of_vllm_need_vllm(self) -> Self:
        if self.rollout_engine == "vllm":
            if self.vllm_python is not None and shutil.which(self.vllm_python) is None:
                raise ValueError(
                    f"vllm_python={self.vllm_python} is no program that can be run; give the path of the python of "
                    "the environment that vLLM is installed in"
                )
            return self
        given = {name: value for name in _VLLM_OPTIONS if (value := getattr(self, name)) not in (None, False, {})}
        if given:
            words = ", ".join(f"{name}={value_words(value)}" for name, value in given.items())
            have, them = ("has", "it") if len(given) == 1 else ("have", "them")
            raise ValueError(
                f"{words} {have} no effect on rollout_engine=builtin; leave {them} out, or give rollout_engine=vllm"
            )
        return self

    @property
    def resolved_rollout_timeout(self) -> float:
        """Seconds."""
        return 600.0 if self.rollout_timeout is None else self.rollout_timeout

    @property
    def resolved_rollout_restarts(self) -> int:
        return 1 if self.rollout_restarts is None else self.rollout_restarts

    @property
    def resolved_enable_prefix_caching(self) -> bool:
        return self.enable_prefix_caching is not False


_VLLM_OPTIONS = (
    "vllm_python",
    "rollout_timeout",
    "rollout_restarts",
    "hbm_utilization_vllm",
    "max_num_batched_tokens",
    "async_scheduling",
    "enable_prefix_caching",
    "vllm_hf_overrides",
    "vllm_additional_config",
)


class SamplingOptions(Options):
    section: ClassVar[str] = "Sampling"

    decode_sampling_temperature: float = option(
        0.9, "Logits are divided by it; 0 takes the most likely token (not in training)", ge=0
    )
    decode_sampling_top_k: int = option(50, "Only the k most likely tokens are drawn; 0 keeps all", unit="tokens", ge=0)
    decode_sampling_nucleus_p: float = option(
        1.0,
        "Only the most likely tokens that together reach this probability are drawn; 1 keeps all",
        gt=0,
        le=1,
    )
    decode_sampling_min_p: float = option(
        0.0,
        "Tokens less likely than this share of the most likely one are not drawn; 0 keeps all",
        ge=0,
        lt=1,
    )


class EvalOptions(Options):
    section: ClassVar[str] = "Evaluation"

    num_test_batches: TestCount = option(
        5,
        "Batches of an evaluation, so that it asks num_test_batches × eval_batch_size prompts; 0 evaluates "
        "nothing, "
        "-1 the whole split",
        unit="batches",
    )
    eval_batch_size: AllOrCount = option(-1, "Prompts per evaluation batch; -1 is batch_size", unit="prompts")

    @property
    def resolved_eval_batch_size(self) -> int:
        """Prompts per evaluation batch."""
        return self.eval_batch_size


class EvalSamplingOptions(EvalOptions):
    eval_sampling_strategy: Literal["greedy", "standard", "liberal"] = option(
        "greedy",
        "How evaluation samples: greedy (temperature 0.01, top-k 1), standard (0.7, top-k 50, top-p 0.95), "
        "liberal (0.85, top-k 2000, top-p 1)",
    )
    num_eval_passes: int = option(
        1, "Completions per prompt in evaluation: the K of eval_mode", unit="completions", ge=1
    )
    eval_mode: Literal["pass", "maj", "pass_at_1"] = option(
        "pass",
        "When a prompt counts as solved: pass, any of K completions is right (pass@K); maj, the most "
        "frequent answer "
        "is (maj@K); pass_at_1, the mean over the K completions",
    )

    @model_validator(mode="after")
    def _passes_differ(self) -> Self:
        if self.num_eval_passes > 1 and self.eval_sampling_strategy == "greedy":
            raise ValueError(
                f"num_eval_passes={self.num_eval_passes} with eval_sampling_strategy=greedy samples the same "
                "completion every time; give standard or liberal"
            )
        return self


class TrainStepOptions(EvalOptions):
    section: ClassVar[str] = "Steps"

    batch_size: int = option(1, "Prompts per training step", unit="prompts", ge=1)
    num_batches: int = option(4, "Training steps", unit="steps", ge=1)
    train_micro_batch_size: AllOrCount = option(
        -1,
        "Prompts whose forward and backward pass run at once; changes memory, not the result; -1 is the whole batch",
        unit="prompts",
    )

    @model_validator(mode="after")
    def _train_micro_batches_are_whole(self) -> Self:
        check_divides("train_micro_batch_size", self.train_micro_batch_size, self.batch_size)
        return self

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the whole run."""
        return self.num_batches

    @property
    def resolved_eval_batch_size(self) -> int:
        return self.batch_size if self.eval_batch_size == -1 else self.eval_batch_size

    @property
    def resolved_train_micro_batch_size(self) -> int:
        """Prompts per micro-batch of the update."""
        return self.batch_size if self.train_micro_batch_size == -1 else self.train_micro_batch_size


def check_divides(name: str, micro_batch_size: int, batch_size: int) -> None:
    """Raises ValueError unless the micro-batch (-1: the whole batch) divides the batch."""
    if micro_batch_size != -1 and batch_size % micro_batch_size:
        raise ValueError(
            f"{name}={micro_batch_size} does not divide batch_size={batch_size}; "
            f"it can be {', '.join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)}"
        )


class RLOptions(Options):
    section: ClassVar[str] = "Algorithm"

    num_generations: int = option(
        2,
        "Group size G: completions per prompt; an advantage is relative to the group, so one alone has no signal",
        unit="completions",
        ge=2,
    )
    num_iterations: int = option(1, "Optimizer updates on each batch of rollouts (μ)", unit="updates", ge=1)
    grpo_beta: float = option(
        0.08, "Weight of the KL penalty towards the initial weights; 0 keeps no reference model", ge=0
    )
    grpo_epsilon: float = option(0.2, "Clip range: the likelihood ratio is kept above 1 - this", gt=0, lt=1)
    epsilon_high: float | None = option(
        None, "Clip range: the likelihood ratio is kept below 1 + this", default_words="rl.grpo_epsilon", gt=0
    )
    loss_algo: Literal["grpo", "gspo-token"] = option(
        "grpo",
        "grpo, a likelihood ratio per token (Shao et al. 2024); gspo-token, one per sequence (Zheng et al. 2025)",
    )
    loss_agg_mode: Literal["sequence-mean-token-mean", "token-mean", "sequence-mean"] = option(
        "sequence-mean-token-mean",
        "How token losses become one number: mean over sequences of the mean over tokens; mean over all "
        "tokens of "
        "the step; mean over sequences of the sum over tokens",
    )
    advantage_std: Literal["group", "batch", "none"] = option(
        "group",
        "What rewards, less the group's mean, are divided by: the group's standard deviation, the batch's, or nothing",
    )
    mask_truncated_completions: bool = option(False, "Leave completions that reached max_target_length out of the loss")
    max_logprob_difference: float | None = option(
        1.0,
        "Largest mean |Δlogprob| between sampler and trainer in a step; above it the run ends with an error; "
        "null "
        "never ends it",
        unit="nats",
        gt=0,
    )
    off_policy_steps: int = option(
        0,
        "How many steps old the weights may be that sample a batch: 0 samples with the newest; 1 or more samples the "
        "next batch while this one is trained on, with weights one step old, which needs sampler_devices_fraction",
        unit="steps",
        ge=0,
    )
    importance_weight_cap: float = option(
        2.0,
        "With rl.off_policy_steps, a token counts by how much likelier the trainer's weights make it than those that "
        "sampled it, up to this",
        gt=0,
    )
    reshard_chunk_size: int | None = option(
        None,
        "Weight arrays moved from trainer to sampler at once, where each has its own devices or vLLM samples; null "
        "moves all (256 MB to vLLM)",
        unit="arrays",
        ge=1,
    )

    @property
    def resolved_epsilon_high(self) -> float:
        return self.grpo_epsilon if self.epsilon_high is None else self.epsilon_high


class AlgorithmOptions(Options):
    section: ClassVar[str] = "Algorithm"

    rl: RLOptions = RLOptions()


class TagOptions(Options):
    section: ClassVar[str] = "Tags"

    reasoning_start_token: str = option("<reasoning>", "Tag that opens the reasoning, in prompt and reward")
    reasoning_end_token: str = option("</reasoning>", "Tag that closes the reasoning")
    solution_start_token: str = option("<answer>", "Tag that opens the answer")
    solution_end_token: str = option("</answer>", "Tag that closes the answer")

    @model_validator(mode="after")
    def _tags_differ(self) -> Self:
        tags = {
            "reasoning_start_token": self.reasoning_start_token,
            "reasoning_end_token": self.reasoning_end_token,
            "solution_start_token": self.solution_start_token,
            "solution_end_token": self.solution_end_token,
        }
        if "" in tags.values() or len(set(tags.values())) < len(tags):
            raise ValueError(f"tags must be non-empty and differ: {', '.join(f'{k}={v}' for k, v in tags.items())}")
        return self


class RewardStackOptions(Options):
    section: ClassVar[str] = "Rewards"

    reward_exact_answer: float = option(1.0, "Reward of a right answer", ge=0)
    reward_white_space_format_match: float = option(
        1.0, "Reward of an answer that is right only after white space is folded", ge=0
    )
    reward_exact_format_match: float = option(0.1, "Reward of a completion whose tags are exactly in format", ge=0)
    reward_partial_format_match: float = option(0.0, "Reward of each tag that is there exactly once", ge=0)
    penalty_incorrect_format: float = option(0.0, "Added for each tag that is absent or repeated, so at most 0", le=0)
    penalty_incorrect_answer: float = option(0.0, "Added for a wrong answer, so at most 0", le=0)
    reward_gate_on_correctness: bool = option(False, "Give format rewards only to completions whose answer is right")
    reward_functions_path: str | None = option(
        None, "Python file with reward functions that replace the built-in rewards"
    )
    reward_functions: NameList | None = option(
        None,
        "Names of the functions in reward_functions_path, a list or separated by commas; rewards are summed",
    )
    math_verify_timeout: float = option(
        120.0,
        "Deadline for checking one answer, and for one call of a reward function; what is late scores 0 and is counted",
        unit="seconds",
        gt=0,
    )
    math_verify_num_procs: int | None = option(
        None, "Worker processes that check answers", unit="processes", default_words="one per CPU core", ge=1
    )
    max_failed_scores_fraction: float = option(
        0.5,
        "Share of a step's completions that may fail to be scored before the run ends with the first cause",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _rewards_fit_together(self) -> Self:
        if self.reward_functions_path and not self.reward_functions:
            raise ValueError(
                f"reward_functions_path={self.reward_functions_path} needs reward_functions: the names to call in it"
            )
        if self.reward_functions and not self.reward_functions_path:
            raise ValueError(
                f"reward_functions={','.join(self.reward_functions)} needs reward_functions_path: the file they are in"
            )
        for name in self.reward_functions or ():
            if not name.isidentifier():
                raise ValueError(f"reward_functions: {name!r} is not the name of a Python function")
            if self.reward_functions and self.reward_functions.count(name) > 1:
                raise ValueError(f"reward_functions: {name!r} is given twice; give each function once")
        weights = (
            self.reward_exact_answer,
            self.reward_white_space_format_match,
            self.reward_exact_format_match,
            self.reward_partial_format_match,
            self.penalty_incorrect_format,
            self.penalty_incorrect_answer,
        )
        if not self.reward_functions_path and not any(weights):
            raise ValueError("every reward and penalty is 0: nothing can be learnt; give reward_exact_answer=1")
        return self


def _one_is_left_over(options: Options, *names: str) -> None:
    """Raises ValueError where more than one of these options is -1."""
    left_over = [name for name in names if getattr(options, name) == -1]
    if len(left_over) > 1:
        raise ValueError(
            f"{' and '.join(f'{name}=-1' for name in left_over)}: at most one axis can be what is left over"
        )


class MeshOptions(Options):
    section: ClassVar[str] = "Devices and other engines"

    allow_split_physical_axes: bool = option(
        False, "Let a mesh axis span parts of several physical axes of the machine, where sizes allow no other way"
    )


class TrainerMeshOptions(MeshOptions):
    """The mesh on which weights are trained: the product of its axes is the number of devices of a slice."""

    ici_data_parallelism: AllOrCount = option(
        1,
        "Trainer's mesh: copies of the weights, each with its share of the rows; -1 is what is left over",
        unit="devices",
    )
    ici_fsdp_parallelism: AllOrCount = option(
        -1,
        "Trainer's mesh: parts that weights, moments and rows are split into, a layer's weights being gathered when it "
        "is computed; -1 is what is left over",
        unit="devices",
    )
    ici_tensor_parallelism: AllOrCount = option(
        1,
        "Trainer's mesh: parts that heads, MLPs and vocabulary are split into; -1 is what is left over",
        unit="devices",
    )
    ici_expert_parallelism: AllOrCount = option(
        1,
        "Trainer's mesh: parts that the experts and the rows are split into; -1 is what is left over",
        unit="devices",
    )
    dcn_data_parallelism: AllOrCount = option(
        -1, "Slices, each with a copy of the weights; -1 is as many as there are", unit="slices"
    )

    @model_validator(mode="after")
    def _one_trainer_axis_takes_what_is_left(self) -> Self:
        names = ("ici_data_parallelism", "ici_fsdp_parallelism", "ici_tensor_parallelism", "ici_expert_parallelism")
        _one_is_left_over(self, *names)
        return self


class SamplerMeshOptions(MeshOptions):
    """The mesh on which completions are sampled."""

    rollout_data_parallelism: AllOrCount = option(
        -1,
        "Sampler's mesh: copies of the weights, each with its share of the completions; -1 is what is left over",
        unit="devices",
    )
    rollout_tensor_parallelism: AllOrCount = option(
        1,
        "Sampler's mesh: parts that heads, MLPs and vocabulary are split into; -1 is what is left over",
        unit="devices",
    )
    rollout_expert_parallelism: AllOrCount = option(
        1, "Sampler's mesh: parts that the experts are split into; -1 is what is left over", unit="devices"
    )

    @model_validator(mode="after")
    def _one_sampler_axis_takes_what_is_left(self) -> Self:
        names = ("rollout_data_parallelism", "rollout_tensor_parallelism", "rollout_expert_parallelism")
        _one_is_left_over(self, *names)
        return self


class DeviceOptions(TrainerMeshOptions, SamplerMeshOptions):
    """Which devices do what, and options of MaxText's command lines whose subject burnish does not have: see
    fields.OneDevice."""

    chips_per_vm: Annotated[int | None, OneDevice((), "JAX knows the chips of the machine")] = option(
        None, "Accelerator chips of each VM; changes nothing, JAX knows them", unit="chips", ge=1
    )
    trainer_devices_fraction: float = option(
        1.0,
        "Share of the devices that trains, the first ones; with both shares 1 all devices do both in turn",
        gt=0,
        le=1,
    )
    sampler_devices_fraction: float = option(1.0, "Share of the devices that samples, the last ones", gt=0, le=1)
    scan_layers: Annotated[
        bool, OneDevice((), "checkpoints of either layout are read, and training scans whatever repeats")
    ] = option(True, "Whether MaxText's checkpoint has its layers stacked")
    use_multimodal: Annotated[bool, OneDevice((False,), "models read text only")] = option(
        False, "Use the model's image and audio parts"
    )
    ragged_gather_reduce_fallback: Annotated[
        bool, OneDevice((True,), "what experts give is combined by plain operations")
    ] = option(True, "Combine experts with plain operations instead of a special kernel")
    enable_dp_attention: Annotated[bool, OneDevice((False,), "it is for vLLM on TPU, which does not sample here")] = (
        option(False, "vLLM's data-parallel attention on TPU")
    )

    @property
    def has_split_devices(self) -> bool:
        """Whether trainer and sampler have devices of their own."""
        return (self.trainer_devices_fraction, self.sampler_devices_fraction) != (1.0, 1.0)

    @model_validator(mode="after")
    def _shares_do_not_overlap(self) -> Self:
        trainer, sampler = self.trainer_devices_fraction, self.sampler_devices_fraction
        if self.has_split_devices and trainer + sampler > 1:
            raise ValueError(
                f"trainer_devices_fraction={trainer:g} and sampler_devices_fraction={sampler:g} overlap: give shares "
                "that come to 1 at most, such as 0.5 and 0.5, or 1 and 1 for all devices doing both in turn"
            )
        return self
