"""What may be asked of a generation engine: checked before anything is sampled, whichever engine it is."""

from collections.abc import Sequence

from burnish.data.types import Prompt
from burnish.rollout.types import SamplingParams


def check_request(
    prompts: Sequence[Prompt],
    seeds: Sequence[Sequence[int]],
    sampling: SamplingParams,
    vocab_size: int,
    max_prompt_tokens: int,
    max_total_tokens: int,
) -> None:
    """Raises ValueError where a request is not one that an engine made for these sizes can answer."""
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but seeds for {len(seeds)}")
    if sampling.max_total_tokens > max_total_tokens:
        raise ValueError(
            f"sampling.max_total_tokens={sampling.max_total_tokens} is more than the engine's "
            f"max_total_tokens={max_total_tokens}"
        )
    for name, ok, right in (
        ("temperature", sampling.temperature >= 0, "0 (greedy) or above"),
        ("top_k", sampling.top_k >= 0, "0 (off) or above"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("min_p", 0 <= sampling.min_p <= 1, "between 0 and 1"),
    ):
        if not ok:
            raise ValueError(f"sampling.{name}={getattr(sampling, name)}: must be {right}")
    for prompt, prompt_seeds in zip(prompts, seeds, strict=True):
        length = len(prompt.token_ids)
        if not prompt_seeds:
            raise ValueError(f"prompt {prompt.index} has no seeds, so no completions")
        if not 1 <= length <= max_prompt_tokens:
            raise ValueError(
                f"prompt {prompt.index} has {length} tokens; the engine takes 1 to "
                f"{max_prompt_tokens} (option max_prefill_predict_length)"
            )
        outside = [t for t in prompt.token_ids if not 0 <= t < vocab_size]
        if outside:
            raise ValueError(
                f"prompt {prompt.index} holds token id {outside[0]}, but the model's vocabulary has "
                f"{vocab_size} entries: is this its tokenizer?"
            )
        if length >= sampling.max_total_tokens:
            raise ValueError(
                f"prompt {prompt.index} has {length} tokens, which leaves no room for a completion in "
                f"{sampling.max_total_tokens} (option max_target_length)"
            )
