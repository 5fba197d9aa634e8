"""Collectives read from real compiled programs whose collectives are known, and from the ways HLO is written."""

import json
import subprocess
import sys
import textwrap

import pytest

from burnish.plan import hlo

PROGRAM = textwrap.dedent(
    """
    import json, sys
    import jax, jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import numpy as np

    jax.config.update("jax_num_cpu_devices", 8)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    put = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def body(x):
        x = jax.lax.psum(x, "tensor")
        return jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)])

    def looped(x):
        def turn(_, x):
            return body(x) * 0.5
        x = jax.lax.fori_loop(0, 5, turn, x)
        return jax.lax.all_gather(x, "fsdp", tiled=True)

    def until(x):
        return jax.lax.while_loop(lambda x: x.sum() < 10, lambda x: jax.lax.psum(x, ("fsdp", "tensor")), x)

    spec = P("fsdp", "tensor")
    wrap = lambda f, out: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))
    texts = [wrap(looped, P(None, "tensor")).lower(put((64, 32), "fsdp", "tensor")).compile().as_text(),
             wrap(until, spec).lower(put((64, 32), "fsdp", "tensor")).compile().as_text()]
    json.dump(texts, sys.stdout)
    """
)
MESH = {"data": 1, "fsdp": 4, "tensor": 2}


@pytest.fixture(scope="module")
def compiled():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_collectives_of_a_loop_count_as_often_as_it_turns(compiled):
    found = {c.kind: c for c in hlo.collectives(compiled[0], MESH)}
    local = 16 * 16 * 4  # bytes of one device's part
    reduce, permute, gather = found["all-reduce"], found["collective-permute"], found["all-gather"]
    assert (reduce.axes, reduce.trips, reduce.size, reduce.sent) == (("tensor",), 5, local, local)
    assert (permute.axes, permute.trips, permute.sent) == (("fsdp",), 5, local)
    assert (gather.axes, gather.trips, gather.size, gather.sent) == (("fsdp",), 1, 4 * local, 3 * local)


def test_a_loop_whose_count_is_data_turns_as_often_as_is_said(compiled):
    once = sum(c.trips for c in hlo.collectives(compiled[1], MESH))
    often = sum(c.trips for c in hlo.collectives(compiled[1], MESH, lambda depth: 7 if depth == 0 else 1))
    assert once == 1
    assert often == 7
    assert hlo.collectives(compiled[1], MESH)[0].axes == ("fsdp", "tensor")


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups={}", ((0, 1, 2, 3),)),
        ("no groups", ()),
    ],
)
def test_groups_in_every_way_they_are_written(written, groups):
    assert hlo.replica_groups(f"  %x = f32[] all-reduce(%y), {written}, to_apply=%add", 4) == groups


def test_axes_of_groups():
    mesh = (("data", 2), ("fsdp", 1), ("tensor", 2))
    assert hlo.axes_of(((0, 1), (2, 3)), mesh) == ("tensor",)
    assert hlo.axes_of(((0, 2), (1, 3)), mesh) == ("data",)
    assert hlo.axes_of(((0, 1, 2, 3),), mesh) == ("data", "tensor")
    assert hlo.axes_of(((0, 3), (1, 2)), mesh) == ()


# As the TPU compiler writes them: a reduce-scatter is an all-reduce in a fusion of that name, a counted loop has its
# count in its condition and its step in its body, and a kernel's text has lines of its own.
TPU_TEXT = """HloModule jit_f, is_scheduled=true

%all-reduce-scatter.1 (input: f32[256,64]) -> f32[64,64] {
  %input = f32[256,64]{1,0:T(8,128)} parameter(0)
  ROOT %all-reduce.1 = f32[256,64]{1,0:T(8,128)} all-reduce(%input), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
}

%cond (p: (s32[], f32[256,64])) -> pred[] {
  %constant.9 = s32[]{:T(128)} constant(64)
  %p = (s32[]{:T(128)}, f32[256,64]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %constant.9), direction=LT
}

%body (p: (s32[], f32[256,64])) -> (s32[], f32[256,64]) {
  %p = (s32[]{:T(128)}, f32[256,64]{1,0:T(8,128)}) parameter(0)
  %x = f32[256,64]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %kernel = f32[64,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config="module {
}
"
  %fusion.1 = f32[64,64]{1,0:T(8,128)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %ag = (f32[64,64]{1,0}, f32[256,64]{1,0}) all-gather-start(%fusion.1), replica_groups=[2,4]<=[4,2]T(1,0)
  %agd = f32[256,64]{1,0} all-gather-done(%ag)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i, %two)
  ROOT %t = (s32[]{:T(128)}, f32[256,64]{1,0:T(8,128)}) tuple(%next, %agd)
}

ENTRY %main (a: f32[256,64]) -> f32[256,64] {
  %a = f32[256,64]{1,0:T(8,128)} parameter(0)
  %w = (s32[]{:T(128)}, f32[256,64]{1,0:T(8,128)}) while(%a), condition=%cond, body=%body
  ROOT %r = f32[256,64]{1,0:T(8,128)} get-tuple-element(%w), index=1
}
"""


