"""Options of sampling: which engine samples, vLLM's own settings, how tokens are drawn and what ends a completion."""

import shutil
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from burnish.config.fields import Options, option, value_words
from burnish.config.groups import TextList


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
