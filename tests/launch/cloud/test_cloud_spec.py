"""What is wrong with a cluster or a machine is said, by flag, before anything is sent."""

import pytest
from cloud_setup import cluster_spec, vm_spec

from burnish.config.jobs import JobPathwaysOptions
from burnish.launch.cloud import parts
from burnish.launch.cloud.spec import Capacity, cpu_machine
from burnish.launch.errors import LaunchError


@pytest.mark.parametrize("name", ["a", "rl", "a-b-2", "a" * 20])
def test_names_of_clusters(name):
    assert cluster_spec(name=name).node_account == f"{name}-nodes@my-project.iam.gserviceaccount.com"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "a" * 21}, "--name=aaaaaaaaaaaaaaaaaaaaa has 21 characters; a cluster's name has at most 20"),
        ({"name": "Rl"}, "--name=Rl: expected a lower-case letter"),
        ({"name": "1l"}, "--name=1l"),
        ({"name": "r_l"}, "--name=r_l"),
        ({"name": "rl-"}, "--name=rl-"),
        ({"name": ""}, "--name="),
        ({"project": "My project"}, "--project=My project: expected a project id"),
        ({"project": "123456789"}, "--project=123456789"),
        ({"location": "us"}, "--location=us: expected a zone such as us-east5-b or a region"),
        ({"zone": "us-east5"}, "--zone=us-east5: expected a zone"),
        ({"zone": "us-west1-a"}, "--zone=us-west1-a is not in --location=us-east5-b"),
        ({"zone": "us-east5-a"}, "--zone=us-east5-a is not in --location=us-east5-b"),
        ({"system_zones": ("us-west1-a",)}, "--system-zones=us-west1-a is not in the region"),
        ({"topology": "4x7"}, "--topology=4x7"),
        ({"compute_type": "e2-standard-8", "topology": None}, "--compute-type=e2-standard-8 has no TPUs"),
        ({"compute_type": "tpu7x-standard-4t", "topology": "2x2x2"}, "node pools of v7x"),
        ({"num_slices": 0}, "--num-slices=0"),
        ({"reservation": None}, "--reservation is required"),
        ({"capacity": Capacity.SPOT}, "--reservation=my-reservation and --spot are both given"),
        ({"reservation": "My Reservation"}, "--reservation=My Reservation"),
        ({"max_run_seconds": 3600}, "--max-run-duration goes with --flex-start only"),
        ({"capacity": Capacity.FLEX_START, "reservation": None, "max_run_seconds": 60}, "--max-run-duration=60s"),
        ({"authorized_cidr": ("203.0.113.7/33",)}, "--authorized-cidr=203.0.113.7/33"),
        ({"authorized_cidr": ("203.0.113.7/24",)}, "has host bits set"),
        ({"authorized_cidr": ("10.0.0.0/8",) * 101}, "GKE takes at most 100"),
        ({"system_machine_type": "big"}, "--system-machine-type=big: expected a CPU machine type"),
        ({"head_machine_type": "ct6e-standard-4t"}, "--head-machine-type=ct6e-standard-4t"),
        ({"head_machine_type": f"n2-standard-{'9' * 5000}"}, "expected a CPU machine type"),
        ({"head_max_nodes": 0}, "--head-max-nodes=0"),
        ({"bucket": "My_Bucket"}, "--bucket=My_Bucket: expected the name of a bucket"),
        ({"bucket": "ab"}, "--bucket=ab"),
        ({"service_account": "me"}, "--service-account=me: expected the e-mail address"),
        ({"release_channel": "fast"}, "--release-channel=fast"),
        ({"queue": "My queue"}, "--queue=My queue"),
        ({"namespace": "a_b"}, "--namespace=a_b"),
    ],
)
def test_a_wrong_cluster_is_refused_by_flag(changed, words):
    with pytest.raises(LaunchError) as caught:
        cluster_spec(**changed)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "a" * 64}, "--name="),
        ({"zone": "us-east5"}, "--zone=us-east5"),
        ({"machine_type": "ct6e-standard-16t"}, "--machine-type=ct6e-standard-16t: not a type"),
        ({"machine_type": "n2-standard-8"}, "--machine-type=n2-standard-8"),
        ({"boot_disk_gb": 1}, "--boot-disk-gb=1"),
        ({"reservation": None}, "--reservation is required"),
        ({"ssh_user": "me"}, "--ssh-user and --ssh-public-key-file go together"),
        ({"ssh_user": "Me!", "ssh_public_key": "ssh-rsa AAAA"}, "--ssh-user=Me!"),
        ({"ssh_user": "me", "ssh_public_key": "-----BEGIN OPENSSH PRIVATE KEY-----"}, "not a public key"),
    ],
)
def test_a_wrong_machine_is_refused_by_flag(changed, words):
    with pytest.raises(LaunchError) as caught:
        vm_spec(**changed)
    assert words in str(caught.value)
    assert "PRIVATE" not in str(caught.value)


