"""`python split_devices.py DIRECTORY`: whole runs on virtual devices, with and without devices of its own for the
sampler; what they came to is written to DIRECTORY/found.json.

A program of its own, because the number of devices is settled when JAX starts. XLA_FLAGS must ask for 8, or for 32:
then it runs a mixture of experts in the layout of a slice of 32 chips under one controller, and nothing else.
"""

import json
import os
import re
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import tiny_runs
from tiny_rl import SPEC
from tiny_runs import assert_same_run, metrics, run_training

from burnish.config.overrides import load_config
from burnish.config.schema import RunConfig
from burnish.data import sources
from burnish.errors import BurnishError
from burnish.models.params import init_params, param_shardings
from burnish.observe.rollouts import read_rollouts
from burnish.parallel import transfer
from burnish.parallel.mesh import MeshSizes, make_mesh
from burnish.rl import setup, train
from burnish.rl.advantages import group_advantages
from burnish.rl.loading import open_model
from burnish.rl.packing import pack
from burnish.rl.update import Updater
from burnish.rollout.engine import BuiltinEngine

SPLIT = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5", "rollout_tensor_parallelism=2")
AHEAD = (*SPLIT, "rl.off_policy_steps=1", "rl.importance_weight_cap=1.05", "checkpoint_period=2", "num_batches=4")


class Cut(Exception):
    """The process dies here."""


@contextmanager
def at_score(call, action):
    """`action()` before the `call`-th scoring of completions; the caller's run goes on where it returns."""
    score, calls = train._score, iter(range(call - 1))

    def scoring(*arguments):
        if next(calls, None) is None:
            action()
        return score(*arguments)

    with mock.patch.object(train, "_score", scoring):
        yield


def die():
    raise Cut


def rollouts_of(run, steps):
    return [
        [(r.completion_ids, r.logprobs, r.weight_versions, r.reward) for r in read_rollouts(run / "rollouts", step)]
        for step in range(1, steps + 1)
    ]


def plain_loop(cfg):
    """The run with sampling one step ahead as one would write it down: one device, nothing at the same time. Metrics
    and tokens of each step."""
    model = open_model(cfg)
    pipeline = setup.train_pipeline(cfg, model.tokenizer, sources.load_examples(setup.data_options(cfg), "train"))
    engine = setup.make_engine(model, cfg, pipeline.longest_prompt, 8, cfg.dtype)
    updater = Updater(model.spec, setup.update_options(cfg))
    state = updater.init(jax.tree.map(lambda a: jax.device_put(a, may_alias=False), model.load()))
    versions = [jax.tree.map(np.array, state.params)]
    sampling = setup.sampling_params(cfg, model.tokenizer)
    found = []
    with train.RewardStack(setup.reward_options(cfg)) as stack:
        for step in range(1, cfg.num_batches + 1):
            prompts = next(pipeline)
            seeds = setup.completion_seeds(cfg.seed, "training", step, prompts, cfg.rl.num_generations)
            engine.load_weights(versions[max(0, step - 2)], max(0, step - 2))
            groups = engine.generate(prompts, seeds, sampling)
            rewards = np.array([[s.total for s in row] for row in train.score_groups(stack, groups)])
            valid = np.ones(rewards.shape, bool)
            packed = pack(groups, group_advantages(rewards, valid), valid, max_tokens=cfg.train_row_tokens)
            state, step_metrics, _ = updater.step(state, packed)
            versions.append(jax.tree.map(np.array, state.params))
            names = ("loss", "grad_norm", "importance_weight", "importance_truncated")
            found.append(
                {name: float(step_metrics[name]) for name in names}
                | {"ids": [c.token_ids.tolist() for g in groups for c in g.completions]}
            )
    return found


def move_weights():
    """From four devices to four others."""
    trainer = make_mesh(jax.devices()[:4], MeshSizes(fsdp=2, tensor=2))
    sampler = make_mesh(jax.devices()[4:], MeshSizes(data=2, tensor=2))
    params = jax.device_put(init_params(SPEC, jax.random.key(0)), param_shardings(SPEC, trainer))
    engine = BuiltinEngine(
        SPEC, str, max_slots=4, max_prompt_tokens=8, max_total_tokens=16, dtype="bfloat16", mesh=sampler
    )
    return engine.load_weights(params, 7)


