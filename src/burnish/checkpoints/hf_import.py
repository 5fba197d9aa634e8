"""Hugging Face checkpoint -> parameter tree: headers are checked first, then a few tensors at a time are
copied into their places in preallocated stacked arrays, so that memory holds the result and those tensors more.

Anything that does not fit exactly is an error that names the tensor and the file: nothing is skipped, cast
from an unknown dtype, or left at a random value. Reads safetensors from a local directory; `resolve` gets
one from the hub.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from burnish.checkpoints.blocks import cast
from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_rows import RowReader
from burnish.checkpoints.safetensors_file import DTYPES, StoredTensor, few, list_tensors, open_file
from burnish.checkpoints.shards import Shards
from burnish.models.families import (
    TensorMapping,
    buffer_values,
    is_left_out,
    resolve_config,
    spec_from_hf,
    tensor_map,
    tied_head_copy,
)
from burnish.models.params import Params
from burnish.models.spec import ModelSpec

Progress = Callable[[str, int, int], None]
"""(tensor just done, bytes done, bytes in all)."""

# What a checkpoint needs besides weights: configs, tokenizer, chat template, licence. Model cards describe
# the source, not what became of it, and stay behind.
SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*", "NOTICE*", "USE_POLICY*")

READERS = 4
"""Tensors read at the same time."""

COMPARED_ROWS = 4096

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve(path_or_hub_id: str, token: str | None = None, weights: bool = True) -> Path:
    """A local directory for a path or a hub id (`owner/name`), downloading configs and tokenizer, and the
    weights unless they are not wanted. A download that was cut goes on where it stopped.

    Raises CheckpointError that explains: no such directory, no such repository, gated, no network. The
    token is handed to the hub and appears in no message.
    """
    local = Path(path_or_hub_id).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise CheckpointError(f"{local} is a file; give the directory that holds config.json and the weights")
    if not _HUB_ID.fullmatch(path_or_hub_id):
        raise CheckpointError(f"{path_or_hub_id} is no directory on this machine and no hub id (owner/name)")

    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    what = f"{path_or_hub_id} is no directory on this machine, and as a hub id"
    hint = "set hf_access_token= or the environment variable HF_TOKEN"
    try:
        return Path(
            snapshot_download(
                path_or_hub_id,
                token=token,
                allow_patterns=[*(["*.safetensors"] if weights else []), *SIDE_FILES],
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except GatedRepoError:
        raise CheckpointError(
            f"{what} it is gated: accept its licence at {ENDPOINT}/{path_or_hub_id} with your account, then {hint}"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{what} it does not exist or is private; if it is private, {hint}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise CheckpointError(
            f"{what} it is not in the local cache and the hub cannot be reached; "
            "check the network (or HF_HUB_OFFLINE), or give a local directory"
        ) from None
    except HFValidationError:
        raise CheckpointError(f"{what} it is not well formed (owner/name)") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        raise CheckpointError(f"{what} its download failed: the hub answered {status}") from None
    except OSError as error:
        raise CheckpointError(f"{what} its download failed: {type(error).__name__}") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {type(value).__name__}, an object is needed")
    return value


def read_config(directory: Path, model_name: str | None = None) -> dict[str, Any]:
    """The directory's config.json, or the preset `model_name` where it has none. Raises ModelError where
    both are there and describe different models.
    """
    file = directory / "config.json"
    return resolve_config(model_name, read_json(file) if file.exists() else None, str(directory))


def load_params(
    directory: Path | str,
    model_name: str | None = None,
    dtype: Any = np.float32,
    on_progress: Progress | None = None,
    shardings: Params | None = None,
) -> tuple[ModelSpec, Params]:
    """(spec, parameter tree in `dtype`: float32 or bfloat16) of a Hugging Face checkpoint directory: jax arrays where
    there is a tree of `shardings`, of which this process reads the rows that its devices hold; else NumPy arrays.

    Raises ModelError when config.json cannot be honoured and CheckpointError naming the tensors and files
    that are missing, unexpected, misshaped, of an unsupported dtype, truncated, or hold NaN or infinity.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    spec = spec_from_hf(read_config(directory, model_name))
    headers = list_tensors(directory)
    check_headers(directory, spec, headers)
    for file in {t.file for t in headers}:
        with open_file(file):  # the library knows best whether a header and its file belong together
            pass
    stored = {t.name: t for t in headers if not is_left_out(spec, t.name)}
    names = [m.name for m in sorted(tensor_map(spec), key=lambda m: m.path)]
    shards = Shards(spec, dtype, shardings)
    total, done = sum(t.end - t.start for t in stored.values()), 0
    lock = threading.Lock()

    def count(tensor: StoredTensor) -> None:
        nonlocal done
        with lock:
            done += tensor.end - tensor.start
            if on_progress is not None:
                on_progress(tensor.name, done, total)

    def read(name: str) -> None:
        start, stop = shards.rows(name)
        rows = reader.rows(name, start, stop)
        if not shards.take(name, start, rows):
            raise CheckpointError(f"{stored[name].file}: {name} holds NaN or infinity{_overflow(rows)}")
        count(stored[name])

    with RowReader(list(stored.values())) as reader, ThreadPoolExecutor(READERS) as pool:
        # Array by array, so that few are open at a time; map raises the first error and begins nothing after it.
        for _ in pool.map(read, names):
            pass
        for name in stored.keys() - set(names):
            _check_extra(spec, reader, stored, name, dtype, shards)
            count(stored[name])
    return spec, shards.finish()