def test_a_region_may_hold_slices_and_controllers_in_different_zones():
    spec = cluster_spec(location="us-east5", zone="us-east5-b", system_zones=("us-east5-a", "us-east5-c"))
    assert parts.system_pool(spec)["locations"] == ["us-east5-a", "us-east5-c"]
    assert parts.slice_pool(spec, "slice-0")["locations"] == ["us-east5-b"]


def test_the_queue_covers_all_slices_and_the_head():
    spec = cluster_spec(num_slices=3, head_machine_type="n2-highmem-32", head_max_nodes=2)
    [queue] = [item for item in parts.queue_manifests(spec) if item["kind"] == "ClusterQueue"]
    [group] = queue["spec"]["resourceGroups"]
    quotas = {
        flavor["name"]: {resource["name"]: resource["nominalQuota"] for resource in flavor["resources"]}
        for flavor in group["flavors"]
    }
    assert quotas == {
        "cpu-np": {"cpu": "64", "memory": "512Gi", "google.com/tpu": "0"},
        # 3 slices × 8 hosts of 180 vCPUs, 720 GiB and 4 chips
        "tpu-v6e-slice-4x8": {"cpu": "4320", "memory": "17280Gi", "google.com/tpu": "96"},
    }


def test_a_pathways_head_fits_the_node_and_the_queue_that_are_made_for_it():
    cpus, memory = cpu_machine(cluster_spec().head_machine_type, "--head-machine-type")
    asked = {name: field.default for name, field in JobPathwaysOptions.model_fields.items()}
    assert int(asked["pathways_proxy_cpu"]) + int(asked["pathways_server_cpu"]) < cpus
    gib = [int(asked[f"pathways_{part}_memory"].removesuffix("Gi")) for part in ("proxy", "server")]
    assert sum(gib) < memory


@pytest.mark.parametrize("namespace", ["default", "team"])
def test_the_queues_objects_are_valid_for_kueues_own_definitions(namespace):
    schemas = pytest.importorskip("schemas")
    import json

    import jsonschema

    folder = schemas.CRDS / "kueue-v0.19.2"
    if not folder.is_dir():
        pytest.skip(f"the Kueue CRDs are not in {schemas.CRDS}; BURNISH_FIXTURES names the folder that has crds/")
    checked = []
    for item in parts.queue_manifests(cluster_spec(namespace=namespace)):
        group, _, version = item["apiVersion"].rpartition("/")
        if not group:
            continue
        definition = json.loads((folder / f"kueue.x-k8s.io_{item['kind'].lower()}s.json").read_text())
        [schema] = [v["schema"]["openAPIV3Schema"] for v in definition["spec"]["versions"] if v["name"] == version]
        errors = [*jsonschema.Draft7Validator(schemas._draft7(schema)).iter_errors(item)]
        assert not errors
        checked.append(item["kind"])
    assert checked == ["ResourceFlavor", "ResourceFlavor", "ClusterQueue", "LocalQueue"]


def test_no_pod_without_toleration_is_sent_to_a_tpu_host():
    flavors = {
        item["metadata"]["name"]: item["spec"]
        for item in parts.queue_manifests(cluster_spec())
        if item["kind"] == "ResourceFlavor"
    }
    [taint] = parts.slice_pool(cluster_spec(), "slice-0")["config"]["taints"]
    [known] = flavors["tpu-v6e-slice-4x8"]["nodeTaints"]
    assert (known["key"], known["value"]) == (taint["key"], taint["value"])
    assert flavors["cpu-np"] == {"nodeLabels": {"cloud.google.com/gke-nodepool": parts.HEAD_POOL}}
