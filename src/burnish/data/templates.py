"""Prompt templates: what is said to the model around a question.

A template is a JSON file with SYSTEM_PROMPT and TEMPLATE. It is rendered into the text of the user's turn;
the turn markers are the business of the tokenizer's chat template. Only the placeholders listed in
PLACEHOLDERS are filled, in one pass, so that braces in questions and in LaTeX stay as they are.
"""

import difflib
import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from burnish.data.errors import DataError
from burnish.text import decode

PLACEHOLDERS = (
    "system_prompt",
    "question",
    "reasoning_start_token",
    "reasoning_end_token",
    "solution_start_token",
    "solution_end_token",
)
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
_IN_BRACES = re.compile(r"\{([A-Za-z][\w -]*)\}")
_TURN_MARKERS = ("<start_of_turn>", "<|turn>", "<|im_start|>", "<|start_header_id|>", "[INST]", "<|user|>")


@dataclass(frozen=True)
class PromptTemplate:
    """`system_prompt` and `template` with the tags filled in; {system_prompt} and {question} are still to
    come."""

    name: str
    system_prompt: str
    template: str

    @classmethod
    def load(
        cls,
        path_or_name: str,
        reasoning_start_token: str = "<reasoning>",
        reasoning_end_token: str = "</reasoning>",
        solution_start_token: str = "<answer>",
        solution_end_token: str = "</answer>",
    ) -> "PromptTemplate":
        """Read a template: a path, or else the name of a built-in one. A path whose file does not exist
        counts as the built-in of the same file name, so `maxtext/examples/chat_templates/gsm8k_rl.json` works
        anywhere. Raises DataError where there is neither, or the file is not such a template."""
        raw = _read(path_or_name)
        try:
            content = json.loads(raw)
        except json.JSONDecodeError as error:
            raise DataError(f"data_template_path={path_or_name}: not valid JSON ({error})") from None
        if not isinstance(content, dict):
            raise DataError(f"data_template_path={path_or_name}: expected an object with SYSTEM_PROMPT and TEMPLATE")
        for key in ("SYSTEM_PROMPT", "TEMPLATE"):
            if not isinstance(content.get(key), str):
                raise DataError(
                    f"data_template_path={path_or_name}: {key} is missing or not a string; "
                    f"the file has {sorted(content)}"
                )
        if "{question}" not in content["TEMPLATE"]:
            raise DataError(f"data_template_path={path_or_name}: TEMPLATE has no {{question}}: {content['TEMPLATE']!r}")
        for key in ("SYSTEM_PROMPT", "TEMPLATE"):
            for name in _IN_BRACES.findall(content[key]):
                near = difflib.get_close_matches(name.lower(), PLACEHOLDERS, n=1, cutoff=0.75)
                if near and name not in PLACEHOLDERS:
                    raise DataError(
                        f"data_template_path={path_or_name}: {key} has {{{name}}}, which nothing fills; "
                        f"{{{near[0]}}} is near"
                    )
        if content["SYSTEM_PROMPT"].strip() and "{system_prompt}" not in content["TEMPLATE"]:
            raise DataError(
                f"data_template_path={path_or_name}: SYSTEM_PROMPT is given, but TEMPLATE has no {{system_prompt}}, "
                "so that no prompt would have it; add it to TEMPLATE or empty SYSTEM_PROMPT"
            )
        for marker in _TURN_MARKERS:
            if marker in content["TEMPLATE"] or marker in content["SYSTEM_PROMPT"]:
                raise DataError(
                    f"data_template_path={path_or_name}: contains the turn marker {marker}. The template is "
                    f"the text "
                    "of the user's turn; the tokenizer's chat template adds the markers. Remove them from "
                    "the file."
                )
        tags = {
            "reasoning_start_token": reasoning_start_token,
            "reasoning_end_token": reasoning_end_token,
            "solution_start_token": solution_start_token,
            "solution_end_token": solution_end_token,
        }
        return cls(path_or_name, _fill(content["SYSTEM_PROMPT"], tags), _fill(content["TEMPLATE"], tags))

    def render(self, question: str) -> str:
        """The text of the user's turn."""
        return _fill(self.template, {"system_prompt": self.system_prompt, "question": question})


def builtin_names() -> list[str]:
    """File names of the built-in templates."""
    return sorted(f.name for f in _builtin_directory().iterdir() if f.name.endswith(".json"))


def _builtin_directory() -> resources.abc.Traversable:
    return resources.files("burnish.data") / "builtin_templates"


def _read(path_or_name: str) -> str:
    path = Path(path_or_name).expanduser()
    if path.is_file():
        return decode(path.read_bytes(), f"data_template_path={path_or_name}", DataError)
    if path.name in builtin_names():
        return (_builtin_directory() / path.name).read_text(encoding="utf-8")
    raise DataError(
        f"data_template_path={path_or_name}: there is no such file and no built-in template of that name "
        f"(built in: {', '.join(builtin_names())})"
    )


def _fill(text: str, values: dict[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)
