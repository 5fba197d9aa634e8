"""The core works where torch, vLLM, Kubernetes and cloud libraries are not installed."""

import pkgutil
import subprocess
import sys

import burnish

OPTIONAL = ("torch", "vllm", "kubernetes", "google.cloud", "gcsfs", "wandb", "tensorflow", "flax")

SCRIPT = f"""
import importlib, importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(absent + ".") for absent in {OPTIONAL!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert not [name for name in sys.modules if name.split(".")[0] in {OPTIONAL!r}]
"""


def test_every_module_imports_without_optional_packages():
    modules = [module.name for module in pkgutil.walk_packages(burnish.__path__, "burnish.")]
    modules = [name for name in modules if not name.startswith("burnish.rollout.vllm.worker.")]  # vLLM's environment's
    assert len(modules) > 50
    done = subprocess.run([sys.executable, "-c", SCRIPT, *modules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
