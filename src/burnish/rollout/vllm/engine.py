"""vLLM behind the interface of the built-in engine: token ids in and out, seeds, logprobs, weight versions.

vLLM runs in another process with an empty model of the same config; the trainer's weights are streamed into it by
name after every update, tensor by tensor, each checked against a checksum made on the trainer's device. Every
completion is a request of its own with its own seed; its group's prompt is shared through vLLM's prefix cache.
"""

import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from burnish.data.types import Prompt
from burnish.models.families import tensor_map
from burnish.models.params import Params
from burnish.models.spec import ModelSpec
from burnish.parallel.transfer import Transfer
from burnish.rollout.request import check_request
from burnish.rollout.stopping import stop_string_end
from burnish.rollout.types import Completion, Group, SamplingParams, StopReason
from burnish.rollout.vllm.process import VllmError, VllmLost, VllmProcess, VllmWeightsError

CHUNK_BYTES = 256 * 2**20
"""Most bytes of weights in one message, where rl.reshard_chunk_size does not say."""

LOWEST_TEMPERATURE = 0.01
"""vLLM silently samples at this temperature where a lower one is asked for."""

_CPU_BLOCK = 128  # tokens in a block of vLLM's cache on a CPU

_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?|AUTH)(_|$)")
"""Names of environment variables that vLLM, which loads no weights, has no use for."""


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM is run. `timeout` is the longest silence of its process in seconds (starting it may take three times
    as long), `restarts` how often it may be started again in a run, `chunk_size` how many tensors go to it at once.
    None leaves a choice to vLLM."""

    python: str | None = None
    timeout: float = 600.0
    restarts: int = 1
    chunk_size: int | None = None
    tensor_parallelism: int = 1
    cuda_devices: str | None = None
    """CUDA_VISIBLE_DEVICES of the process."""
    max_num_batched_tokens: int | None = None
    memory_fraction: float | None = None
    async_scheduling: bool = False
    enable_prefix_caching: bool = True
    hf_overrides: dict[str, Any] | None = None
    additional_config: dict[str, Any] | None = None


class _Tensor(NamedTuple):
    name: str
    array: np.ndarray
    checksum: int  # the sum of the elements' bit patterns modulo 2**32, from the trainer's device


class VllmEngine:
    """See RolloutEngine. `directory` holds the model's config and tokenizer (weights are not read). What vLLM prints
    is added to the file `log`; without one, to a temporary file, which stays where vLLM failed. `note` is told of
    restarts; `on_wait` is called twice a second while vLLM starts, takes weights or releases memory, and what it raises
    ends vLLM's process and goes through. Raises VllmError where vLLM can not be started, and ValueError as the built-in
    engine does."""

    def __init__(
        self,
        spec: ModelSpec,
        directory: Path,
        tokenizer_decode: Callable[[list[int]], str],
        options: VllmOptions,
        *,
        max_slots: int,
        max_prompt_tokens: int,
        max_total_tokens: int,
        dtype: Any,
        log: Path | None = None,
        note: Callable[[str], None] = lambda line: None,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        self._spec, self._directory, self._decode_text = spec, directory, tokenizer_decode
        self._options, self._note, self._on_wait = options, note, on_wait
        self._max_slots = max_slots
        self._max_prompt_tokens, self._max_total_tokens = max_prompt_tokens, max_total_tokens
        self._dtype = jnp.dtype(dtype)
        self._mappings = tensor_map(spec)
        self._restarts_left = options.restarts
        self._params: Params | None = None
        self._version = -1
        self._is_current = False  # whether vLLM has these weights
        self._removes_log = log is None
        self._log = _temporary_log() if log is None else log
        self._process: VllmProcess | None = None
        self._or_again(lambda process: None, on_wait)

    def close(self) -> None:
        """Ends vLLM's process. A temporary log is left where an error has named it."""
        self._end_process()
        if self._removes_log:
            self._log.unlink(missing_ok=True)

    @property
    def pid(self) -> int | None:
        """vLLM's process, where there is one."""
        return None if self._process is None else self._process.pid

    @property
    def num_compilations(self) -> int:
        """0: vLLM does not tell."""
        return 0

    def load_weights(self, params: Params, version: int) -> Transfer:
        """Streams the trainer's tree to vLLM. Until the next call or release_memory it is remembered (not copied), for
        a restart. Raises VllmWeightsError where it is not what vLLM's model takes."""
        start = time.perf_counter()
        self._params, self._version, self._is_current = params, version, False
        self._or_again(lambda process: None, self._on_wait)
        num_bytes = sum(math.prod(m.hf_shape) for m in self._mappings) * self._dtype.itemsize
        return Transfer(version, len(self._mappings), num_bytes, time.perf_counter() - start)

    def release_memory(self) -> None:
        """Weights and caches leave the accelerator, and `load_weights` has to come before `generate`; on CPU vLLM keeps
        them."""
        self._params, self._is_current = None, False
        sleep, timeout = {"do": "sleep"}, self._options.timeout
        self._or_again(lambda process: process.ask(sleep, timeout=timeout, on_wait=self._on_wait), self._on_wait)

    def generate(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[Sequence[int]],
        sampling: SamplingParams,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Group]:
        """See RolloutEngine. Completions come back in the order of their seeds. Raises VllmError, too, where vLLM would
        sample in another way than is asked for."""
        if self._params is None:
            raise RuntimeError("generate was called before load_weights")
        check_request(prompts, seeds, sampling, self._spec.vocab_size, self._max_prompt_tokens, self._max_total_tokens)
        check_sampling(sampling)
        for seed in (seed for row in seeds for seed in row):
            if not 0 <= seed < 2**32:  # torch's generator for CPUs reads no more bits
                raise ValueError(f"seed {seed}: vLLM takes 0 to 2**32 - 1")
        if not prompts:
            return []
        message = {
            "do": "generate",
            "prompts": [list(map(int, prompt.token_ids)) for prompt in prompts],
            "requests": [
                [i, seed, sampling.max_total_tokens - len(prompt.token_ids)]
                for i, (prompt, row) in enumerate(zip(prompts, seeds, strict=True))
                for seed in row
            ],
            "sampling": _sampling(sampling),
        }
        # The last figures again: a stop is heeded while nothing new comes.
        latest = (0, 0)

        def progress(finished: int, tokens: int) -> None:
            nonlocal latest
            latest = finished, tokens
            wait()

        def wait() -> None:
            if on_progress is not None:
                on_progress(*latest)

        answer = self._or_again(
            lambda process: process.ask(message, timeout=self._options.timeout, on_progress=progress, on_wait=wait),
            wait,
        )
        if answer["version"] != self._version:
            raise VllmError(f"vLLM sampled with weights of version {answer['version']}, not {self._version}")
        answers: Iterator[list[Any]] = iter(answer["completions"])
        return [
            Group(prompt, tuple(self._completion(next(answers), seed, sampling) for seed in row))
            for prompt, row in zip(prompts, seeds, strict=True)
        ]

    def _completion(self, answer: list[Any], seed: int, sampling: SamplingParams) -> Completion:
        ids, logprobs, finish, stop = answer
        end = len(ids)
        reasons = {"length": StopReason.LENGTH, "stop": StopReason.STOP}
        if finish not in reasons:
            raise VllmError(f"vLLM ended a completion by {finish!r} ({stop!r}); its log is {self._log}")
        reason = StopReason.STOP_STRING if isinstance(stop, str) else reasons[finish]
        if sampling.stop_strings and not sampling.ignore_stop:
            # vLLM looks at text as it grows: the built-in engine's rule says after which token it ends.
            found = stop_string_end(ids, 0, sampling.stop_strings, self._decode_text)
            if found is None and reason is StopReason.STOP_STRING:
                raise VllmError(
                    f"vLLM stopped at {stop!r}, which the completion's text {self._decode_text(ids)!r} does not "
                    "hold: it decodes in another way; leave out that stop string, or use rollout_engine=builtin"
                )
            if found is not None and not (reason is StopReason.STOP and found == end):
                end, reason = found, StopReason.STOP_STRING
        return Completion(
            token_ids=np.array(ids[:end], np.int32),
            logprobs=np.array(logprobs[:end], np.float32),
            weight_versions=np.full(end, self._version, np.int32),
            stop_reason=reason,
            text=self._decode_text(ids[:end]),
            seed=seed,
        )

    def _or_again(self, action: Callable[[VllmProcess], Any], on_wait: Callable[[], None] | None) -> Any:
        """What `action` returns, of a process that has the newest weights; where that is lost and may be started
        again, what its repetition returns. `on_wait` is called while it gets ready."""
        while True:
            try:
                return action(self._ready(on_wait))
            except BaseException as error:
                if not isinstance(error, VllmWeightsError):  # else it is not in the middle of anything
                    self._end_process()
                if not isinstance(error, VllmLost) or not self._restarts_left:
                    self._removes_log = self._removes_log and not isinstance(error, VllmError)
                    raise
                self._restarts_left -= 1
                self._note(f"{error}\nStarting vLLM again ({self._restarts_left} restarts left)")

    def _end_process(self) -> None:
        self._is_current = False
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def _ready(self, on_wait: Callable[[], None] | None) -> VllmProcess:
        """The process, started and with the weights there are."""
        if self._process is None:
            o = self._options
            self._process = VllmProcess(o.python, self._log, self._environment())
            self._process.ask(self._start_message(), timeout=3 * o.timeout, on_wait=on_wait)
        if self._params is not None and not self._is_current:
            self._send_weights(self._process, on_wait)
            self._is_current = True
        return self._process

    def _start_message(self) -> dict[str, Any]:
        o = self._options
        options = {
            "dtype": str(self._dtype),
            "max_model_len": self._max_total_tokens,
            "max_num_seqs": self._max_slots,
            "max_num_batched_tokens": o.max_num_batched_tokens,
            "gpu_memory_utilization": o.memory_fraction,
            "tensor_parallel_size": o.tensor_parallelism,
            "async_scheduling": o.async_scheduling,
            "enable_prefix_caching": o.enable_prefix_caching,
            "hf_overrides": o.hf_overrides,
            "additional_config": o.additional_config,
        }
        return {
            "do": "start",
            "model": str(self._directory),
            "cpu_cache_bytes": self._cache_bytes() if o.memory_fraction is None else None,
            "options": {name: value for name, value in options.items() if value is not None},
            "manifest": [(m.name, str(self._dtype), m.hf_shape) for m in self._mappings],
        }

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not _SECRET.search(name.upper())}
        environment |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # it has a sampler of its own
            "PYTHONPATH": str(Path(__file__).parent / "worker"),
        }
        if self._options.cuda_devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self._options.cuda_devices
        if self._options.memory_fraction is not None:
            environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would be heeded, and the fraction not
        return environment

    def _cache_bytes(self) -> int:
        """Room for the keys and values of what is sampled at once, and of one completion more: on a CPU vLLM would take
        a share of all memory. Layers of different kinds get blocks of one size, so that some of it is not used."""
        kinds = [self._spec.at(i) for i in range(self._spec.num_layers)]
        per_token = sum(2 * kind.num_kv_heads * kind.head_dim for kind in kinds) * self._dtype.itemsize
        blocks = math.ceil(self._max_total_tokens / _CPU_BLOCK) * (self._max_slots + 1)
        return blocks * _CPU_BLOCK * per_token * (1 if len(set(kinds)) == 1 else 2)

    def _send_weights(self, process: VllmProcess, on_wait: Callable[[], None] | None) -> None:
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self._params)):
            raise VllmError(
                f"vLLM was lost while it sampled with weights of version {self._version}, which the trainer has "
                "changed since: the run goes on from its newest checkpoint with resume=true"
            )
        ask = partial(process.ask, timeout=self._options.timeout, on_wait=on_wait)
        ask({"do": "weights_begin"})
        for chunk in self._chunks():
            described = [(t.name, str(t.array.dtype), t.array.shape, t.array.nbytes, t.checksum) for t in chunk]
            payload = [t.array.view(np.uint8).data for t in chunk]
            ask({"do": "weights", "tensors": described}, payload)
        ask({"do": "weights_end", "version": self._version})

    def _chunks(self) -> Iterator[list[_Tensor]]:
        """The tensors, as many at a time as one message takes."""
        chunk: list[_Tensor] = []
        size = 0
        for tensor in self._tensors():
            full = len(chunk) == self._options.chunk_size or size + tensor.array.nbytes > CHUNK_BYTES
            if chunk and full:
                yield chunk
                chunk, size = [], 0
            chunk.append(tensor)
            size += tensor.array.nbytes
        yield chunk

    def _tensors(self) -> Iterator[_Tensor]:
        """Every tensor under its Hugging Face name, layer by layer."""
        for mapping in self._mappings:
            part, checksum = _cast(jnp.asarray(mapping.slot(self._params)), self._dtype)
            array = np.ascontiguousarray(mapping.to_hf(np.asarray(part)))
            yield _Tensor(mapping.name, array, int(checksum))


