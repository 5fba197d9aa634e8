"""`burnish generate` and `burnish chat`: completions of a checkpoint for prompts given at the terminal or in a file."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape

from burnish.config.schema import ChatConfig, GenerateConfig
from burnish.data.tokenizer import RenderedPrompt, Tokenizer
from burnish.data.types import Prompt
from burnish.errors import BurnishError
from burnish.models.params import param_shardings
from burnish.observe.files import is_local, write_whole
from burnish.observe.terminal import StepPrinter
from burnish.parallel import distributed, processes
from burnish.rl import setup
from burnish.rl.devices import check_model, sampler_mesh, sampler_sizes
from burnish.rl.loading import ModelSource, compute_dtype, open_model
from burnish.rollout.engine import BuiltinEngine
from burnish.rollout.types import Group
from burnish.text import check_no_surrogates, decode, json_lines

MAX_SLOTS = 32
"""Completions decoded at the same time, unless max_num_seqs says otherwise."""


def generate(cfg: GenerateConfig) -> None:
    """Complete the prompts of the options. Raises BurnishError."""
    distributed.start()
    with distributed.others_needed():
        processes.same_options(cfg.public_dump())
        _generate(cfg)


def _generate(cfg: GenerateConfig) -> None:
    questions = _questions(cfg)
    if cfg.output_file is not None:
        _check_writable(cfg.output_file)
    model = open_model(cfg)
    prompts = [_prompt(i, q, _render(cfg, model.tokenizer, q), cfg) for i, q in enumerate(questions)]
    total = len(prompts) * cfg.num_completions
    console = Console(quiet=not processes.is_first())
    with StepPrinter(1, console) as printer:
        longest = max(len(prompt.token_ids) for prompt in prompts)
        engine = _engine(cfg, model, longest, min(cfg.max_num_seqs or MAX_SLOTS, total))
        groups = engine.generate(
            prompts,
            setup.completion_seeds(cfg.seed, "generate", 0, prompts, cfg.num_completions),
            setup.sampling_params(cfg, model.tokenizer),
            lambda finished, tokens: printer.sampling("sampling", finished, total, tokens),
        )
    if cfg.output_file is not None:
        text = "".join(json.dumps(_record(g), ensure_ascii=False) + "\n" for g in groups)
        processes.by_first(lambda: write_whole(str(cfg.output_file), text))
        console.print(f"{total} completions written to {cfg.output_file}", markup=False, highlight=False)
        return
    for group in groups:
        if len(groups) > 1:
            console.print(f"> {group.prompt.question}", style="bold", markup=False, highlight=False)
        for completion in group.completions:
            console.print(completion.text, markup=False, highlight=False, soft_wrap=True)


def chat(cfg: ChatConfig) -> None:
    """Talk to the model until an empty line or end of input. The conversation is rendered anew each turn; its oldest
    exchanges are left out once it no longer fits. Raises BurnishError."""
    model = open_model(cfg)
    engine = _engine(cfg, model, cfg.max_prefill_predict_length, max_slots=1)
    sampling = setup.sampling_params(cfg, model.tokenizer)
    console = Console()
    console.print(f"{model.describe()}\nAn empty line ends the chat.", markup=False, highlight=False)
    messages: list[dict[str, str]] = []
    for turn in itertools.count():
        try:
            text = console.input("[bold]you:[/bold] ").strip()
        except EOFError:
            return
        if not text:
            return
        messages.append({"role": "user", "content": text})
        rendered = _fitting(messages, model.tokenizer, cfg.max_prefill_predict_length)
        if rendered is None:
            limit = f"more than max_prefill_predict_length={cfg.max_prefill_predict_length} tokens"
            console.print(f"That has {limit}; the chat begins anew.", markup=False, highlight=False)
            messages.clear()
            continue
        prompt = Prompt(turn, text, "", rendered.text, rendered.token_ids)
        seeds = setup.completion_seeds(cfg.seed, "chat", turn, [prompt], 1)
        (group,) = engine.generate([prompt], seeds, sampling)
        answer = group.completions[0].text
        messages.append({"role": "assistant", "content": answer})
        console.print(f"[bold]model:[/bold] {escape(answer)}", highlight=False, soft_wrap=True)


def _questions(cfg: GenerateConfig) -> list[str]:
    if cfg.prompt is not None:
        _check_text("prompt", cfg.prompt)
        return [cfg.prompt]
    if cfg.prompts_file is None:
        raise BurnishError('generate needs prompt="…" or prompts_file=<file>', exit_code=2)
    path = Path(cfg.prompts_file).expanduser()
    if not path.is_file():
        raise BurnishError(f"prompts_file={cfg.prompts_file}: there is no such file")
    source = f"prompts_file={cfg.prompts_file}"
    text = decode(path.read_bytes(), source, BurnishError)
    if path.suffix == ".jsonl":
        lines = [_question(row, i, source) for i, row in enumerate(json_lines(text, source, BurnishError))]
    else:
        lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise BurnishError(f"prompts_file={cfg.prompts_file} has no prompts")
    return lines


def _question(row: Any, index: int, source: str) -> str:
    question = row.get("question") if isinstance(row, dict) else None
    if not isinstance(question, str) or not question.strip():
        raise BurnishError(
            f"{source}, row {index}: expected a JSON object whose field question is a text, it is {str(row)[:80]!a}"
        )
    _check_text(f"{source}, row {index}", question)
    return question


def _check_text(source: str, text: str) -> None:
    try:
        check_no_surrogates(text)
    except ValueError as error:
        raise BurnishError(f"{source}: {error}") from None


def _check_writable(output_file: str) -> None:
    """Before the model is read: an absent directory is made, as the write in the end would."""
    if not is_local(output_file):
        return
    path = Path(output_file)
    if path.is_dir():
        raise BurnishError(f"output_file={output_file} is a directory; give the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BurnishError(f"output_file={output_file}: its directory cannot be made ({error.strerror})") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise BurnishError(f"output_file={output_file}: its directory cannot be written to")


def _render(cfg: GenerateConfig, tokenizer: Tokenizer, question: str) -> RenderedPrompt:
    if not cfg.chat:
        return RenderedPrompt(question, tuple(tokenizer.encode_prompt(question)))
    if cfg.data_template_path is not None:
        question = setup.template(cfg.data_template_path, cfg).render(question)
    return tokenizer.render_prompt(question)


def _prompt(index: int, question: str, rendered: RenderedPrompt, cfg: GenerateConfig) -> Prompt:
    length = len(rendered.token_ids)
    if not 0 < length <= cfg.max_prefill_predict_length:
        raise BurnishError(
            f"prompt {index + 1} has {length} tokens; it needs 1 to max_prefill_predict_length="
            f"{cfg.max_prefill_predict_length}"
        )
    return Prompt(index, question, "", rendered.text, rendered.token_ids)


def _fitting(messages: list[dict[str, str]], tokenizer: Tokenizer, limit: int) -> RenderedPrompt | None:
    """The conversation without its oldest exchanges, as many as it takes; `messages` is shortened in place. None where
    the last message alone is too long."""
    while True:
        rendered = tokenizer.render_chats([messages])[0]
        if len(rendered.token_ids) <= limit:
            return rendered
        if len(messages) == 1:
            return None
        del messages[:2]


def _engine(cfg: ChatConfig, model: ModelSource, longest_prompt: int, max_slots: int) -> BuiltinEngine:
    mesh = sampler_mesh(cfg, jax.devices())
    check_model(model.spec, sampler_sizes(cfg, jax.devices()))
    engine = setup.make_engine(model, cfg, longest_prompt, max_slots, cfg.dtype, mesh)
    dtype = jnp.dtype(compute_dtype(cfg.dtype)).name
    engine.load_weights(model.load(dtype, shardings=param_shardings(model.spec, mesh)), 0)
    return engine


def _record(group: Group) -> dict[str, Any]:
    return {
        "question": group.prompt.question,
        "prompt": group.prompt.text,
        "completions": [
            {"text": c.text, "stop_reason": str(c.stop_reason), "tokens": len(c.token_ids), "seed": c.seed}
            for c in group.completions
        ],
    }
