"""Weights that are laid out anew on their devices: what arrives, and that no device receives more than it keeps."""

from pathlib import Path

import pytest
from virtual_devices import FLAGS, found_by

PROGRAM = Path(__file__).with_name("handover_on_eight_devices.py")

pytestmark = pytest.mark.slow


def test_a_layer_goes_from_mesh_to_mesh_in_parts_no_larger_than_those_wanted(tmp_path):
    found = found_by(PROGRAM, tmp_path, 8, FLAGS)
    del found["log"]
    for move, arrays in found.items():
        for name, array in arrays.items():
            assert array["equal"], (move, name)
            assert array["split as wanted"], (move, name)
            # Few heads do not divide, so the compiler finds its own way; a stack is 16 layers.
            most = array["layer"] if name == "few heads" else array["part"]
            assert array["largest"] <= most, (move, name, array)
    assert found["copies and fsdp to copies of tensor"]["matrix"]["largest"] > 0
