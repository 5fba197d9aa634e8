"""The options of each command: RunConfig and its siblings, made of the groups of options beside it.

Constructing one checks everything that can be known without touching a file, a network or a device. Values
that depend on others (-1, null) are kept as given; `resolved_*` says what they come to.
"""

import time
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from burnish.config.cloud import (
    ClusterAccessOptions,
    ClusterNodesOptions,
    ClusterPartsOptions,
    ClusterPlaceOptions,
    ConfirmOptions,
    DryRunOptions,
    VmMachineOptions,
    VmNameOptions,
)
from burnish.config.devices import DeviceOptions, SamplerMeshOptions, TrainerMeshOptions
from burnish.config.fields import AllOrCount, Options, option
from burnish.config.groups import (
    AlgorithmOptions,
    ComputeOptions,
    ConversionOptions,
    DataOptions,
    DirectoryName,
    EvalSamplingOptions,
    HubOptions,
    LengthOptions,
    MaxTextStorageOptions,
    ModelOptions,
    OptimizerOptions,
    RepositoryName,
    RewardStackOptions,
    RLRunOptions,
    RunOptions,
    TagOptions,
    TrainComputeOptions,
    TrainDataOptions,
    TrainStepOptions,
    WeightsOptions,
    check_divides,
)
from burnish.config.jobs import (
    JobClusterObjectsOptions,
    JobDescriptionOptions,
    JobDryRunOptions,
    JobEndOptions,
    JobEnvironmentOptions,
    JobHostsOptions,
    JobNameOptions,
    JobOutputOptions,
    JobPathwaysOptions,
    JobPlaceOptions,
)
from burnish.config.rollout import EngineOptions, RolloutEngineOptions, SamplingOptions, StopOptions


class CommandConfig(Options):
    """What all commands' options have in common."""

    def public_dump(self) -> dict[str, Any]:
        """The options as JSON-able values, without secrets; the same class can be built from it again."""
        return self.model_dump(mode="json", exclude={"hf_access_token"})

    @model_validator(mode="after")
    def _weights_have_a_place(self) -> Self:
        """An empty path would be the current directory."""
        if isinstance(self, WeightsOptions) and not self.load_parameters_path.strip():
            raise ValueError("load_parameters_path= is empty; give a directory, a hub id or a training checkpoint")
        return self


class TrainingConfig(OptimizerOptions, TrainComputeOptions, TrainStepOptions):
    """What the two training commands share: an optimizer that makes a known number of updates."""

    @model_validator(mode="after")
    def _schedule_lasts_the_run(self) -> Self:
        if self.learning_rate_schedule_steps != -1 and self.learning_rate_schedule_steps < self.num_updates:
            raise ValueError(
                f"learning_rate_schedule_steps={self.learning_rate_schedule_steps} ends before the run's "
                f"{self.num_updates} updates, the rest of which would train with learning rate 0; "
                f"give -1 or at least {self.num_updates}"
            )
        return self


class RunConfig(
    CommandConfig,
    ModelOptions,
    RLRunOptions,
    TrainDataOptions,
    LengthOptions,
    TrainingConfig,
    AlgorithmOptions,
    SamplingOptions,
    StopOptions,
    RolloutEngineOptions,
    EvalSamplingOptions,
    TagOptions,
    RewardStackOptions,
    DeviceOptions,
):
    """Options of train-rl."""

    section: ClassVar[str] = "Steps"

    rollout_micro_batch_size: AllOrCount = option(
        -1, "Prompts whose completions are sampled at once; -1 is the whole batch", unit="prompts"
    )

    @model_validator(mode="after")
    def _old_weights_sample_elsewhere(self) -> Self:
        if self.rl.off_policy_steps and not self.has_split_devices:
            raise ValueError(
                f"rl.off_policy_steps={self.rl.off_policy_steps} samples while it trains, for which the sampler needs "
                "devices of its own: give trainer_devices_fraction=0.5 and sampler_devices_fraction=0.5, or "
                "rl.off_policy_steps=0"
            )
        return self

    @model_validator(mode="after")
    def _rollouts_fit_the_update(self) -> Self:
        check_divides("rollout_micro_batch_size", self.rollout_micro_batch_size, self.batch_size)
        if self.decode_sampling_temperature == 0 or self.decode_sampling_top_k == 1:
            raise ValueError(
                f"decode_sampling_temperature={self.decode_sampling_temperature:g} with "
                f"decode_sampling_top_k={self.decode_sampling_top_k} samples the same completion for a whole "
                "group, "
                "so that no advantage is left; training needs a temperature above 0 and a top-k other than 1"
            )
        return self

    @property
    def num_updates(self) -> int:
        return self.num_batches * self.rl.num_iterations

    @property
    def resolved_rollout_micro_batch_size(self) -> int:
        """Prompts per micro-batch of the sampler."""
        return self.batch_size if self.rollout_micro_batch_size == -1 else self.rollout_micro_batch_size

    @property
    def resolved_max_num_seqs(self) -> int:
        """Completions decoded at the same time."""
        return self.max_num_seqs or self.resolved_rollout_micro_batch_size * self.rl.num_generations


