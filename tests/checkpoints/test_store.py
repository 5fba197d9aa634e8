"""What a training checkpoint promises: it comes back bit for bit, it names what does not fit, it is whole
or absent.
"""

import json
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from burnish.checkpoints import arrays, store
from burnish.checkpoints.store import StoreError, TrainingStore


class Moments(NamedTuple):
    count: Any
    mu: Any
    empty: optax.EmptyState


def make_params(seed: int = 0) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    return {
        "embed": jax.random.normal(next(keys), (64, 32)),
        "layers": {
            "q_proj": jax.random.normal(next(keys), (2, 32, 4, 8), jnp.bfloat16),
            "k_proj": jax.random.normal(next(keys), (2, 32, 4, 8), jnp.bfloat16),
        },
        "final_norm": jnp.ones((32,)),
    }


def make_optimizer_state(params: Any) -> Any:
    moments = Moments(jnp.int32(7), jax.tree.map(lambda p: (p * 0.5).astype(jnp.bfloat16), params), optax.EmptyState())
    return (
        moments,
        {"key_data": jax.random.key_data(jax.random.key(3)), "scale": 1.5, "calls": np.int32(4)},
        None,
    )


EXTRA = {
    "data": {"epoch": 1, "position": 12},
    "seed": 2**40 + 1,
    "losses": [0.1, 1e-30],
    "name": "äöü",
    "none": None,
}


def save(target: TrainingStore, step: int, seed: int | None = None, **kwargs: Any) -> Any:
    params = make_params(step if seed is None else seed)
    target.save(step, params, make_optimizer_state(params), EXTRA, **kwargs)
    return params


def assert_same_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.tobytes() == y.tobytes()


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(store.os, "fsync", lambda fd: None)


def files_of(path: Any) -> list[Any]:
    return sorted(p for p in path.rglob("*") if p.is_file())


def test_a_restored_state_has_the_same_bits_types_and_structure(tmp_path):
    target = TrainingStore(tmp_path / "actor", keep=2)
    params = make_params()
    # Bit patterns that a detour over other types would lose: NaN payloads, -0.0 and subnormals.
    odd = np.array([0x7FC00001, 0xFF800123, 0x80000000, 0x00000001], np.uint32).view(np.float32)
    params["odd"] = jnp.asarray(odd)
    state = make_optimizer_state(params)
    target.save(3, params, state, EXTRA)

    like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    got_params, got_state, extra = TrainingStore(tmp_path / "actor", keep=2).restore(3, like, state)
    assert_same_bits(got_params, params)
    assert_same_bits(got_state, state)
    assert extra == EXTRA
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(got_params))
    assert isinstance(got_state[0], Moments)
    assert isinstance(got_state[1]["scale"], float)
    assert isinstance(got_state[1]["calls"], np.int32)


def test_numpy_likes_are_answered_with_numpy(tmp_path):
    target = TrainingStore(tmp_path, keep=1)
    params = {"w": np.arange(6, dtype=np.float32).reshape(2, 3).T}  # not contiguous
    target.save(1, params, {}, {})
    got, state, _ = target.restore(1, params, {})
    assert isinstance(got["w"], np.ndarray)
    np.testing.assert_array_equal(got["w"], params["w"])
    assert state == {}


def test_a_restored_array_can_be_donated_and_keeps_its_sharding(tmp_path):
    target = TrainingStore(tmp_path, keep=1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    target.save(1, {"w": jnp.arange(4096.0)}, {}, {})
    like = {"w": jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=sharding)}
    restored, _, _ = target.restore(1, like, {})
    assert restored["w"].sharding == sharding
    out = jax.jit(lambda w: w + 1, donate_argnums=0)(restored["w"])
    np.testing.assert_array_equal(out, np.arange(4096.0) + 1)
    np.testing.assert_array_equal(store.load_model_params(tmp_path / "1")["w"], np.arange(4096.0))


def test_the_newest_keep_checkpoints_stay(tmp_path):
    target = TrainingStore(tmp_path, keep=2)
    assert target.latest() is None
    for step in (2, 4, 10):
        save(target, step)
    assert target.steps() == [4, 10]
    assert target.latest() == 10
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "4"]


def test_directory_layout_is_that_of_the_tutorials(tmp_path):
    save(TrainingStore(tmp_path / "checkpoints/actor", keep=1), 50)
    assert sorted(p.name for p in (tmp_path / "checkpoints/actor/50").iterdir()) == [
        "complete",
        "model_params",
        "optimizer_state",
        "train_state.json",
    ]


