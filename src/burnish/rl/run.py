"""What every training command has around its loop: the run directory, signals, checkpoints, step lines and metrics.

A run is a sequence of steps that each either happened whole or not at all. Saving, stopping on SIGTERM and resuming
are here; what a step does is the loop's.
"""

import dataclasses
import errno
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import yaml
from rich.console import Console

from burnish import __version__
from burnish.checkpoints.arrays import Storage
from burnish.checkpoints.preemption import SAVED_FOR_RESTART, StopFlag, stop_on_signals
from burnish.checkpoints.run_dir import RunDirectory
from burnish.checkpoints.store import TrainingStore
from burnish.config.schema import RunConfig, SFTConfig
from burnish.errors import BurnishError
from burnish.models.params import ParamInfo, param_infos
from burnish.observe.files import write_whole
from burnish.observe.metrics import MetricsWriter
from burnish.observe.rollouts import drop_rollouts_after
from burnish.observe.terminal import StepPrinter
from burnish.parallel import pathways, processes
from burnish.rl.loading import ModelSource
from burnish.rl.optimizer import TrainState, init_state
from burnish.rl.update import Updater

# Options that decide what the saved data position and weights mean: a run goes on with those it was started with.
_FIXED = [
    "load_parameters_path",
    "model_name",
    "weight_dtype",
    "optimizer",
    "mu_dtype",
    "batch_size",
    "dataset_name",
    "train_split",
    "hf_subset",
    "hf_train_files",
    "question_column",
    "answer_column",
    "dataset_processor_path",
    "data_template_path",
    "data_shuffle_seed",
    "train_fraction",
    "max_prefill_predict_length",
    "seed",
]
# Where and how often things are written; nobody needs to be told that they changed.
_INCIDENTAL = {
    "base_output_directory",
    "run_name",
    "log_period",
    "tensorboard_dir",
    "profiler",
    "debug",
}

# No room, quota used up, or remounted read-only after an error of the disk.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class Stopped(Exception):
    """A signal asked the run to stop while a step was under way; the step has changed nothing."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint as it comes back: the state after `step` steps, and what the loop had saved with it."""

    step: int
    state: TrainState
    extra: dict[str, Any]


