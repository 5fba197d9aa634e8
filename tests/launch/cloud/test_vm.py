"""TPU machines made through the real clients: created, already there, refused, failed and tried again, deleted."""

import pytest

pytest.importorskip("grpc")
from cloud_setup import vm_spec

from burnish.launch.cloud import vm
from burnish.launch.cloud.spec import Capacity
from burnish.launch.errors import LaunchError

POLL = 0.005


def create(cloud, spec):
    return vm.create(spec, cloud.vms, cloud.said.append, POLL)


def test_the_machine_of_workflow_a_is_made(cloud):
    made = create(cloud, vm_spec())
    assert (made.status, made.address, made.capacity) == ("RUNNING", "203.0.113.50", Capacity.RESERVATION)
    sent = cloud.rest.instances["vm"]
    assert sent["machineType"] == "zones/us-east5-b/machineTypes/ct6e-standard-8t"
    [disk] = sent["disks"]
    assert disk["boot"]
    assert disk["autoDelete"]
    assert disk["initializeParams"] == {
        "sourceImage": "projects/ubuntu-os-accelerator-images/global/images/family/"
        "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
        "diskSizeGb": "200",
        "diskType": "zones/us-east5-b/diskTypes/hyperdisk-balanced",
    }
    assert sent["scheduling"] == {
        "onHostMaintenance": "TERMINATE",
        "provisioningModel": "RESERVATION_BOUND",
        "instanceTerminationAction": "DELETE",
    }
    assert sent["reservationAffinity"] == {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": ["my-reservation"],
    }


@pytest.mark.parametrize(
    ("capacity", "scheduling"),
    [
        (Capacity.ON_DEMAND, {"provisioningModel": "STANDARD"}),
        (
            Capacity.SPOT,
            {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE", "automaticRestart": False},
        ),
        (
            Capacity.FLEX_START,
            {
                "provisioningModel": "FLEX_START",
                "instanceTerminationAction": "DELETE",
                "automaticRestart": False,
                "maxRunDuration": {"seconds": "604800"},
            },
        ),
    ],
)
def test_each_kind_of_capacity_says_what_compute_engine_wants(cloud, capacity, scheduling):
    create(cloud, vm_spec(capacity=capacity, reservation=None))
    assert cloud.rest.instances["vm"]["scheduling"] == {"onHostMaintenance": "TERMINATE"} | scheduling
    assert "values" not in cloud.rest.instances["vm"].get("reservationAffinity", {})


def test_a_machine_that_is_there_is_kept_and_another_one_is_refused(cloud):
    create(cloud, vm_spec())
    create(cloud, vm_spec())
    assert len([call for call in cloud.rest.calls if call.startswith("POST")]) == 1
    with pytest.raises(LaunchError, match="is there and is a ct6e-standard-8t, asked for is a ct6e-standard-1t"):
        create(cloud, vm_spec(machine_type="ct6e-standard-1t"))
    with pytest.raises(LaunchError, match="is there and is reservation, asked for is spot"):
        create(cloud, vm_spec(capacity=Capacity.SPOT, reservation=None))
    cloud.rest.instances["vm"]["status"] = "TERMINATED"
    with pytest.raises(LaunchError, match=r"is there and is TERMINATED; delete it"):
        create(cloud, vm_spec())


def test_a_quota_error_is_explained(cloud):
    cloud.rest.refuse("POST .*instances", 403, "Quota 'TPUS_PER_TPU_FAMILY' exceeded. Limit: 0.0 in region us-east5.")
    with pytest.raises(LaunchError, match=r"TPUS_PER_TPU_FAMILY.*iam-admin/quotas\?project=my-project"):
        create(cloud, vm_spec())
    assert create(cloud, vm_spec()).status == "RUNNING"


def test_a_start_that_fails_halfway_is_explained_and_can_be_tried_again(cloud):
    cloud.rest.fail("vm", "ZONE_RESOURCE_POOL_EXHAUSTED", "The zone does not have enough resources available")
    with pytest.raises(LaunchError, match=r"machine vm failed: .*ZONE_RESOURCE_POOL_EXHAUSTED.*another zone"):
        create(cloud, vm_spec())
    assert create(cloud, vm_spec()).status == "RUNNING"


def test_an_interrupted_start_is_waited_for_again(cloud):
    def interrupted(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vm.create(vm_spec(), cloud.vms, interrupted, POLL)
    assert cloud.rest.instances["vm"]["status"] == "PROVISIONING"
    assert create(cloud, vm_spec()).status == "RUNNING"
    assert any("begun before" in line for line in cloud.said)
    assert len([call for call in cloud.rest.calls if call.startswith("POST")]) == 1


def test_missing_rights_are_explained(cloud):
    cloud.rest.refuse("GET .*instances", 403, "Required 'compute.instances.get' permission")
    with pytest.raises(LaunchError, match=r"compute.instances.get.*roles/compute.instanceAdmin.v1"):
        create(cloud, vm_spec())


def test_deletion_takes_the_machine_and_is_no_error_where_it_is_gone(cloud):
    create(cloud, vm_spec())
    for _ in range(2):
        vm.delete(cloud.vms, "my-project", "us-east5-b", "vm", cloud.said.append, POLL)
    assert not cloud.rest.instances
    assert cloud.said[-1] == "machine vm: gone already"
    with pytest.raises(LaunchError, match="there is no machine vm in us-east5-b"):
        vm.required(cloud.vms, "my-project", "us-east5-b", "vm")


def test_plain_ssh_where_a_key_was_given_and_gcloud_where_not(cloud):
    made = create(cloud, vm_spec(ssh_user="me", ssh_public_key="ssh-ed25519 AAAAC3Nz me@home"))
    assert cloud.rest.instances["vm"]["metadata"] == {
        "items": [{"key": "ssh-keys", "value": "me:ssh-ed25519 AAAAC3Nz me@home"}]
    }
    assert vm.ssh_command(made, "my-project", "us-east5-b") == "ssh me@203.0.113.50"
    made = create(cloud, vm_spec(name="vm2"))
    assert vm.ssh_command(made, "my-project", "us-east5-b") == (
        "gcloud compute ssh vm2 --project=my-project --zone=us-east5-b"
    )


def test_the_environment_is_that_of_the_tutorial():
    assert vm.tpu_environment("ct6e-standard-8t") == {
        "TPU_ACCELERATOR_TYPE": "v6e-8",
        "TPU_WORKER_ID": "0",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_TOPOLOGY": "2x4",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
        "TPU_HOST_BOUNDS": "1,1,1",
    }


@pytest.mark.parametrize(
    ("machine_type", "accelerator", "topology", "bounds"),
    [
        ("ct6e-standard-1t", "v6e-1", "1x1", "1,1,1"),
        ("ct6e-standard-4t", "v6e-4", "2x2", "2,2,1"),
        ("ct5lp-hightpu-8t", "v5litepod-8", "2x4", "2,4,1"),
        ("ct5p-hightpu-4t", "v5p-8", "2x2x1", "2,2,1"),
    ],
)
def test_the_environment_follows_from_the_machine_type(machine_type, accelerator, topology, bounds):
    environment = vm.tpu_environment(machine_type)
    assert environment["TPU_ACCELERATOR_TYPE"] == accelerator
    assert environment["TPU_TOPOLOGY"] == topology
    assert environment["TPU_CHIPS_PER_HOST_BOUNDS"] == bounds
