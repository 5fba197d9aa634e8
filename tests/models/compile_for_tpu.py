"""Compiles the TPU kernels for one v6e chip with libtpu and no TPU: run by test_tpu_kernels.py in its own process."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ |= {"TPU_ACCELERATOR_TYPE": "v6e-4", "TPU_WORKER_HOSTNAMES": "localhost"}

import jax
import jax.numpy as jnp
from jax.experimental.topologies import get_topology_desc

from burnish.models import tpu
from burnish.models.scoring import Scoring
from burnish.parallel.mesh import single_device_mesh
from burnish.parallel.rules import replicated

chip = get_topology_desc(platform="tpu", topology_name="v6e:2x2", chips_per_host_bounds=(2, 2, 1)).devices[0]
where = replicated(single_device_mesh(chip))


def of(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)


def compiled(name: str, function: object, *args: jax.ShapeDtypeStruct) -> None:
    program = jax.jit(function).lower(*args).compile()
    temporaries = program.memory_analysis().temp_size_in_bytes / 2**20
    print(f"{name}, {temporaries:.0f} MiB: {program.as_text().count('tpu_custom_call')} kernels")


def attention_gradient(segments, branches, q, k, v):
    attend = tpu.splash_attention(tpu.splash_plan(segments, branches, 200), Scoring(0.1, 30.0), 200)
    return jax.grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v)


def experts_gradient(rows, weights, sizes):
    return jax.grad(lambda r, w: tpu.grouped_dot(r, w, sizes).astype(jnp.float32).sum(), argnums=(0, 1))(rows, weights)


for head_dim in (64, 128, 256):
    q, k = of(2, 1024, 8, head_dim), of(2, 1024, 2, head_dim)
    ids = of(2, 1024, dtype=jnp.int32)
    compiled(f"splash attention, heads of {head_dim}", attention_gradient, ids, ids, q, k, k)
# A long row: its keys and queries are 1 MiB, T² bytes would be 64.
ids, q = of(1, 8192, dtype=jnp.int32), of(1, 8192, 1, 64)
compiled("splash attention, a long row", attention_gradient, ids, ids, q, q, q)
for queries, head_dim, columns in ((4, 128, 1024), (32, 64, 256), (8, 256, 128)):
    compiled(
        f"cache attention, {queries} queries, heads of {head_dim}",
        lambda q, k, v, visible: tpu.cache_attention(q, k, v, visible, Scoring(0.1, None)),
        of(3, 2, queries, head_dim),
        of(3, 2, head_dim, columns),
        of(3, 2, columns, head_dim),
        of(3, queries, columns, dtype=jnp.bool_),
    )
for num_rows in (600, 8192):
    compiled(
        f"grouped product, {num_rows} rows",
        experts_gradient,
        of(num_rows, 2816),
        of(16, 2816, 704),
        of(16, dtype=jnp.int32),
    )