class Nothing:
    """Takes metrics where another process writes them."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass


@dataclass
class Run:
    """A claimed run directory and everything that writes to it."""

    cfg: RunConfig | SFTConfig
    directory: RunDirectory
    store: TrainingStore
    stop: StopFlag
    printer: StepPrinter
    snapshot: Path  # source files of the model, saved with every checkpoint
    saved_step: int = 0

    def check_stop(self) -> None:
        """Raises Stopped when a signal has come to any process: called where a step can still be given up, and by all
        processes at the same point."""
        if processes.any_of(self.stop.requested):
            raise Stopped

    def restore(self, model: ModelSource, updater: Updater) -> Restored | None:
        """The newest checkpoint of a resumed run; None for a new one, and where nothing was saved yet. Raises
        BurnishError where nothing is left to do."""
        step = self.latest_step() if self.cfg.resume else None
        if step is None:
            self._forget_the_end()
            return None
        if step > self.cfg.num_batches or (step == self.cfg.num_batches and self._has_ended()):
            raise BurnishError(
                f"{self.directory.path} has made {step} steps already and nothing is left to do; to train on, give "
                f"num_batches above {step} (the learning-rate schedule then follows the new number)"
            )
        like = abstract_state(model, updater, self.cfg.weight_dtype)
        params, rest, extra = self.store.restore(step, like.params, dataclasses.replace(like, params={}))
        self.saved_step = step
        self._forget_the_end()
        self.printer.note(f"Resuming {self.directory.path} from step {step}")
        return Restored(step, dataclasses.replace(rest, params=params), extra)

    def latest_step(self) -> int | None:
        """The newest checkpoint, as the first process sees it."""
        return processes.gather(self.store.latest())[0]

    def _has_ended(self) -> bool:
        """Whether the summary is there and is that of all steps, not of a shorter run that is being extended."""
        try:
            return json.loads(self.directory.summary.read_text())["steps"] == self.cfg.num_batches
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _forget_the_end(self) -> None:
        """Deletes what says how the run ended before it was made longer."""

        def forget() -> None:
            for file in (self.directory.summary, self.directory.curve):
                file.unlink(missing_ok=True)

        processes.by_first(forget)

    def check_space(self, model: ModelSource, updater: Updater) -> None:
        """Raises StoreError where checkpoints are to be saved and the disk has no room for one."""
        if self.cfg.enable_checkpointing and (self.store.latest() or 0) < self.cfg.num_batches:
            state = abstract_state(model, updater, self.cfg.weight_dtype)
            self.store.make_room(state.params, dataclasses.replace(state, params={}), self.snapshot)

    def note_skipped(self, step: int, skipped: int) -> None:
        """Says that updates of a step were skipped, if any were."""
        if skipped:
            what = "an update was" if skipped == 1 else f"{skipped} updates were"
            self.printer.note(f"Step {step}: {what} skipped, the gradient was not finite")

    def ended_badly(self, step: int, state: TrainState) -> bool:
        """Whether this is the last step and its last update was skipped: the run ends with `ruined` then, and what
        it came to is not saved."""
        return step == self.cfg.num_batches and int(state.skipped_in_a_row) > 0

    def ruined(self, state: TrainState) -> BurnishError:
        """The error with which a run ends whose last updates were skipped."""
        saved = [f"the newest is {self.directory.checkpoints / str(s)}" for s in self.store.steps()[-1:]]
        return BurnishError(
            f"the gradient was not finite in the last {int(state.skipped_in_a_row)} updates: the update before them "
            "has probably ruined the weights. They are not saved; of the checkpoints saved before, "
            f"{saved[0] if saved else 'there is none'}. Lower learning_rate, set gradient_clipping_threshold, "
            "or use dtype=float32"
        )

    def save(self, step: int, state: TrainState, extra: Mapping[str, Any]) -> float:
        """Saves the state after `step` steps, if it is not saved already; the seconds that took."""
        if not self.cfg.enable_checkpointing or step <= self.saved_step:
            return 0.0
        start = time.perf_counter()
        self.printer.phase(f"step {step}: saving")
        self.store.save(step, state.params, dataclasses.replace(state, params={}), extra, self.snapshot)
        self.saved_step = step
        return time.perf_counter() - start

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is saved after this step."""
        return step % self.cfg.checkpoint_period == 0 or step == self.cfg.num_batches

    def end_for_restart(self, step: int) -> BurnishError:
        """The error with which a stopped run ends, after `step` whole steps."""
        if not self.cfg.enable_checkpointing:
            how = "nothing is saved (enable_checkpointing=false)"
        else:
            what = f"step {step} is saved" if step else "there was nothing to save"
            how = f"{what}; go on with run_name={self.cfg.run_name} resume=true"
        when = f"after step {step}" if step else "before the first step was done"
        reason = self.stop.reason or "a signal to another process"
        return BurnishError(f"stopped by {reason} {when}: {how}", exit_code=SAVED_FOR_RESTART)

    @contextmanager
    def writers(self, start: int, metrics: Mapping[str, float | None] | None) -> Iterator[MetricsWriter | Nothing]:
        """metrics.jsonl and TensorBoard, written by the first process. What a resumed run had written beyond its
        checkpoint of step `start` is dropped, and that step's own `metrics` are written where it was killed before it
        could."""
        if not processes.is_first():
            yield Nothing()
            return
        if self.cfg.resume:
            drop_rollouts_after(self.directory.rollouts, start)
        tensorboard = self.cfg.tensorboard_dir or self.directory.tensorboard
        with MetricsWriter(self.directory.metrics, tensorboard, start if self.cfg.resume else None) as writer:
            if metrics is not None and writer.last_step != start:
                writer.write(start, {k: math.nan if v is None else v for k, v in metrics.items()})
            yield writer

    @contextmanager
    def profiled(self, step: int, first_step: int) -> Iterator[None]:
        """With profiler=xplane, traces the second and third step of this process (the first one compiles)."""
        if self.cfg.profiler != "xplane" or step - first_step not in (1, 2):
            yield
            return
        with jax.profiler.trace(str(self.directory.profile)):
            yield


C = TypeVar("C", RunConfig, SFTConfig)


def same_options(cfg: C) -> C:
    """The options with the first process's run_name, which may be the time. Raises ProcessError where the processes
    have different ones."""
    options = cfg.public_dump()
    if "run_name" not in cfg.model_fields_set:
        del options["run_name"]
    processes.same_options(options)
    return cfg.model_copy(update={"run_name": processes.gather(cfg.run_name)[0]})