class PlanConfig(RunConfig):
    """Options of plan: those of the run, and what to plan it for."""

    section: ClassVar[str] = "Plan"

    topology: str = option(
        ...,
        "Devices to plan for: chip and number (v6e-8), chip and shape of a slice (v6e:4x8), GPUs of one node (h100-8), "
        "or virtual devices of this machine (cpu-8); with dcn_data_parallelism above 1, that many such slices of TPUs",
    )
    prompt_tokens: int | None = option(
        None,
        "Length of a prompt that times are estimated for; memory is always planned for the longest",
        unit="tokens",
        default_words="max_prefill_predict_length",
        ge=1,
    )
    completion_tokens: int | None = option(
        None,
        "Length of a completion that times are estimated for; memory is always planned for the longest",
        unit="tokens",
        default_words="all that max_target_length leaves",
        ge=1,
    )
    price_per_chip_hour: float | None = option(
        None, "What an hour of one chip costs, in any currency", default_words="no price is shown", ge=0
    )
    exact: bool = option(
        False,
        "Compile as training does; false compiles several times faster, with temporaries up to a fifth smaller; "
        "for GPUs always true",
    )
    search: bool = option(
        False,
        "Where the run does not fit, look for the nearest settings that do: micro-batch, row length, remat_policy, "
        "optimizer, mesh and completions sampled at the same time",
    )
    search_seconds: int = option(600, "Longest time that the search may take", unit="seconds", ge=1)
    json_file: str | None = option(None, "File to write the plan to, as JSON", default_words="not written")
    html_file: str | None = option(
        None, "File to write the plan to, as a page that needs no other file", default_words="not written"
    )
    load_parameters_path: str = option(
        "builtin",
        "The weights that the run starts from, whose config.json describes the model where model_name does not; no "
        "weights are read",
    )

    @model_validator(mode="after")
    def _the_engine_can_be_planned(self) -> Self:
        if self.rollout_engine != "builtin":
            raise ValueError(
                f"rollout_engine={self.rollout_engine}: memory and time of vLLM are not known to plan; give "
                "rollout_engine=builtin to plan the run with the built-in engine"
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> Self:
        if self.resolved_prompt_tokens > self.max_prefill_predict_length:
            raise ValueError(
                f"prompt_tokens={self.prompt_tokens} is more than "
                f"max_prefill_predict_length={self.max_prefill_predict_length}, the longest prompt"
            )
        if self.resolved_prompt_tokens + self.resolved_completion_tokens > self.max_target_length:
            raise ValueError(
                f"prompt_tokens={self.resolved_prompt_tokens} and completion_tokens={self.resolved_completion_tokens} "
                f"are together more than max_target_length={self.max_target_length}"
            )
        return self

    @property
    def resolved_prompt_tokens(self) -> int:
        return self.prompt_tokens or self.max_prefill_predict_length

    @property
    def resolved_completion_tokens(self) -> int:
        """Length of a completion that times are estimated for."""
        return self.completion_tokens or self.max_target_length - self.resolved_prompt_tokens


class SFTConfig(
    CommandConfig,
    ModelOptions,
    RunOptions,
    TrainDataOptions,
    LengthOptions,
    TrainingConfig,
    TagOptions,
    TrainerMeshOptions,
):
    """Options of sft."""

    section: ClassVar[str] = "Fine-tuning"

    random_init: bool = option(
        False,
        "Start from random weights: load_parameters_path then needs only config.json and the tokenizer's files",
    )
    batch_size: int = option(8, "Examples per training step", unit="examples", ge=1)
    num_batches: int = option(100, "Training steps", unit="steps", ge=1)
    learning_rate: float = option(2e-5, "Peak learning rate; an update moves a weight by about as much", gt=0, le=1)
    gradient_clipping_threshold: float = option(
        1.0, "Largest global norm of the gradient, scaled down to it; 0 clips nothing", ge=0
    )
    log_period: int = option(
        10, "Steps between lines in the terminal; metrics.jsonl has every step", unit="steps", ge=1
    )


class EvalConfig(
    CommandConfig,
    ModelOptions,
    DataOptions,
    LengthOptions,
    EvalSamplingOptions,
    StopOptions,
    RolloutEngineOptions,
    ComputeOptions,
    TagOptions,
    RewardStackOptions,
    SamplerMeshOptions,
):
    """Options of evaluate."""

    num_test_batches: AllOrCount = option(
        5,
        "Evaluation batches, so that num_test_batches × eval_batch_size prompts are asked; -1 is the whole split",
        unit="batches",
    )
    eval_batch_size: int = option(16, "Prompts per evaluation batch", unit="prompts", ge=1)

    @property
    def resolved_max_num_seqs(self) -> int:
        """Completions decoded at the same time."""
        return self.max_num_seqs or self.eval_batch_size * self.num_eval_passes


class ChatConfig(
    CommandConfig, ModelOptions, LengthOptions, SamplingOptions, StopOptions, ComputeOptions, SamplerMeshOptions
):
    """Options of chat."""

    max_prefill_predict_length: int = option(
        768, "Longest prompt, in a chat the whole conversation so far", unit="tokens", ge=1
    )


class GenerateConfig(ChatConfig, EngineOptions, TagOptions):
    """Options of generate."""

    section: ClassVar[str] = "Prompts"

    prompt: str | None = option(None, "The prompt")
    prompts_file: str | None = option(None, "File of prompts: one a line, or JSONL with a field question")
    chat: bool = option(True, "Render each prompt as a user turn of the chat template; false passes it as it is")
    data_template_path: str | None = option(
        None,
        "JSON file with SYSTEM_PROMPT and TEMPLATE to put each prompt into, by path or name of a built-in one",
    )
    num_completions: int = option(1, "Completions per prompt", unit="completions", ge=1)
    output_file: str | None = option(None, "JSONL file to write completions to", default_words="the terminal")

    @model_validator(mode="after")
    def _prompts_come_from_one_place(self) -> Self:
        if self.prompt is not None and self.prompts_file is not None:
            raise ValueError("prompt and prompts_file are both given; give one")
        if self.data_template_path is not None and not self.chat:
            raise ValueError("data_template_path makes a user turn, which chat=false leaves out; give one of the two")
        return self


class ExportConfig(CommandConfig, WeightsOptions, ConversionOptions):
    """Options of to-huggingface."""

    section: ClassVar[str] = "Export"

    base_output_directory: str = option(..., "Directory to write the Hugging Face checkpoint to; made by the export")
    scan_layers: bool | None = option(
        None,
        "Whether the checkpoint's layers are stacked; where the checkpoint says otherwise, the export is refused",
        default_words="as the checkpoint has them",
    )
    push_to_hub: RepositoryName | None = option(
        None, "Repository (owner/name) that the export is uploaded to as well, with a model card; made if missing"
    )
    hub_private: bool = option(True, "Make the repository private where push_to_hub makes it")


class ToMaxTextConfig(CommandConfig, ConversionOptions, MaxTextStorageOptions):
    """Options of to-maxtext."""

    section: ClassVar[str] = "Conversion"

    base_output_directory: str = option(
        ..., "Directory to write the MaxText checkpoint to, as 0/items; made by the conversion"
    )
    scan_layers: bool = option(True, "Stack the layers, as MaxText does for scanned training")

    @model_validator(mode="after")
    def _there_is_a_source(self) -> Self:
        if self.hf_model_path is None and self.model_name is None:
            raise ValueError("neither hf_model_path nor model_name is given; give the checkpoint to convert")
        return self


class ConvertConfig(CommandConfig, ConversionOptions, MaxTextStorageOptions):
    """Options of convert."""

    section: ClassVar[str] = "Conversion"

    source: str = option(
        ...,
        "What to convert: a Hugging Face directory or hub id, a MaxText checkpoint, or a training checkpoint",
    )
    destination: str = option(..., "Directory to write; made by the conversion")
    to: Literal["hf", "maxtext", "training"] = option(
        ..., "What to write: a Hugging Face directory, a MaxText checkpoint, or a training checkpoint"
    )
    scan_layers: bool = option(True, "Stack the layers of a MaxText checkpoint that is written")


class InspectConfig(CommandConfig, HubOptions):
    """Options of inspect."""

    section: ClassVar[str] = "Conversion"

    path: str = option(..., "Any checkpoint: a directory or a hub id")


class CompareConfig(CommandConfig, HubOptions):
    """Options of compare."""

    section: ClassVar[str] = "Conversion"

    first: str = option(..., "A checkpoint of any kind")
    second: str = option(..., "The checkpoint to compare it with")
    hf_model_path: str | None = option(
        None,
        "Hugging Face directory or hub id whose config.json describes the two, where neither has one",
        default_words="that of the checkpoints",
    )


class DemoConfig(CommandConfig):
    """Options of demo."""

    section: ClassVar[str] = "Run"

    base_output_directory: str = option("runs", "Directory under which the demonstration's own directory is made")
    run_name: DirectoryName = option(
        None,
        "Name of that directory",
        default_words="demo- and date and time of the start",
        default_factory=lambda: time.strftime("demo-%Y-%m-%d-%H-%M-%S"),
    )


class JobSubmitConfig(
    CommandConfig,
    JobDescriptionOptions,
    JobHostsOptions,
    JobEnvironmentOptions,
    JobEndOptions,
    JobClusterObjectsOptions,
    JobPathwaysOptions,
    JobDryRunOptions,
):
    """Options of job submit."""

    @model_validator(mode="after")
    def _waiting_is_asked_for(self) -> Self:
        if self.await_timeout is not None and not self.await_job_completion:
            raise ValueError("--await-timeout limits the waiting; give --await-job-completion, too")
        return self


class JobListConfig(CommandConfig, JobPlaceOptions):
    """Options of job list."""

    section: ClassVar[str] = "Job"

    status: Literal["Pending", "Suspended", "Running", "Succeeded", "Failed", "Cancelled"] | None = option(
        None, "Show only jobs in this state", default_words="all"
    )
    name_contains: str = option("", "Show only jobs whose name has this in it")


class JobLogsConfig(CommandConfig, JobNameOptions):
    """Options of job logs."""

    section: ClassVar[str] = "Output"

    follow: bool = option(False, "Go on, through restarts, until the job has ended", short="f")
    main_only: bool = option(False, "Show only the first host of the first slice; with Pathways, the head")


class JobNameConfig(CommandConfig, JobNameOptions):
    """Options of job describe, job cancel and job inspect."""


class JobConfigSetConfig(CommandConfig, JobOutputOptions):
    """Options of job config set."""

    section: ClassVar[str] = "Where"

    key: str = option(..., "What is set: project, cluster, location, namespace or backend")
    value: str = option(..., "Its value; an empty one unsets it")


class JobConfigListConfig(CommandConfig, JobOutputOptions):
    """Options of job config list."""


class ClusterCreateConfig(
    CommandConfig,
    ClusterPlaceOptions,
    ClusterNodesOptions,
    ClusterAccessOptions,
    ClusterPartsOptions,
    ConfirmOptions,
    DryRunOptions,
):
    """Options of cluster create."""


class ClusterDescribeConfig(CommandConfig, ClusterPlaceOptions):
    """Options of cluster describe."""


class ClusterDeleteConfig(CommandConfig, ClusterPlaceOptions, ConfirmOptions):
    """Options of cluster delete."""

    section: ClassVar[str] = "Cluster"

    delete_bucket: str | None = option(
        None, "Bucket to delete as well, with all that is in it", default_words="none: buckets stay, and cost"
    )


class VmCreateConfig(CommandConfig, VmNameOptions, VmMachineOptions, ConfirmOptions, DryRunOptions):
    """Options of vm create."""


class VmSshConfig(CommandConfig, VmNameOptions):
    """Options of vm ssh-command."""


class VmDeleteConfig(CommandConfig, VmNameOptions, ConfirmOptions):
    """Options of vm delete."""


COMMANDS: dict[str, type[CommandConfig]] = {
    "demo": DemoConfig,
    "train-rl": RunConfig,
    "plan": PlanConfig,
    "sft": SFTConfig,
    "evaluate": EvalConfig,
    "generate": GenerateConfig,
    "chat": ChatConfig,
    "to-maxtext": ToMaxTextConfig,
    "to-huggingface": ExportConfig,
    "convert": ConvertConfig,
    "inspect": InspectConfig,
    "compare": CompareConfig,
    "job config set": JobConfigSetConfig,
    "job config list": JobConfigListConfig,
    "job submit": JobSubmitConfig,
    "job list": JobListConfig,
    "job logs": JobLogsConfig,
    "job describe": JobNameConfig,
    "job inspect": JobNameConfig,
    "job cancel": JobNameConfig,
    "cluster create": ClusterCreateConfig,
    "cluster describe": ClusterDescribeConfig,
    "cluster delete": ClusterDeleteConfig,
    "vm create": VmCreateConfig,
    "vm ssh-command": VmSshConfig,
    "vm delete": VmDeleteConfig,
}
