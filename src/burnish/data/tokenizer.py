"""Tokenizers: a thin wrapper of transformers' that knows how prompts are rendered and which tokens stop a
model.

A prompt is a chat rendered by the tokenizer's own chat template with the generation prompt added; its ids are
used exactly as the template gives them, so there are as many BOS tokens as the template says. Padding ids are
not exposed: masks come from lengths, never from comparing ids.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from burnish.data.errors import DataError
from burnish.text import decode

Message = dict[str, str]
"""{"role": "user" | "assistant" | "system", "content": text}"""

_PROBE = "burnish probe text"


@dataclass(frozen=True)
class RenderedPrompt:
    """The text a chat template made and the ids it is read as."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Tokenizer:
    """`stop_token_ids` is the union of the tokenizer's EOS, config.json's and generation_config.json's
    eos_token_id and the token with which the chat template ends a turn, in ascending order. `end_of_turn_id`
    is that last one, or else the tokenizer's EOS: what a trained completion ends with. `template_source` is how
    messages name the chat template."""

    name: str
    template_source: str
    stop_token_ids: tuple[int, ...]
    end_of_turn_id: int | None
    hf: Any  # transformers' tokenizer, chat template included

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self.hf)

    @property
    def has_chat_template(self) -> bool:
        return self.hf.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a text, no special tokens added."""
        return list(self.hf.encode(text, add_special_tokens=False))

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text to be continued as it is: with the BOS that the tokenizer begins a text with, once
        also where the text has it already, and with no EOS behind it."""
        ids = self.encode(text)
        bos = self.hf.bos_token_id
        begins = bos is not None and self.hf.encode("")[:1] == [bos]
        return [bos, *ids] if begins and ids[:1] != [bos] else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.hf.decode(
            [int(i) for i in token_ids],
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def encode_completion(self, text: str) -> list[int]:
        """The ids of an answer to learn from: the text and the token that ends the turn."""
        if self.end_of_turn_id is None:
            raise DataError(f"tokenizer {self.name}: has no EOS and its chat template ends no turn; nothing stops it")
        return [*self.encode(text), self.end_of_turn_id]

    def render_prompt(self, user_text: str) -> RenderedPrompt:
        """One user turn, ready for the model's answer."""
        return self.render_prompts([user_text])[0]

    def render_prompts(self, user_texts: Sequence[str]) -> list[RenderedPrompt]:
        """Many single user turns at once, which is several times faster than one by one."""
        return self.render_chats([[{"role": "user", "content": text}] for text in user_texts])

    def render_chats(self, chats: Sequence[Sequence[Message]]) -> list[RenderedPrompt]:
        """Each chat (its last message a user's) followed by the start of the assistant's turn.
        Raises DataError without a chat template, where it fails or leaves the user's text out, and where the
        rendered prompt ends with EOS."""
        if not self.has_chat_template:
            raise DataError(
                f"tokenizer {self.name}: has no chat template. Give chat_template_path=<file with a Jinja "
                f"template>, "
                "or tokenizer_path=<a tokenizer of the same vocabulary that has one>."
            )
        if not chats:
            return []
        if _PROBE not in self._probe_text:
            raise DataError(
                f"{self.template_source}: leaves out what the user says; a rendered chat is {self._probe_text[-200:]!r}"
            )
        texts = self._render(chats)
        ids = self.hf.apply_chat_template(chats, tokenize=True, add_generation_prompt=True, return_dict=False)
        for text, row in zip(texts, ids, strict=True):
            if not row or row[-1] == self.hf.eos_token_id:
                raise DataError(
                    f"tokenizer {self.name}: a rendered prompt ends with the end-of-text token, after which "
                    f"nothing "
                    f"is to be said: …{text[-60:]!r}. Its chat template does not begin the assistant's turn "
                    "(add_generation_prompt); give another one with chat_template_path."
                )
        return [RenderedPrompt(text, tuple(int(i) for i in row)) for text, row in zip(texts, ids, strict=True)]

    @cached_property
    def _probe_text(self) -> str:
        return self._render([[{"role": "user", "content": _PROBE}]])[0]

    def _render(self, chats: Sequence[Sequence[Message]]) -> list[str]:
        try:
            return self.hf.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of somebody's, and fails in ways of its own
            raise DataError(f"{self.template_source}: fails: {type(error).__name__}: {_first_line(error)}") from error


def load_tokenizer(
    path_or_id: str | Path,
    chat_template_path: str | Path | None = None,
    token: str | None = None,
    *,
    model_path: str | Path | None = None,
) -> Tokenizer:
    """The tokenizer of a directory or hub id. `chat_template_path` names a file with a Jinja template that
    takes the place of its own. `model_path` is where config.json and generation_config.json lie when that is
    another place (tokenizer_path given). Raises DataError where there is no tokenizer or no template file, and
    where an eos_token_id of those files is no id of the vocabulary."""
    from transformers import AutoTokenizer

    name = str(path_or_id)
    template = _read_chat_template(chat_template_path)
    try:
        hf = AutoTokenizer.from_pretrained(name, token=token)
    # transformers reads several files, checks some of their fields and raises what comes of it.
    except Exception as error:
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise DataError(
            f"tokenizer_path={name}: no tokenizer could be loaded from there ({cause}). Give a "
            f"directory "
            "with tokenizer.json and tokenizer_config.json, or a hub id (hf_access_token for a gated one)."
        ) from error
    if template is not None:
        hf.chat_template = template
    end_of_turn = _end_of_turn(hf)
    stops = {hf.eos_token_id, end_of_turn}
    for place in {name, str(model_path or name)}:
        config = _json_object(place, "config.json", token)
        sizes = [len(hf), config.get("vocab_size"), (config.get("text_config") or {}).get("vocab_size")]
        vocab_size = max(size for size in sizes if isinstance(size, int))
        stops |= set(_eos_ids(config, f"{place}: config.json", vocab_size))
        file = "generation_config.json"
        stops |= set(_eos_ids(_json_object(place, file, token), f"{place}: {file}", vocab_size))
    source = f"the chat template of {name}" if template is None else f"chat_template_path={chat_template_path}"
    return Tokenizer(
        name=name,
        template_source=source,
        stop_token_ids=tuple(sorted(i for i in stops if i is not None)),
        end_of_turn_id=hf.eos_token_id if end_of_turn is None else end_of_turn,
        hf=hf,
    )


def _read_chat_template(path: str | Path | None) -> str | None:
    if path is None:
        return None
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"chat_template_path={path}: there is no such file; it is to hold a Jinja chat template")
    return decode(file.read_bytes(), f"chat_template_path={path}", DataError)