def test_what_the_tpu_compiler_writes():
    found = {c.kind: c for c in hlo.collectives(TPU_TEXT, MESH)}
    assert set(found) == {"reduce-scatter", "all-gather"}
    whole = 256 * 64 * 4
    for c in found.values():
        assert (c.axes, c.group, c.trips, c.size, c.sent) == (("fsdp",), 4, 32, whole, whole * 3 / 4)


# As the GPU compiler writes them: pairs that start and end, several arrays together, operands before results, groups by
# axes of a mesh, and the count of a loop noted beside it.
GPU_TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %y = f32[] parameter(1)
  %x = f32[] parameter(0)
  ROOT %add.1 = f32[] add(%x, %y)
}

%cond (p.1: (s32[], f32[64,64], f32[64,64])) -> pred[] {
  %p.1 = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] constant(6)
  ROOT %lt = pred[] fusion(%i.1, %limit), kind=kLoop, calls=%wrapped_compare
}

%body (p: (s32[], f32[64,64], f32[64,64])) -> (s32[], f32[64,64], f32[64,64]) {
  %p = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
  %x = f32[64,64]{1,0} get-tuple-element(%p), index=1
  %y = f32[64,64]{1,0} get-tuple-element(%p), index=2
  %gs = ((f32[64,64]{1,0}, f32[64,64]{1,0}), (f32[256,64]{1,0}, /*index=1*/f32[256,64]{1,0})) all-gather-start(%x, %y), channel_id=1, replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={0}, use_global_device_ids=true, backend_config={"collective_backend_config":{"is_sync":false}}
  %gd = (f32[256,64]{1,0}, f32[256,64]{1,0}) all-gather-done(%gs)
  %a = f32[256,64]{1,0} get-tuple-element(%gd), index=0
  %b = f32[256,64]{1,0} get-tuple-element(%gd), index=1
  %ss = ((f32[256,64]{1,0}, f32[256,64]{1,0}), (f32[64,64]{1,0}, f32[64,64]{1,0})) reduce-scatter-start(%a, %b), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, to_apply=%add
  %sd = (f32[64,64]{1,0}, f32[64,64]{1,0}) reduce-scatter-done(%ss)
  %c = f32[64,64]{1,0} get-tuple-element(%sd), index=0
  %rs = f32[64,64]{1,0} all-reduce-start(%c), channel_id=3, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %rd = f32[64,64]{1,0} all-reduce-done(%rs)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %t = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) tuple(%i, %rd, %y)
}

ENTRY %main (q: (s32[], f32[64,64], f32[64,64])) -> f32[64,64] {
  %q = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) parameter(0)
  %w = (s32[], f32[64,64]{1,0}, f32[64,64]{1,0}) while(%q), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}
  %z = f32[64,64]{1,0} get-tuple-element(%w), index=1
  %ts = ((f32[64,64]{1,0}), f32[64,64]{1,0}) all-to-all-start(%z), channel_id=4, replica_groups=[4,2]<=[8], dimensions={0}
  %td = f32[64,64]{1,0} all-to-all-done(%ts)
  %ps = (f32[64,64]{1,0}, f32[64,64]{1,0}) collective-permute-start(%td), channel_id=5, source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}
  ROOT %pd = f32[64,64]{1,0} collective-permute-done(%ps)
}
"""  # noqa: E501


def test_what_the_gpu_compiler_writes():
    found = hlo.collectives(GPU_TEXT, MESH)
    one = 64 * 64 * 4
    assert [(c.kind, c.axes, c.group, c.trips, c.size) for c in found] == [
        ("all-gather", ("fsdp",), 4, 6, 2 * 4 * one),
        ("reduce-scatter", ("fsdp",), 4, 6, 2 * 4 * one),
        ("all-reduce", ("tensor",), 2, 6, one),
        ("all-to-all", ("tensor",), 2, 1, one),
        ("collective-permute", ("fsdp",), 2, 1, one),
    ]


def test_bytes_of_shapes():
    assert hlo.shape_bytes("(f32[2,3]{1,0:T(8,128)}, /*index=1*/bf16[4]{0}, s32[], pred[5])") == [24, 8, 4, 5]
    assert hlo.shape_bytes("f8e4m3fn[10]") == [10]
    assert hlo.shape_bytes("s4[10]") == [5]
