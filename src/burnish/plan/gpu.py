"""GPUs that are not there, for the compiler: JAX's CUDA plugin compiles for a GPU that is described to it.

The description has the hardware's figures as XLA's own description of the H100 SXM gives them (openxla/xla,
backends/gpu/target_config/specs), with memory and its bandwidth from `chips`. Without a GPU
nothing is tuned by trial: the compiler takes its own guess for every matrix product.
"""

import importlib.util

import jax

from burnish.plan.chips import CHIPS, Topology
from burnish.plan.errors import PlanError

_H100 = """
device_description_str: "NVIDIA H100 80GB HBM3"
platform_name: "CUDA"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 12 }}
gpu_device_info {{
  name: "NVIDIA H100 80GB HBM3"
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  device_memory_size: {memory}
  memory_bandwidth: {memory_bandwidth}
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_interconnect_info {{ active_links: 18 }}
}}
"""

_DESCRIPTIONS = {"h100": _H100}


def devices_of(topology: Topology) -> list[jax.Device]:
    """The GPUs of one node. Raises PlanError where their compiler is not installed or refuses them."""
    if not any(map(_installed, ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"))):
        raise PlanError(
            "planning for GPUs needs JAX's CUDA plugin, which is not installed (and needs no GPU): "
            "pip install 'burnish[cuda]' or, for plans alone, 'jax[cuda13-local]', both for Linux only"
        )
    from jax.experimental.topologies import get_topology_desc

    chip = CHIPS[topology.chip.name]  # with all of its memory
    assert chip.memory_bandwidth is not None
    description = _DESCRIPTIONS[chip.name].format(memory=chip.memory, memory_bandwidth=int(chip.memory_bandwidth))
    try:
        found = get_topology_desc(
            topology_name=chip.name,
            platform="cuda",
            topology=f"1x1x{topology.num_devices}",  # domains of NVLink × nodes × GPUs of a node
            target_config=description,
        )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise PlanError(f"topology={topology.name}: JAX's CUDA plugin refuses it: {reason}") from error
    return list(found.devices)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
