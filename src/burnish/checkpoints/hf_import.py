"""Hugging Face checkpoint -> parameter tree: headers are checked first, then a few tensors at a time are
copied into their places in preallocated stacked arrays, so that memory holds the result and those tensors more.

Anything that does not fit exactly is an error that names the tensor and the file: nothing is skipped, cast
from an unknown dtype, or left at a random value. Reads safetensors from a local directory; `resolve` gets
one from the hub.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from burnish.checkpoints.errors import CheckpointError
from burnish.checkpoints.hf_rows import RowReader
from burnish.checkpoints.safetensors_file import DTYPES, StoredTensor, few, list_tensors
from burnish.checkpoints.shards import Shards
from burnish.models.families import (
    buffer_values,
    is_buffer,
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

BUILTIN = "builtin"
"""Names the embedded demonstration model."""

READERS = 4
"""Tensors read at the same time."""

COMPARED_BYTES = 4 << 20

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def resolve(path_or_hub_id: str, token: str | None = None, weights: bool = True) -> Path:
    """A local directory for a path, a hub id (`owner/name`) or "builtin", downloading configs and tokenizer, and
    the weights unless they are not wanted. A download that was cut goes on where it stopped.

    Raises CheckpointError that explains: no such directory, no such repository, gated, no network. The
    token is handed to the hub and appears in no message.
    """
    if path_or_hub_id == BUILTIN:
        return Path(str(resources.files("burnish") / "assets" / "tiny"))
    local = Path(path_or_hub_id).expanduser()
    if local.is_dir():
        return local
    if local.exists():
        raise CheckpointError(f"{local} is a file; give the directory that holds config.json and the weights")
    if "://" in path_or_hub_id:
        raise CheckpointError(
            f"{path_or_hub_id} holds no MaxText and no training checkpoint; Hugging Face directories are read from "
            "this machine: copy it here first"
        )
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
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
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
    head = tied_head_copy(spec)
    check_tensors(
        directory,
        headers,
        {m.name: m.hf_shape for m in tensor_map(spec)},
        {} if head is None else {head.name: head.hf_shape},
        lambda name: is_buffer(name) or is_left_out(spec.family, name),
    )
    stored = {t.name: t for t in headers if not is_left_out(spec.family, t.name)}
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
            _check_extra(spec, reader, stored, name, shards)
            count(stored[name])
    return spec, shards.finish()


def left_out_tensors(directory: Path, spec: ModelSpec) -> list[str]:
    """Names of the tensors of a checkpoint that are known and not read: its vision and audio towers."""
    if not any(directory.glob("*.safetensors")):
        return []
    return [t.name for t in list_tensors(directory) if is_left_out(spec.family, t.name)]


def _overflow(array: np.ndarray) -> str:
    return " after the cast (it is finite in the file)" if np.isfinite(array).all() else ""


def check_tensors(
    directory: Path,
    stored: Sequence[StoredTensor],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    is_known: Callable[[str], bool],
) -> None:
    """Names, shapes and dtypes of a checkpoint against those that its config.json asks for, before any weight is read.
    `optional` tensors may be missing; what else `is_known` is let through."""
    shapes = {**expected, **optional}
    names = {t.name for t in stored}
    if len(names) < len(stored):
        counts = Counter(t.name for t in stored)
        raise CheckpointError(f"{directory}: tensors are there twice: {few([n for n, k in counts.items() if k > 1])}")
    if missing := [name for name in expected if name not in names]:
        raise CheckpointError(f"{directory}: tensors are missing that config.json asks for: {few(missing)}")
    for t in stored:
        if t.name in shapes and t.shape != shapes[t.name]:
            raise CheckpointError(f"{t.file}: {t.name} has shape {t.shape}, config.json asks for {shapes[t.name]}")
        if t.name in shapes and t.dtype not in DTYPES:
            raise CheckpointError(
                f"{t.file}: {t.name} is {t.dtype}; {', '.join(DTYPES)} are read (quantised weights are not)"
            )
    if extra := [t for t in stored if t.name not in shapes and not is_known(t.name)]:
        raise CheckpointError(
            f"{extra[0].file}: tensors that config.json has no place for: {few([t.name for t in extra])}"
        )


def check_tied_head(reader: RowReader, embeddings: StoredTensor, head: StoredTensor, start: int, stop: int) -> None:
    """Rows [start, stop) of a head that a file holds although it is the embeddings. Raises CheckpointError where it is
    another."""
    step = max(1, COMPARED_BYTES // (4 * embeddings.shape[1]))
    for first in range(start, stop, step):
        last = min(first + step, stop)
        wanted, found = (reader.rows(t.name, first, last).astype(np.float32) for t in (embeddings, head))
        if not np.array_equal(wanted, found):
            raise CheckpointError(
                f"{head.file}: {head.name} differs from the embeddings, but config.json has "
                "tie_word_embeddings true; one of the two is wrong"
            )


def check_buffer(spec: ModelSpec, reader: RowReader, buffer: StoredTensor) -> None:
    """Raises CheckpointError where saved rotary frequencies are not those of config.json."""
    if buffer.dtype in DTYPES and len(buffer.shape) == 1:
        array = reader.rows(buffer.name, 0, buffer.shape[0]).astype(np.float32)
        # Saved in half precision by some; 1 % still tells one theta or scaling from another.
        if any(v.shape == array.shape and np.allclose(array, v, rtol=1e-2) for v in buffer_values(spec)):
            return
    raise CheckpointError(f"{buffer.file}: {buffer.name} differs from the rope settings of config.json")


def _check_extra(
    spec: ModelSpec, reader: RowReader, stored: Mapping[str, StoredTensor], name: str, shards: Shards
) -> None:
    """Tensors that are no parameter must say the same as what they repeat."""
    head = tied_head_copy(spec)
    if head is not None and name == head.name:
        (embed,) = (m.name for m in tensor_map(spec) if m.path == head.path)
        check_tied_head(reader, stored[embed], stored[name], *shards.rows(embed))
    else:
        check_buffer(spec, reader, stored[name])