def test_steps_must_grow(tmp_path):
    target = TrainingStore(tmp_path, keep=2)
    save(target, 4)
    for step in (4, 3):
        with pytest.raises(StoreError, match=f"already holds the checkpoint of step 4; step {step} is not newer"):
            save(target, step)
    assert target.steps() == [4]


def test_keep_zero_is_refused(tmp_path):
    with pytest.raises(StoreError, match="max_num_checkpoints_to_keep=0"):
        TrainingStore(tmp_path, keep=0)


def test_model_params_load_from_the_step_and_from_model_params(tmp_path, monkeypatch):
    params = save(TrainingStore(tmp_path / "actor", keep=1), 5)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "actor/5", str(tmp_path / "actor/5/model_params") + "/", "actor/5/model_params"):
        got = store.load_model_params(path)
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(got))
        assert_same_bits(got, params)
    assert store.find_checkpoint("actor/5/model_params/") == store.find_checkpoint(tmp_path / "actor/5")
    assert store.find_checkpoint("elsewhere") is None
    with pytest.raises(StoreError, match="no complete training checkpoint"):
        store.load_model_params(tmp_path / "elsewhere")


def test_the_source_checkpoints_files_travel_along_without_its_weights(tmp_path):
    source = tmp_path / "hf"
    (source / "onnx").mkdir(parents=True)
    kept = {
        "config.json": "{}",
        "tokenizer.json": "t",
        "generation_config.json": "g",
        "chat_template.jinja": "j",
    }
    for name in [
        *kept,
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        ".gitattributes",
    ]:
        (source / name).write_text(kept.get(name, "weights"))
    (source / "linked.json").symlink_to(source / "config.json")
    save(TrainingStore(tmp_path / "actor", keep=1), 5, hf_source=source)
    copied = store.hf_source_files(tmp_path / "actor/5/model_params")
    assert {p.name: p.read_text() for p in copied.iterdir()} == {**kept, "linked.json": "{}"}
    save(TrainingStore(tmp_path / "actor", keep=1), 6)
    assert store.hf_source_files(tmp_path / "actor/6") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["layers"].pop("q_proj"), "the checkpoint has layers/q_proj, this run has not"),
        (lambda p: p.update(lm_head=jnp.ones(3)), "this run has lm_head, the checkpoint has not"),
        (
            lambda p: p.update(embed=jnp.ones((64, 16))),
            r"embed is float32\[64, 32\] there and float32\[64, 16\] in",
        ),
        (
            lambda p: p.update(final_norm=jnp.ones(32, jnp.bfloat16)),
            r"final_norm is float32\[32\] there and bfloat16\[32\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
    target = TrainingStore(tmp_path, keep=1)
    params = save(target, 1)
    state = make_optimizer_state(params)
    change(params)
    with pytest.raises(StoreError, match=message) as error:
        target.restore(1, params, state)
    assert "model_params" in str(error.value)
    assert "damaged" not in str(error.value)


def test_an_optimizer_that_does_not_fit_is_named(tmp_path):
    target = TrainingStore(tmp_path, keep=1)
    params = {"w": jnp.ones((4, 4))}
    target.save(1, params, optax.adam(1e-3).init(params), {})
    with pytest.raises(StoreError, match=r"optimizer_state do not fit this run: .*0/mu/w"):
        target.restore(1, params, optax.sgd(1e-3).init(params))


def test_a_missing_step_is_an_error_that_lists_those_there(tmp_path):
    target = TrainingStore(tmp_path, keep=3)
    for step in (1, 2):
        save(target, step)
    with pytest.raises(StoreError, match=r"no complete checkpoint of step 7; it has \[1, 2\]"):
        target.restore(7, {}, {})


@pytest.mark.parametrize("value", [(1, 2), {3: 4}, float("nan"), np.float32(1)])
def test_extra_state_that_json_would_change_is_refused_before_anything_is_written(tmp_path, value):
    with pytest.raises(StoreError, match="extra state"):
        TrainingStore(tmp_path / "actor", keep=1).save(1, make_params(), {}, {"x": value})
    assert not (tmp_path / "actor").exists()


def test_typed_keys_are_refused_with_the_leaf_named(tmp_path):
    with pytest.raises(ValueError, match="leaf a/key is a typed PRNG key"):
        TrainingStore(tmp_path, keep=1).save(1, make_params(), {"a": {"key": jax.random.key(0)}}, {})


def damage_cases() -> list[Any]:
    def truncate(path):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def flip(path):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(bytes(data))

    def empty(path):
        path.write_bytes(b"")

    return [pytest.param(f, id=f.__name__) for f in (truncate, flip, empty, lambda p: p.unlink())]


# TensorStore finishes reads that Orbax has given up on after the first error, and Python warns of it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("no_waiting_for_the_disk")
@pytest.mark.parametrize("damage", damage_cases())
@pytest.mark.parametrize("part", ["model_params", "optimizer_state", "train_state.json"])
def test_damage_of_the_stored_data_is_an_error_that_names_the_way_out(tmp_path, damage, part):
    target = TrainingStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        params = save(target, step)
    state = make_optimizer_state(params)
    for step in (2, 3):
        victim = max(
            files_of(tmp_path / str(step) / part) or [tmp_path / str(step) / part],
            key=lambda p: p.stat().st_size,
        )
        damage(victim)
    # The newest complete checkpoint is not skipped silently.
    assert target.latest() == 3
    with pytest.raises(StoreError, match=r"checkpoint \S+/3 is damaged: .*step 1 next to it is usable") as error:
        target.restore(3, params, state)
    assert f"load_parameters_path={tmp_path / '1'}" in str(error.value)
    assert len(str(error.value)) < 1000
    target.restore(1, params, state)
    if part == "model_params":
        with pytest.raises(StoreError, match="is damaged"):
            store.load_model_params(tmp_path / "3")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_any_changed_byte_of_the_arrays_is_noticed_or_harmless(tmp_path):
    target = TrainingStore(tmp_path, keep=1)
    params = save(target, 1)
    rng = np.random.default_rng(0)
    noticed = 0
    for path in files_of(tmp_path / "1/model_params"):
        whole = path.read_bytes()
        for offset in rng.integers(0, len(whole), 3):
            broken = bytearray(whole)
            broken[offset] ^= 1 << rng.integers(8)
            path.write_bytes(bytes(broken))
            try:
                assert_same_bits(store.load_model_params(tmp_path / "1"), params)
            except StoreError:
                noticed += 1
        path.write_bytes(whole)
    assert noticed > 0


def test_two_leaves_of_one_shape_that_were_swapped_are_noticed(tmp_path, monkeypatch):
    def swapped(path, leaves):
        names = {"layers/q_proj": "layers/k_proj", "layers/k_proj": "layers/q_proj"}
        arrays.write_arrays(path, {n: leaves[names.get(n, n)] for n in leaves})

    monkeypatch.setattr(store, "write_arrays", swapped)
    with pytest.raises(StoreError, match=r"was not saved .*layers/[qk]_proj reads back as"):
        save(TrainingStore(tmp_path, keep=1), 1)
    assert list(tmp_path.iterdir()) == []


def test_large_arrays_have_checksums_of_their_parts_and_come_back_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "PART_BYTES", 500)
    params = save(TrainingStore(tmp_path, keep=1), 1)
    records = store.model_params_records(tmp_path / "1")
    assert max(len(r.parts) for r in records.values()) > 1
    for record in records.values():  # a tiling of the array
        covered = np.zeros(record.shape, int)
        for region, _ in record.checksums:
            covered[arrays.index_of(region)] += 1
        assert (covered == 1).all()
    assert_same_bits(store.load_model_params(tmp_path / "1"), params)
    for name, leaf in arrays.named_leaves(params).items():
        assert arrays.record(leaf, records[name]) == records[name]


def test_a_save_leaves_no_host_copy_with_the_arrays():
    x = jnp.arange(8.0) + 1
    arrays.record(x)
    assert x._npy_value is None


def test_names_that_collide_are_refused():
    with pytest.raises(ValueError, match="two leaves are named a/b"):
        arrays.named_leaves({"a": {"b": 1}, "a/b": 2})


def test_a_small_save_is_quick(tmp_path):
    target = TrainingStore(tmp_path, keep=1)
    seconds = []
    for step in range(4):
        started = time.process_time()
        save(target, step, seed=0)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.5  # of processor time: the machine may be busy


def test_train_state_is_readable_json(tmp_path):
    save(TrainingStore(tmp_path, keep=1), 2)
    content = json.loads((tmp_path / "2/train_state.json").read_text())
    assert content["step"] == 2
    assert content["extra"] == EXTRA
    assert content["arrays"]["model_params"]["layers/q_proj"]["shape"] == [2, 32, 4, 8]