def _end_of_turn(hf: Any) -> int | None:
    """The special token that the chat template writes right after an assistant's text, if it writes one."""
    if hf.chat_template is None:
        return None
    chat = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _PROBE}]
    try:
        rendered = hf.apply_chat_template(chat, tokenize=False)
    except Exception:  # a template may refuse such a chat in a language of its own; then it has no end of turn
        return None
    _, found, after = rendered.rpartition(_PROBE)
    ids = hf.encode(after.lstrip(), add_special_tokens=False) if found else []
    special = set(hf.all_special_ids) | set(hf.added_tokens_decoder)
    return int(ids[0]) if ids and ids[0] in special else None


def _json_object(place: str, file: str, token: str | None) -> dict[str, Any]:
    """A JSON file beside the model; empty where there is none."""
    from transformers.utils import cached_file

    try:
        path = cached_file(
            place,
            file,
            token=token,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
    except OSError:  # no such repository: the tokenizer was found elsewhere, so there is no model file to read
        return {}
    if path is None:
        return {}
    source = f"{place}: {file}"
    try:
        content = json.loads(decode(Path(path).read_bytes(), source, DataError))
    except json.JSONDecodeError as error:
        raise DataError(f"{source}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise DataError(f"{source}: expected a JSON object, it holds {str(content)[:80]}")
    return content


def _eos_ids(content: dict[str, Any], source: str, vocab_size: int) -> list[int]:
    """eos_token_id of a JSON file beside the model: none, one or a list."""
    value = content.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
            raise DataError(
                f"{source}: eos_token_id={value!r} is refused; expected a token id from 0 to {vocab_size - 1}, or a "
                "list of them"
            )
    return ids


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