def left_out_tensors(directory: Path, spec: ModelSpec) -> list[str]:
    """Names of the tensors of a checkpoint that are known and not read: its vision and audio towers."""
    if not any(directory.glob("*.safetensors")):
        return []
    return [t.name for t in list_tensors(directory) if is_left_out(spec, t.name)]


def _overflow(array: np.ndarray) -> str:
    return " after the cast (it is finite in the file)" if np.isfinite(array).all() else ""


def check_headers(directory: Path, spec: ModelSpec, stored: Sequence[StoredTensor]) -> None:
    """Names, shapes and dtypes of a checkpoint against its spec, before any weight is read."""
    expected = {m.name: m.hf_shape for m in tensor_map(spec)}
    optional = tied_head_copy(spec)
    if optional is not None:
        expected[optional.name] = optional.hf_shape
    names = [t.name for t in stored]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise CheckpointError(f"{directory}: tensors are there twice: {few(twice)}")
    required = [name for name in expected if optional is None or name != optional.name]
    missing = [name for name in required if name not in set(names)]
    if missing:
        raise CheckpointError(f"{directory}: tensors are missing that config.json asks for: {few(missing)}")
    for t in stored:
        if t.name in expected and t.shape != expected[t.name]:
            raise CheckpointError(f"{t.file}: {t.name} has shape {t.shape}, config.json asks for {expected[t.name]}")
        if t.name in expected and t.dtype not in DTYPES:
            raise CheckpointError(
                f"{t.file}: {t.name} is {t.dtype}; {', '.join(DTYPES)} are read (quantised weights are not)"
            )
    extra = [
        t
        for t in stored
        if t.name not in expected and buffer_values(spec, t.name) is None and not is_left_out(spec, t.name)
    ]
    if extra:
        raise CheckpointError(
            f"{extra[0].file}: tensors that config.json has no place for: {few([t.name for t in extra])}"
        )


def _check_extra(
    spec: ModelSpec, reader: RowReader, stored: Mapping[str, StoredTensor], name: str, dtype: Any, shards: Shards
) -> None:
    """Tensors that are no parameter must say the same as what they repeat."""
    head: TensorMapping | None = tied_head_copy(spec)
    file = stored[name].file
    if head is not None and name == head.name:
        (embed,) = (m.name for m in tensor_map(spec) if m.path == head.path)
        start, stop = shards.rows(embed)
        for first in range(start, stop, COMPARED_ROWS):
            last = min(first + COMPARED_ROWS, stop)
            if not np.array_equal(*(cast(reader.rows(n, first, last), np.dtype(dtype)) for n in (embed, name))):
                raise CheckpointError(
                    f"{file}: {name} differs from the embeddings, but config.json has "
                    "tie_word_embeddings true; one of the two is wrong"
                )
        return
    array = reader.rows(name, 0, stored[name].shape[0])
    # Saved in half precision by some; 1 % still tells one theta or scaling from another.
    values = buffer_values(spec, name) or []
    same = [v.shape == array.shape and np.allclose(array.astype(np.float32), v, rtol=1e-2) for v in values]
    if not any(same):
        raise CheckpointError(f"{file}: {name} differs from the rope settings of config.json")
