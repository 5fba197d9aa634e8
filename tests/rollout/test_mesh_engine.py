"""The engine on meshes of 8 virtual devices against the engine on one: tokens, what is split, what is exchanged."""

from pathlib import Path

import numpy as np
import pytest
from mesh_engine import DENSE, MODELS, RUNS
from virtual_devices import FLAGS, found_by

ON_MESHES = [(model, name) for model, names in RUNS.items() for name in names if name != "one"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by(Path(__file__).with_name("mesh_engine.py"), tmp_path_factory.mktemp("mesh"), 8, FLAGS)


@pytest.mark.parametrize(("model", "name"), ON_MESHES)
def test_a_mesh_samples_the_tokens_of_one_device(found, model, name):
    """Weights came from a mesh of another shape, whose devices are in another order."""
    here, one = found[f"{model}/{name}"], found[f"{model}/one"]
    assert here["moved"] is None
    different = tokens = 0
    for way in ("greedy", "sampled"):
        for a, b in zip(here[way], one[way], strict=True):
            tokens += len(b["ids"])
            different += a["ids"] != b["ids"] or a["reason"] != b["reason"]
            if a["ids"] == b["ids"]:
                np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=2e-5)
            else:
                assert way == "sampled", "float ties decide only where a number is drawn"
    assert tokens > 300
    assert different <= tokens / 1000


@pytest.mark.parametrize(("model", "name"), ON_MESHES)
def test_no_device_has_more_than_its_part(found, model, name):
    """Of caches an eighth each, but that two kv heads are held by two devices each of four along tensor."""
    parts = found[f"{model}/{name}"]["parts"]
    assert parts["lanes"] == parts["own"] == 1 / 8
    assert parts["view"] < {"data8": 1.01, "data2tensor4": 0.4, "data2expert2tensor2": 0.5}[name]


@pytest.mark.parametrize(("model", "name"), ON_MESHES)
def test_a_decode_step_exchanges_activations_only(found, model, name):
    """No weight, cache or logits are gathered: whatever arrives is smaller than the smallest matrix. Logits go
    from parts of the vocabulary to parts of the rows."""
    kinds = found[f"{model}/{name}"]["collectives"]
    smallest = DENSE.d_model * DENSE.num_kv_heads * DENSE.head_dim
    assert all(size < smallest for _, size in kinds), kinds
    if name == "data8":
        assert not [k for k in kinds if k[0] in ("all-to-all", "collective-permute", "reduce-scatter")]
    else:
        assert [k for k, _ in kinds].count("all-to-all") == 1  # of logits
        sums = [k for k, _ in kinds if k == "all-reduce"]
        assert len(sums) >= 2 * MODELS[model].num_layers  # after attention and MLP


@pytest.mark.parametrize(("model", "name"), ON_MESHES)
def test_nothing_is_compiled_after_warm_up(found, model, name):
    assert found[f"{model}/{name}"]["compiled_later"] == 0


def test_sizes_that_do_not_divide_are_refused(found):
    assert "heads has size 4" in found["refusals"]["heads"]
    assert "experts has size 4" in found["refusals"]["experts"]