@contextmanager
def open_run(cfg: RunConfig | SFTConfig, model: ModelSource) -> Iterator[Run]:
    """Claims the run directory and writes the options into it. Raises BurnishError when it is in use or used, when
    a resumed run's options are not those it was started with, and when the disk is full or read-only, then or at any
    time inside."""
    directory = RunDirectory(cfg.base_output_directory, cfg.run_name)
    with ExitStack() as stack:
        processes.by_first(lambda: stack.enter_context(directory.claim(cfg.resume)))
        processes.together(lambda: _check_seen(directory))
        stack.enter_context(_disk_errors_explained(cfg, directory))
        stop = stack.enter_context(stop_on_signals())
        snapshot = stack.enter_context(model.snapshot())
        console = None if processes.is_first() else Console(quiet=True)
        printer = stack.enter_context(StepPrinter(cfg.num_batches, console))
        notes: list[str] = []
        processes.by_first(lambda: notes.extend(_keep_config(cfg, directory)))
        for note in notes:
            printer.note(note)
        store = TrainingStore(directory.checkpoints, cfg.max_num_checkpoints_to_keep, storage(cfg))
        yield Run(cfg, directory, store, stop, printer, snapshot)


def storage(cfg: RunConfig | SFTConfig) -> Storage:
    """How checkpoints are stored: as the options say, else by directory and in Zarr 2 under Pathways."""
    usual = not pathways.is_asked_for()
    return Storage(
        use_ocdbt=usual if cfg.checkpoint_storage_use_ocdbt is None else cfg.checkpoint_storage_use_ocdbt,
        use_zarr3=usual if cfg.checkpoint_storage_use_zarr3 is None else cfg.checkpoint_storage_use_zarr3,
    )


def _check_seen(directory: RunDirectory) -> None:
    if not directory.path.exists():
        raise BurnishError(
            f"base_output_directory: {directory.path} was made by process 0 and process {jax.process_index()} does not "
            "see it; give a directory that all hosts share, or gs://"
        )


@contextmanager
def _disk_errors_explained(cfg: RunConfig | SFTConfig, directory: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno not in _DISK_ERRORS:
            raise
        steps = TrainingStore(directory.checkpoints, cfg.max_num_checkpoints_to_keep).steps()
        safe = f"the checkpoint of step {steps[-1]} is safe" if steps else "no checkpoint was saved yet"
        raise BurnishError(
            f"{e.filename or directory.path}: {e.strerror}: the run cannot be written any more; {safe}. Once there is "
            f"room in {directory.path} go on with run_name={cfg.run_name} resume=true"
        ) from e


def _keep_config(cfg: RunConfig | SFTConfig, directory: RunDirectory) -> list[str]:
    """Writes config.yaml; for a resumed run, what has changed since it was started."""
    options = {k: v for k, v in cfg.public_dump().items() if k != "resume"}  # a recipe is for a run of its own
    notes = []
    if cfg.resume and directory.contents() and directory.config.exists():
        before = _read_config(directory)
        changed = {k for k in options if k not in _INCIDENTAL and before.get(k) != options[k]}
        if fixed := sorted(changed & set(_FIXED)):
            was = ", ".join(f"{k}={before.get(k)} (now {options[k]})" for k in fixed)
            raise BurnishError(
                f"{directory.path} was started with {was}; a resumed run needs the same: give it, or start a new run"
            )
        notes = [f"Changed since the run was started: {k}: {before.get(k)} -> {options[k]}" for k in sorted(changed)]
    header = f"# The options of this run (burnish {__version__}), usable as a recipe: burnish <command> config.yaml\n"
    write_whole(directory.config, header + yaml.safe_dump(options, sort_keys=True, allow_unicode=True))
    return notes


def _read_config(directory: RunDirectory) -> dict[str, Any]:
    try:
        options = yaml.safe_load(directory.config.read_text())
    except (yaml.YAMLError, ValueError):
        options = None
    if not isinstance(options, dict):
        raise BurnishError(
            f"{directory.config} is empty or damaged, so that nobody knows what the run was started with; "
            "delete it to resume with the options given now"
        )
    return options


def abstract_state(model: ModelSource, updater: Updater, weight_dtype: str) -> TrainState:
    """The shapes, dtypes and shardings of a run's TrainState, with nothing allocated."""
    params = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(info.shape, jnp.dtype(weight_dtype)),
        param_infos(model.spec),
        is_leaf=lambda x: isinstance(x, ParamInfo),
    )
    state = jax.eval_shape(partial(init_state, updater.options.optimizer), params)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, updater.state_shardings
    )


def plain_metrics(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """A step's metrics as a checkpoint can hold them: JSON has no NaN and no infinities."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}