def transfer_faults():
    """What is said of arrays that do not arrive, arrive without having been sent, or in each other's place."""
    copy = transfer._copy

    def lost(arrays, targets):
        return {name: x for name, x in copy(arrays, targets).items() if name != "layers/1/q_proj"}

    def extra(arrays, targets):
        found = copy(arrays, targets)
        return found | {"layers/9/q_proj": found["layers/1/q_proj"]}

    def swapped(arrays, targets):
        found = copy(arrays, targets)
        return found | {
            "layers/0/up_proj": found["layers/0/gate_proj"],
            "layers/0/gate_proj": found["layers/0/up_proj"],
        }

    def turned(arrays, targets):
        found = copy(arrays, targets)
        x = found["final_norm"]
        return found | {"final_norm": jax.device_put(np.roll(np.arange(x.size, dtype=x.dtype), 1), x.sharding)}

    found = {}
    for name, fault in {"lost": lost, "extra": extra, "swapped": swapped, "turned": turned}.items():
        with mock.patch.object(transfer, "_copy", fault):
            try:
                move_weights()
                found[name] = ""
            except transfer.TransferError as error:
                found[name] = str(error)
    return found


EXPERTS = {
    "vocab_size": 512,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
SLICE = (
    "trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5", "allow_split_physical_axes=true",
    "ici_tensor_parallelism=2", "ici_expert_parallelism=4", "ici_fsdp_parallelism=-1",
    "rollout_tensor_parallelism=4", "rollout_expert_parallelism=1", "rl.reshard_chunk_size=4",
)  # fmt: skip
ONE_EACH = ("trainer_devices_fraction=0.125", "sampler_devices_fraction=0.125")


def run_experts(base, *devices):
    """Two steps, one ahead, of a mixture of experts with Adafactor."""
    with mock.patch.dict(tiny_runs.SMALL, EXPERTS):
        checkpoint = tiny_runs.write_checkpoint(base / "experts")
    questions = tiny_runs.write_questions(base / "experts" / "questions.jsonl")
    options = ("optimizer=adafactor", "learning_rate=0.001", "num_batches=2", "batch_size=4", "rl.off_policy_steps=1")
    run_training(*tiny_runs.train_args(checkpoint, questions, base, "slice", *options, *devices))
    return {"metrics": metrics(base / "slice"), "ids": [[r[0] for r in s] for s in rollouts_of(base / "slice", 2)]}


def main(directory):
    base = Path(directory)
    if jax.device_count() == 32:
        (base / "found.json").write_text(json.dumps(run_experts(base, *SLICE)))
        return
    with mock.patch.dict(tiny_runs.SMALL, vocab_size=512):  # the tokenizer's 483 can not be halved
        checkpoint = tiny_runs.write_checkpoint(base / "checkpoint")
    questions = tiny_runs.write_questions(base / "questions.jsonl")
    found = {}

    def arguments(name, *changes):
        return tiny_runs.train_args(checkpoint, questions, base, name, "adam_eps=0.01", *changes)

    # On policy: whether the devices are shared or split changes nothing.
    for name, changes in {"shared": (), "split": (*SPLIT, "rl.reshard_chunk_size=3")}.items():
        run_training(*arguments(name, "num_batches=2", *changes))
        found[name] = {"metrics": metrics(base / name), "ids": [[r[0] for r in s] for s in rollouts_of(base / name, 2)]}

    # One step off: as the plain loop.
    run_training(*arguments("ahead", *AHEAD))
    found["ahead"] = {
        "metrics": metrics(base / "ahead"),
        "ids": [[r[0] for r in s] for s in rollouts_of(base / "ahead", 4)],
        "versions": [sorted({v for r in s for v in r[2]}) for s in rollouts_of(base / "ahead", 4)],
    }
    found["plain"] = plain_loop(load_config(RunConfig, arguments("plain", *AHEAD)))

    # Killed in step 4, after the checkpoint of step 2, and stopped by a signal in step 3: both go on as if nothing had
    # happened.
    with at_score(4, die), suppress(Cut):
        run_training(*arguments("killed", *AHEAD))
    run_training(*arguments("killed", *AHEAD, "resume=true"))
    assert_same_run(base / "killed", base / "ahead", steps=4)
    with at_score(3, lambda: os.kill(os.getpid(), signal.SIGTERM)):
        try:
            run_training(*arguments("stopped", *AHEAD, "checkpoint_period=100"))
        except BurnishError as error:
            found["stopped"] = {"code": error.exit_code, "said": str(error)}
    found["stopped"]["steps"] = [int(p.name) for p in (base / "stopped" / "checkpoints" / "actor").iterdir()]
    run_training(*arguments("stopped", *AHEAD, "resume=true"))
    assert_same_run(base / "stopped", base / "ahead", steps=4)
    found["resumed"] = True

    found["experts"] = run_experts(base, *ONE_EACH)
    moved = move_weights()
    found["transfer"] = {
        "arrays": moved.num_arrays,
        "bytes": moved.num_bytes,
        "said": re.sub(r"[\d.e-]+ ", "N ", str(moved)),
    }
    found["faults"] = transfer_faults()
    (base / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
