"""The model a command starts from: found and described first, its weights read only when they are needed.

`load_parameters_path` may be a Hugging Face directory, a hub id, a MaxText checkpoint, a training checkpoint, or
"builtin" (the embedded demonstration model). Everything cheap (config, tokenizer) is read by `open_model`, so that
mistakes show before gigabytes are read.
"""

import atexit
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from burnish.checkpoints.hf_export import snapshot_source
from burnish.checkpoints.hf_import import left_out_tensors, load_params, read_config, resolve
from burnish.checkpoints.sources import kind_of, load_maxtext, maxtext_config_directory
from burnish.checkpoints.store import find_checkpoint, hf_source_files, load_model_params
from burnish.config.groups import WeightsOptions
from burnish.config.schema import ChatConfig, EvalConfig, RunConfig, SFTConfig
from burnish.data.tokenizer import Tokenizer, load_tokenizer
from burnish.errors import BurnishError
from burnish.models.families import spec_from_hf
from burnish.models.params import Params, num_params
from burnish.models.spec import ModelSpec


@dataclass(frozen=True)
class ModelSource:
    """A model that was found. `directory` holds its config and tokenizer, and its weights unless `checkpoint`, a
    training checkpoint, or `maxtext`, the path of a MaxText checkpoint, has them."""

    spec: ModelSpec
    tokenizer: Tokenizer
    directory: Path
    checkpoint: epath.Path | None
    model_name: str | None
    maxtext: str | None = None

    def load(
        self, dtype: str = "float32", console: Console | None = None, *, shardings: Params | None = None
    ) -> Params:
        """The weights in `dtype` ("float32" or "bfloat16"), with a progress bar in a terminal: jax arrays that an
        update may consume where there is a tree of `shardings`, of which this process reads what its devices hold;
        else NumPy arrays."""
        if self.checkpoint is not None:
            return load_model_params(self.checkpoint, dtype, shardings)
        columns = (TextColumn("Reading weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        console = console or Console()
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=None)
            if self.maxtext is not None:
                return load_maxtext(
                    self.maxtext,
                    read_config(self.directory, self.model_name),
                    jnp.dtype(dtype),
                    lambda done, total: progress.update(task, completed=done, total=total),
                    shardings,
                )
            _, params = load_params(
                self.directory,
                self.model_name,
                jnp.dtype(dtype),
                lambda _, done, total: progress.update(task, completed=done, total=total),
                shardings,
            )
        return params

    def describe(self) -> str:
        """One line for the log."""
        s = self.spec
        unread = left_out_tensors(self.directory, s)
        text_part = f"; text part only: {len(unread)} tensors left out ({unread[0]}, …)" if unread else ""
        return (
            f"Model: {self.checkpoint or self.maxtext or self.directory}: {s.family}, "
            f"{num_params(s) / 1e6:,.1f} M parameters, {s.num_layers} layers, width {s.d_model}, "
            f"vocabulary {s.vocab_size:,}{text_part}"
        )

    @contextmanager
    def snapshot(self) -> Iterator[Path]:
        """A directory with what an export of this model needs besides weights."""
        with tempfile.TemporaryDirectory(prefix="burnish-source-") as scratch:
            target = Path(scratch) / "source"
            snapshot_source(self.directory, target, self.model_name)
            yield target


def open_model(cfg: RunConfig | SFTConfig | EvalConfig | ChatConfig) -> ModelSource:
    """Find the model of the options and read everything but its weights. Raises BurnishError."""
    checkpoint = find_checkpoint(cfg.load_parameters_path)
    path = cfg.load_parameters_path
    maxtext = path if kind_of(path) == "maxtext" else None
    if maxtext is not None:
        directory = local_directory(
            maxtext_config_directory(maxtext, cfg.tokenizer_path, cfg.model_name, access_token(cfg))
        )
    else:
        directory = source_directory(cfg) if checkpoint is None else checkpoint_source(checkpoint)
    spec = spec_from_hf(read_config(directory, cfg.model_name))
    tokenizer = load_tokenizer(
        cfg.tokenizer_path or directory, cfg.chat_template_path, access_token(cfg), model_path=directory
    )
    if tokenizer.vocab_size > spec.vocab_size:
        raise BurnishError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, the model {spec.vocab_size}: they do not "
            "belong together; give the model's own with tokenizer_path"
        )
    if cfg.max_target_length > spec.max_positions:
        raise BurnishError(
            f"max_target_length={cfg.max_target_length} is more than the model has positions; give at most "
            f"{spec.max_positions}"
        )
    return ModelSource(spec, tokenizer, directory, checkpoint, cfg.model_name, maxtext)


def source_directory(cfg: WeightsOptions) -> Path:
    """The local directory of the Hugging Face checkpoint that the options name, downloaded if need be."""
    return resolve(cfg.load_parameters_path, access_token(cfg))


def access_token(cfg: WeightsOptions) -> str | None:
    return None if cfg.hf_access_token is None else cfg.hf_access_token.get_secret_value()


def checkpoint_source(checkpoint: epath.Path) -> Path:
    """A local directory with the source files that were saved with a training checkpoint."""
    source = hf_source_files(checkpoint)
    if source is None:
        raise BurnishError(
            f"{checkpoint} has no hf_source directory (config.json, tokenizer), without which its model is unknown"
        )
    return local_directory(source)


def local_directory(source: epath.Path) -> Path:
    """The directory itself, or a copy on this machine of one in an object store, which ends with this process."""
    if "://" not in str(source):
        return Path(source)
    local = Path(tempfile.mkdtemp(prefix="burnish-source-"))
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    for file in source.iterdir():
        file.copy(local / file.name)
    return local


def compute_dtype(name: str) -> Any:
    """The JAX dtype of activations for the option `dtype`: auto is bfloat16 on TPU and GPU, float32 on CPU."""
    if name == "auto":
        return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return jnp.dtype(name)
