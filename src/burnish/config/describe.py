"""What a config comes to: batch arithmetic in words, evaluation sampling, options without effect here.

Printed before anything expensive starts, so that a wrong number is seen while it costs nothing.
"""

from typing import NamedTuple

from burnish.config.errors import ConfigError
from burnish.config.fields import options_of, value_words
from burnish.config.groups import EvalSamplingOptions
from burnish.config.schema import CommandConfig, RunConfig, SFTConfig


class EvalSampling(NamedTuple):
    temperature: float
    top_k: int
    top_p: float


# MaxText's evaluation strategies.
EVAL_SAMPLING = {
    "greedy": EvalSampling(temperature=0.01, top_k=1, top_p=1.0),
    "standard": EvalSampling(temperature=0.7, top_k=50, top_p=0.95),
    "liberal": EvalSampling(temperature=0.85, top_k=2000, top_p=1.0),
}


def eval_sampling(cfg: EvalSamplingOptions) -> EvalSampling:
    """How evaluation samples."""
    return EVAL_SAMPLING[cfg.eval_sampling_strategy]


def describe_batch(cfg: RunConfig | SFTConfig, num_prompts: int | None = None) -> str:
    """The batch arithmetic, one sentence a line. `num_prompts` is the number of training prompts that fit, as
    far as they have been read (at least as many as the run needs, or all).

    Raises ConfigError where the data does not last for num_batches: the run and its learning-rate schedule
    have the length that was asked for, or there is no run.
    """
    lines = _step_of_rl(cfg) if isinstance(cfg, RunConfig) else _step_of_sft(cfg)
    noun = "prompt" if isinstance(cfg, RunConfig) else "example"
    asked = cfg.num_batches * cfg.batch_size
    lines.append(
        f"Run: {_count(cfg.num_batches, 'step')}, {_count(cfg.num_updates, 'optimizer update')}, {_count(asked, noun)}."
    )
    if num_prompts is not None:
        _check_data_lasts(cfg, num_prompts)
        lines.append(
            f"Data: {_count(num_prompts, noun)}, each prompt at most "
            f"{_count(cfg.max_prefill_predict_length, 'token')}; {_count(cfg.num_epoch, 'pass')} at most."
        )
    lines.append(_evaluation(cfg))
    return "\n".join(lines)


def _check_data_lasts(cfg: RunConfig | SFTConfig, num_prompts: int) -> None:
    """Batches run across the ends of passes; an incomplete last batch is not trained on."""
    if num_prompts == 0:
        raise ConfigError(f"no prompt has at most max_prefill_predict_length={cfg.max_prefill_predict_length} tokens")
    asked, available = cfg.num_batches * cfg.batch_size, num_prompts * cfg.num_epoch
    if asked > available:
        fixes = [f"num_epoch={-(-asked // num_prompts)}"]
        if available >= cfg.batch_size:
            fixes.append(f"num_batches={available // cfg.batch_size}")
        raise ConfigError(
            f"num_batches={cfg.num_batches} of batch_size={cfg.batch_size} take {asked:,} prompts; "
            f"num_epoch={cfg.num_epoch} of the {num_prompts:,} prompts that are not longer than "
            f"max_prefill_predict_length={cfg.max_prefill_predict_length} gives {available:,}; "
            f"give {' or '.join(fixes)}"
        )


def notes(cfg: CommandConfig) -> list[str]:
    """One sentence for each given option that describes a larger machine and changes nothing on this one."""
    return [
        f"{info.name}={value_words(getattr(cfg, info.name))} changes nothing: {info.single_device.why}."
        for info in options_of(type(cfg))
        if info.single_device and not info.single_device.accepted and info.name in cfg.model_fields_set
    ]


def _step_of_rl(cfg: RunConfig) -> list[str]:
    P, G = cfg.batch_size, cfg.rl.num_generations
    rollout, train = cfg.resolved_rollout_micro_batch_size, cfg.resolved_train_micro_batch_size
    return [
        f"Step: {_count(P, 'prompt')} × {_count(G, 'completion')} = {_count(P * G, 'sequence')} of at most "
        f"{_count(cfg.max_target_length, 'token')}: "
        f"{_count(P * G * cfg.max_target_length, 'token')} at most.",
        f"Sampling: {_count(P // rollout, 'micro-batch')} of {_count(rollout, 'prompt')} "
        f"({_count(rollout * G, 'sequence')}), "
        f"{min(cfg.resolved_max_num_seqs, rollout * G):,} decoded at a time.",
        f"Training: {_count(P // train, 'micro-batch')} of {_count(train, 'prompt')} "
        f"({_count(train * G, 'sequence')}) in {_rows(cfg)}, "
        f"{_count(cfg.rl.num_iterations, 'optimizer update')} a step.",
    ]


def _step_of_sft(cfg: SFTConfig) -> list[str]:
    B, train = cfg.batch_size, cfg.resolved_train_micro_batch_size
    return [
        f"Step: {_count(B, 'example')} of at most {_count(cfg.max_target_length, 'token')}: "
        f"{_count(B * cfg.max_target_length, 'token')} at most.",
        f"Training: {_count(B // train, 'micro-batch')} of {_count(train, 'example')} in {_rows(cfg)}, "
        "1 optimizer update a step.",
    ]


def _rows(cfg: RunConfig | SFTConfig) -> str:
    return f"rows of at most {max(cfg.train_row_tokens, cfg.max_target_length):,} tokens"


def _evaluation(cfg: RunConfig | SFTConfig) -> str:
    size = cfg.resolved_eval_batch_size
    if cfg.num_test_batches == 0:
        return "Evaluation: none (num_test_batches=0)."
    if cfg.num_test_batches == -1:
        asked = f"all prompts of split {cfg.eval_split} in batches of {size:,}"
    else:
        total = _count(cfg.num_test_batches * size, "prompt")
        asked = f"{_count(cfg.num_test_batches, 'batch')} of {size:,} = {total}"
    if not isinstance(cfg, RunConfig):
        return f"Evaluation: {asked}."
    completions = _count(cfg.num_eval_passes, "completion")
    return f"Evaluation: {asked}, {completions} each ({cfg.eval_sampling_strategy})."


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith(("ch", "ss")) else "s")
    return f"{number:,} {noun if number == 1 else plural}"
