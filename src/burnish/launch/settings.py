"""The defaults of job commands (`burnish job config set|list`), one JSON file in the user's configuration directory.

A command line's own flags win over them. A value that is needed and given nowhere is an error that names the command
to set it.
"""

import json
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from burnish.launch.errors import LaunchError
from burnish.observe.files import write_whole

BACKENDS = ("gke", "local")


@dataclass(frozen=True)
class Settings:
    """Where jobs run. None: not set."""

    project: str | None = None
    cluster: str | None = None
    location: str | None = None  # a region or a zone
    namespace: str | None = None
    backend: str | None = None

    @property
    def resolved_namespace(self) -> str:
        return self.namespace or "default"

    @property
    def resolved_backend(self) -> str:
        return self.backend or "gke"

    def require(self, key: str) -> str:
        """The value of a setting. Raises LaunchError with the command that sets it."""
        value: str | None = getattr(self, key)
        if not value:
            raise LaunchError(f"no {key} is set; run `burnish job config set {key} VALUE` or give --{key}=VALUE")
        return value

    def override(self, **given: str | None) -> "Settings":
        """The settings with those that a command line gives (None: not given) in their place."""
        changed = replace(self, **{key: value for key, value in given.items() if value is not None})
        if changed.backend is not None and changed.backend not in BACKENDS:
            raise LaunchError(f"backend={changed.backend}: expected {' or '.join(BACKENDS)}")
        return changed


KEYS = tuple(field.name for field in fields(Settings))


def settings_path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "burnish" / "job.json"


def load_settings() -> Settings:
    """The settings of this user; empty where none were ever set. Raises LaunchError where the file is damaged."""
    path = settings_path()
    try:
        content: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise LaunchError(f"{path}: not JSON; mend it, or delete it and set its values anew") from None
    if not isinstance(content, dict) or not all(k in KEYS and isinstance(v, str) for k, v in content.items()):
        raise LaunchError(f"{path}: expected an object with texts for {', '.join(KEYS)}; mend it or delete it")
    return Settings().override(**content)


def save_setting(key: str, value: str) -> Settings:
    """Sets one value (an empty one unsets it) and returns all. Raises LaunchError for an unknown key or backend."""
    if key not in KEYS:
        raise LaunchError(f"{key}: no such setting; there are {', '.join(KEYS)}")
    if any(character.isspace() for character in value):
        raise LaunchError(f"{key}={value!r}: a setting has no spaces in it")
    changed = replace(load_settings(), **{key: value or None}).override()
    path = settings_path()
    content = {name: text for name, text in asdict(changed).items() if text is not None}
    try:
        write_whole(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise LaunchError(f"{path}: cannot be written: {error.strerror}") from None
    return changed
