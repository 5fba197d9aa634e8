"""Options of the devices: the meshes of trainer and sampler, which devices train and which sample, and what MaxText's
command lines say about devices that burnish knows without being told."""

from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from burnish.config.fields import AllOrCount, OneDevice, Options, option


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