@jax.jit(static_argnums=1)
def _cast(array: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The array in `dtype`, and the sum of its elements' bit patterns modulo 2**32."""
    array = array.astype(dtype)
    bits = lax.bitcast_convert_type(array, {2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize])
    return array, jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def check_sampling(sampling: SamplingParams) -> None:
    """Raises VllmError where vLLM would sample in another way than this says."""
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise VllmError(
            f"temperature {sampling.temperature:g}: vLLM samples at {LOWEST_TEMPERATURE:g} or above; give 0 (greedy) "
            f"or at least {LOWEST_TEMPERATURE:g}, or rollout_engine=builtin"
        )
    if sampling.min_p and sampling.top_p < 1:
        raise VllmError(
            f"min_p={sampling.min_p:g} with top_p={sampling.top_p:g}: vLLM cuts by min-p first and takes top-p of what "
            "is left, burnish the other way round; give one of the two, or rollout_engine=builtin"
        )


def _temporary_log() -> Path:
    try:
        with tempfile.NamedTemporaryFile(prefix="burnish-vllm-", suffix=".log", delete=False) as file:
            return Path(file.name)
    except OSError as error:
        raise VllmError(
            f"no temporary file can be made for the log of vLLM's process ({error.strerror}); set TMPDIR to a "
            "directory that can be written"
        ) from error


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    """As vLLM's SamplingParams take it."""
    stop = list(sampling.stop_strings) if not sampling.ignore_stop else []
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop_token_ids": [] if sampling.ignore_stop else list(sampling.stop_token_ids),
        "stop": stop,
        "detokenize": bool(stop),
    }
