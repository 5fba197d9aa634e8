"""The run directory: every path in it, and who may use it.

`<base_output_directory>/<run_name>` belongs to one run. A directory that holds one already is refused
unless the run is resumed, and a lock keeps a second live process out. The lock is the operating system's,
so it ends with the process, however that ends; on gs:// there is none.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from burnish.errors import BurnishError
from burnish.observe.files import is_local

# Descriptors of the locks held by this process. A forked child closes its copies: otherwise a reward worker
# that outlives a killed run would go on holding the run's lock.
_held_locks: set[int] = set()


class RunDirectoryError(BurnishError):
    """A run directory cannot be used: it holds another run, a live process has it, or it cannot be made."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of the run `run_name` under `base_output_directory` (local or gs://)."""

    base_output_directory: str
    run_name: str

    def __post_init__(self) -> None:
        if self.run_name in ("", ".", "..") or "/" in self.run_name:
            raise RunDirectoryError(f"run_name={self.run_name!r}: give one directory name, without slashes")
        if not self.base_output_directory:
            raise RunDirectoryError("base_output_directory is empty: give a local directory or gs://bucket/path")
        if not is_local(self.base_output_directory) and not self.base_output_directory.startswith("gs://"):
            raise RunDirectoryError(
                f"base_output_directory={self.base_output_directory}: give a local directory or gs://bucket/path"
            )

    @property
    def path(self) -> epath.Path:
        base = self.base_output_directory
        return epath.Path(os.path.abspath(os.path.expanduser(base)) if is_local(base) else base) / self.run_name

    @property
    def checkpoints(self) -> epath.Path:
        """Holds `<step>/model_params` and the rest of each training checkpoint."""
        return self.path / "checkpoints" / "actor"

    @property
    def config(self) -> epath.Path:
        """The options the run was started with, as a recipe."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> epath.Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> epath.Path:
        return self.path / "tensorboard"

    @property
    def rollouts(self) -> epath.Path:
        return self.path / "rollouts"

    @property
    def profile(self) -> epath.Path:
        return self.path / "profile"

    @property
    def summary(self) -> epath.Path:
        return self.path / "summary.json"

    @property
    def curve(self) -> epath.Path:
        return self.path / "curve.png"

    @property
    def export(self) -> epath.Path:
        """The trained model in Hugging Face format, where a command makes it as part of the run."""
        return self.path / "hf"

    @property
    def vllm_log(self) -> epath.Path:
        """What vLLM prints, of every start."""
        return self.path / "vllm.log"

    @property
    def lock(self) -> epath.Path:
        return self.path / ".lock"

    def contents(self) -> list[str]:
        """Names of what earlier processes of the run left, sorted. What there is of a run that ended before its
        first step (lock, options, vLLM's log, metrics without a line) is nothing.
        """
        if not self.path.exists():
            return []
        nothing = {self.lock.name, self.config.name, self.tensorboard.name, self.vllm_log.name}
        return sorted(
            entry.name
            for entry in self.path.iterdir()
            if entry.name not in nothing and not (entry.name == self.metrics.name and not entry.stat().length)
        )

    def check(self, resume: bool) -> None:
        """What `claim` would find, without making anything: for the start of a command, before it reads data.

        Raises RunDirectoryError when the directory is used and `resume` is false, and when it cannot be made.
        """
        with _usable(self.path):
            self._refuse_used(resume)
        if not is_local(self.path):
            return
        there = Path(self.path)
        while not os.path.lexists(there):
            there = there.parent
        if not there.is_dir():
            raise RunDirectoryError(f"base_output_directory: {self.path} cannot be made, {there} is no directory")
        if not os.access(there, os.W_OK | os.X_OK):
            raise RunDirectoryError(f"base_output_directory: {self.path} cannot be used, {there} is not writable")

    @contextmanager
    def claim(self, resume: bool) -> Iterator[None]:
        """Makes the directory and holds it for this process.

        With `resume` an unused directory is fine too: a scheduler restarts the same command, and the first
        start may have been cut short. Raises RunDirectoryError when it is used and `resume` is false, when
        another live process holds it, and when it cannot be made or locked.
        """
        with _usable(self.path):
            self._refuse_used(resume)
            self.path.mkdir(parents=True, exist_ok=True)
        if not is_local(self.path):
            yield
            return
        with _locked(Path(self.lock)):
            with _usable(self.path):
                self._refuse_used(resume)  # it may have been used and left since
            yield

    def _refuse_used(self, resume: bool) -> None:
        if not resume and (contents := self.contents()):
            raise RunDirectoryError(
                f"{self.path} already holds a run ({', '.join(contents)}): continue it with resume=true or "
                f"choose another run_name than {self.run_name}"
            )


@contextmanager
def _usable(path: epath.PathLike) -> Iterator[None]:
    """Turns what a file system or an object store says inside into a RunDirectoryError."""
    try:
        yield
    except RunDirectoryError:
        raise
    except ImportError as e:
        raise RunDirectoryError(f"base_output_directory: {path} needs gcsfs; pip install 'burnish[gcs]'") from e
    except Exception as e:
        if is_local(path) and not isinstance(e, OSError):
            raise
        # Object stores have errors of their own: no such bucket, no credentials, no network.
        raise RunDirectoryError(f"base_output_directory: {path} cannot be used: {e or type(e).__name__}") from e


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with _usable(path.parent):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with _usable(path.parent):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
                raise RunDirectoryError(
                    f"{path.parent} is in use by {holder or 'another process'}: "
                    "wait for it, end it or choose another run_name"
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held_locks.add(fd)
        yield
    finally:
        _held_locks.discard(fd)
        os.close(fd)


def _close_inherited_locks() -> None:
    for fd in _held_locks:
        os.close(fd)
    _held_locks.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)
