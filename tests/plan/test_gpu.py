"""GPUs that are not there: what is refused, and plans and collectives by their own compiler where it is installed."""

import importlib.util
import json
import subprocess
import sys
import textwrap

import pytest

from burnish.plan import gpu, hlo
from burnish.plan.chips import parse_topology
from burnish.plan.errors import PlanError

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None,
    reason="JAX's CUDA plugin, the compiler for GPUs (extra cuda), is not installed",
)


def test_without_the_compiler_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_plugins", None)
    with pytest.raises(PlanError, match=r"pip install 'burnish\[cuda\]'"):
        gpu.devices_of(parse_topology("h100-8"))


# Every kind of collective, with two arrays where the compiler puts them together; the sizes are 2048 × 512 float32.
PROGRAM = textwrap.dedent(
    """
    import json, os, sys
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from burnish.plan import gpu
    from burnish.plan.chips import parse_topology

    devices = gpu.devices_of(parse_topology("h100-8"))
    mesh = Mesh(np.array(devices).reshape(4, 2), ("fsdp", "tensor"))

    def f(x, y):
        a, b = (jax.lax.all_gather(z, "fsdp", tiled=True) for z in (x, y))
        a, b = (jax.lax.psum_scatter(jnp.sin(z), "fsdp", tiled=True) for z in (a, b))
        def turn(_, z):
            return jnp.cos(jax.lax.psum(z, "tensor"))
        a = jax.lax.fori_loop(0, 5, turn, a)
        b = jax.lax.ppermute(b, "fsdp", [(i, (i + 1) % 4) for i in range(4)])
        return a, jax.lax.all_to_all(b, "tensor", 0, 0, tiled=True)

    spec = P("fsdp", None)
    g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False))
    x = jax.ShapeDtypeStruct((2048, 512), jnp.float32, sharding=NamedSharding(mesh, spec))
    json.dump([g.lower(x, x).compile().as_text(), [jax.default_backend(), devices[0].platform]], sys.stdout)
    """
)


@pytest.mark.slow
@needs_compiler
def test_collectives_that_the_gpu_compiler_writes():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    text, platforms = json.loads(run.stdout)
    assert platforms == ["cpu", "gpu"]  # this machine goes on computing with what it has
    found = hlo.collectives(text, {"data": 1, "fsdp": 4, "tensor": 2})
    sent, times = {}, {}
    for c in found:
        sent[c.kind, c.axes] = sent.get((c.kind, c.axes), 0) + c.sent * c.trips
        times[c.kind, c.axes] = times.get((c.kind, c.axes), 0) + c.trips
    whole = 2048 * 512 * 4
    part = whole / 4
    assert sent == {
        ("all-gather", ("fsdp",)): 2 * whole * 3 / 4,
        ("reduce-scatter", ("fsdp",)): 2 * whole * 3 / 4,
        ("all-reduce", ("tensor",)): 5 * part,
        ("collective-permute", ("fsdp",)): part,
        ("all-to-all", ("tensor",)): part / 2,
    }
    assert times["all-reduce", ("tensor",)] == 5


@pytest.mark.slow
@needs_compiler
def test_a_node_of_gpus_is_planned_without_one(tmp_path):
    file = tmp_path / "plan.json"
    options = ["topology=h100-8", "batch_size=8", "rl.num_generations=4", "max_prefill_predict_length=64"]
    options += ["max_target_length=96", "remat_policy=none", "ici_data_parallelism=2", f"json_file={file}"]
    command = [sys.executable, "-m", "burnish.cli.main", "plan", *options]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    plan = json.loads(file.read_text())
    assert (plan["topology"]["name"], plan["topology"]["chips"], plan["fits"]) == ("h100-8", 8, True)
    assert plan["exact"] is True
    assert all(p["memory"] for p in plan["programs"])
    gradients = next(p for p in plan["programs"] if p["name"] == "gradients")
    axes = {(c["kind"], tuple(c["axes"])) for c in gradients["collectives"]}
    assert {("all-gather", ("fsdp",)), ("reduce-scatter", ("fsdp",)), ("all-reduce", ("data",))} <= axes
    assert plan["estimate"]["step"] > plan["estimate"]["step_at_best"] > 0
    assert "of a GPU's memory" in run.stdout
