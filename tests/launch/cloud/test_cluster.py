"""Clusters made through the real clients: created, already there, refused, failed halfway and resumed, deleted."""

import threading

import pytest

pytest.importorskip("grpc")
import grpc
from cloud_setup import ACCOUNT, PATH, PAUSES, cluster_spec

from burnish.launch.cloud import cluster
from burnish.launch.cloud.spec import Capacity
from burnish.launch.errors import LaunchError


def bindings(policy):
    return {(binding["role"], member) for binding in policy["bindings"] for member in binding["members"]}


def test_a_cluster_is_made_with_all_its_parts(cloud):
    spec = cluster_spec(num_slices=2)
    assert set(cloud.states(spec).values()) == {"to make"}
    cloud.create(spec)
    made = cloud.gke.clusters[PATH]
    assert made.status.name == "RUNNING"
    assert made.workload_identity_config.workload_pool == "my-project.svc.id.goog"
    assert made.addons_config.gcs_fuse_csi_driver_config.enabled
    assert made.release_channel.channel.name == "REGULAR"
    endpoints = made.control_plane_endpoints_config.ip_endpoints_config
    assert endpoints.enable_public_endpoint
    assert [block.cidr_block for block in endpoints.authorized_networks_config.cidr_blocks] == ["203.0.113.7/32"]
    assert [pool.name for pool in made.node_pools] == ["system", "cpu-np", "slice-0", "slice-1"]
    assert {pool.config.service_account for pool in made.node_pools} == {ACCOUNT}
    assert {pool.config.workload_metadata_config.mode.name for pool in made.node_pools} == {"GKE_METADATA"}
    system, head, *slices = made.node_pools
    assert (system.config.machine_type, system.initial_node_count) == ("e2-standard-8", 1)
    assert head.autoscaling.enabled
    assert (head.initial_node_count, head.autoscaling.total_min_node_count, head.autoscaling.total_max_node_count) == (
        0,
        0,
        1,
    )
    for pool in slices:
        assert (pool.config.machine_type, pool.initial_node_count) == ("ct6e-standard-4t", 8)
        assert (pool.placement_policy.type_.name, pool.placement_policy.tpu_topology) == ("COMPACT", "4x8")
        affinity = pool.config.reservation_affinity
        assert affinity.consume_reservation_type.name == "SPECIFIC_RESERVATION"
        assert list(affinity.values) == ["my-reservation"]
        [taint] = pool.config.taints
        assert (taint.key, taint.value, taint.effect.name) == ("google.com/tpu", "present", "NO_SCHEDULE")
    assert set(cloud.states(spec).values()) == {"there"}


def test_nodes_and_pods_may_write_to_the_bucket_and_nobody_else(cloud):
    cloud.create(cluster_spec())
    bucket = cloud.rest.buckets["my-bucket"]
    assert bucket["location"] == "us-east5"
    assert bucket["iamConfiguration"]["publicAccessPrevention"] == "enforced"
    assert bucket["softDeletePolicy"]["retentionDurationSeconds"] in (0, "0")
    pods = (
        "principalSet://iam.googleapis.com/projects/123456789/locations/global/workloadIdentityPools/"
        f"my-project.svc.id.goog/kubernetes.cluster/https://container.googleapis.com/v1/{PATH}"
    )
    roles = ("roles/storage.objectUser", "roles/storage.legacyBucketReader")
    assert bindings(cloud.rest.policies["my-bucket"]) == {
        (role, member) for role in roles for member in (f"serviceAccount:{ACCOUNT}", pods)
    }
    assert bindings(cloud.rest.policies["project"]) == {
        ("roles/container.defaultNodeServiceAccount", f"serviceAccount:{ACCOUNT}"),
        ("roles/artifactregistry.reader", f"serviceAccount:{ACCOUNT}"),
    }


def test_policies_of_others_are_kept_whoever_writes_in_between(cloud):
    theirs = {"role": "roles/owner", "members": ["user:a@example.com"]}
    conditional = {
        "role": "roles/artifactregistry.reader",
        "members": ["user:b@example.com"],
        "condition": {"title": "t", "expression": "true"},
    }
    cloud.rest.policies["project"] = {"version": 3, "etag": "e", "bindings": [theirs, conditional]}
    cloud.rest.races, cloud.rest.unknown_member_answers = 2, 2
    cloud.create(cluster_spec())
    policy = cloud.rest.policies["project"]
    assert theirs in policy["bindings"]
    assert conditional in policy["bindings"]
    assert policy["version"] == 3
    cluster.delete(cloud.access, "my-project", "us-east5-b", "rl", cloud.said.append, pauses=PAUSES)
    assert cloud.rest.policies["project"]["bindings"] == [theirs, conditional]


def test_making_it_again_changes_nothing(cloud):
    spec = cluster_spec()
    cloud.create(spec)
    policies = dict(cloud.rest.policies)
    before = [*cloud.gke.calls], [*cloud.rest.calls]
    assert not cluster.needed_manifests(spec, cluster.survey(spec, cloud.access))
    cluster.create(spec, cloud.access, {}, cloud.said.append, PAUSES)
    assert (cloud.gke.calls, cloud.rest.calls) == before
    assert cloud.rest.policies == policies


def test_a_quota_error_is_explained_and_the_next_run_goes_on(cloud):
    spec = cluster_spec()
    cloud.gke.refuse(
        "CreateNodePool", grpc.StatusCode.RESOURCE_EXHAUSTED, "Insufficient regional quota: request requires '64.0'."
    )
    with pytest.raises(LaunchError, match=r"node pool cpu-np: Insufficient regional quota.*iam-admin/quotas\?project="):
        cloud.create(spec)
    assert cloud.gke.calls.count("CreateCluster") == 1
    cloud.create(spec)
    assert cloud.gke.calls.count("CreateCluster") == 1
    assert set(cloud.states(spec).values()) == {"there"}


def test_a_slice_that_fails_halfway_is_explained_deleted_and_made_anew(cloud):
    spec = cluster_spec(num_slices=2)
    cloud.gke.fail("slice-1", "GCE_STOCKOUT: the zone does not have enough resources available")
    with pytest.raises(LaunchError) as caught:
        cloud.create(spec)
    assert "node pool slice-1 failed: GCE_STOCKOUT" in str(caught.value)
    assert "later" in str(caught.value)
    assert "cost money" in str(caught.value)
    assert cloud.gke.pool(PATH, "slice-0").status.name == "RUNNING"
    assert cloud.states(spec)["slice-1"] == "broken, to make anew"
    cloud.create(spec)
    assert cloud.gke.calls.count("DeleteNodePool") == 1
    assert cloud.gke.calls.count("CreateNodePool") == 4
    assert set(cloud.states(spec).values()) == {"there"}


def test_a_cluster_that_fails_is_explained_deleted_and_made_anew(cloud):
    spec = cluster_spec()
    cloud.gke.fail("rl", "IP space of 'default' is exhausted")
    with pytest.raises(LaunchError, match="cluster rl failed: IP space"):
        cloud.create(spec)
    assert cloud.states(spec)["rl"] == "broken, to make anew"
    cloud.create(spec)
    assert any("is broken: IP space" in line for line in cloud.said)
    assert cloud.gke.calls.count("CreateCluster") == 2
    assert set(cloud.states(spec).values()) == {"there"}


def test_an_interrupted_run_is_continued_where_its_operation_stands(cloud, monkeypatch):
    spec = cluster_spec()

    def interrupted(text):
        if text.startswith("cluster rl"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.create(spec, cloud.access, cloud.manifests, interrupted, PAUSES)
    assert cloud.gke.busy()
    assert cloud.states(spec)["rl"] == "in progress"
    cloud.create(spec)
    assert any("begun before" in line for line in cloud.said)
    assert cloud.gke.calls.count("CreateCluster") == 1
    assert set(cloud.states(spec).values()) == {"there"}


def test_work_that_is_in_the_way_is_waited_for(cloud):
    spec = cluster_spec()
    cloud.create(spec)
    cloud.gke.refuse(
        "UpdateCluster", grpc.StatusCode.FAILED_PRECONDITION, "Cluster is running incompatible operation operation-9."
    )
    cloud.create(cluster_spec(authorized_cidr=("198.51.100.0/24",)))
    config = cloud.gke.clusters[PATH].control_plane_endpoints_config.ip_endpoints_config
    assert [block.cidr_block for block in config.authorized_networks_config.cidr_blocks] == ["198.51.100.0/24"]


def test_a_precondition_that_no_waiting_mends_ends_the_run(cloud):
    cloud.gke.refuse("CreateCluster", grpc.StatusCode.FAILED_PRECONDITION, "The billing account is closed.")
    with pytest.raises(LaunchError, match="billing account is closed"):
        cloud.create(cluster_spec())


def test_addresses_that_changed_are_changed_and_none_given_leaves_them(cloud):
    cloud.create(cluster_spec())
    assert cloud.states(cluster_spec(authorized_cidr=("198.51.100.0/24",)))["rl"] == "to change"
    assert cloud.states(cluster_spec(authorized_cidr=()))["rl"] == "there"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"topology": "2x4"}, "node pool slice-0: topology is 4x8, asked for is 2x4"),
        ({"capacity": Capacity.SPOT, "reservation": None}, "spot is off, asked for is on"),
        ({"reservation": "other"}, "reservation is my-reservation, asked for is other"),
        ({"head_machine_type": "n2-standard-32"}, "node pool cpu-np: machine type is n2-standard-64"),
        ({"network": "mine"}, "network is default, asked for is mine"),
    ],
)
def test_what_is_there_and_differs_is_named(cloud, changed, words):
    cloud.create(cluster_spec())
    changes = len(cloud.changes)
    with pytest.raises(LaunchError) as caught:
        cluster.survey(cluster_spec(**changed), cloud.access)
    assert words in str(caught.value)
    assert len(cloud.changes) == changes


def test_a_cluster_of_somebody_else_is_left_alone(cloud):
    cloud.create(cluster_spec())
    cloud.gke.clusters[PATH].resource_labels = {}
    with pytest.raises(LaunchError, match="not made by burnish"):
        cluster.survey(cluster_spec(), cloud.access)
    with pytest.raises(LaunchError, match="not made by burnish"):
        cluster.delete(cloud.access, "my-project", "us-east5-b", "rl", cloud.said.append, pauses=PAUSES)
    assert "DeleteCluster" not in cloud.gke.calls


def test_missing_rights_are_explained(cloud):
    cloud.gke.refuse("GetCluster", grpc.StatusCode.PERMISSION_DENIED, "Required 'container.clusters.get' permission.")
    with pytest.raises(LaunchError, match=r"container.clusters.get.*roles/container.admin"):
        cluster.survey(cluster_spec(), cloud.access)
    cloud.rest.refuse("POST .*serviceAccounts", 403, "Permission 'iam.serviceAccounts.create' denied")
    with pytest.raises(LaunchError, match=r"service account rl-nodes.*roles/iam.serviceAccountAdmin"):
        cloud.create(cluster_spec())
    cloud.rest.refuse("GET .*/b/my-bucket", 403, "does not have storage.buckets.get access")
    with pytest.raises(LaunchError, match=r"bucket gs://my-bucket.*roles/storage.admin"):
        cloud.create(cluster_spec())
    assert "CreateCluster" not in cloud.gke.calls


def test_an_account_of_ones_own_is_neither_made_nor_deleted(cloud):
    own = "nodes@other-project.iam.gserviceaccount.com"
    spec = cluster_spec(service_account=own, bucket=None)
    cloud.create(spec)
    assert not cloud.rest.accounts
    assert {pool.config.service_account for pool in cloud.gke.clusters[PATH].node_pools} == {own}
    assert not cloud.rest.calls


def test_single_host_slices_have_no_placement_and_spot_takes_no_reservation(cloud):
    spec = cluster_spec(compute_type="v6e-8", topology=None, capacity=Capacity.SPOT, reservation=None)
    cloud.create(spec)
    pool = cloud.gke.pool(PATH, "slice-0")
    assert (pool.config.machine_type, pool.initial_node_count) == ("ct6e-standard-8t", 1)
    assert pool.config.spot
    assert not pool.placement_policy.tpu_topology
    assert not pool.config.reservation_affinity.values


def test_flex_start_hosts_come_when_a_job_wants_them(cloud):
    cloud.create(cluster_spec(capacity=Capacity.FLEX_START, reservation=None, max_run_seconds=7200))
    pool = cloud.gke.pool(PATH, "slice-0")
    assert pool.config.flex_start
    assert pool.config.max_run_duration.seconds == 7200
    assert pool.config.reservation_affinity.consume_reservation_type.name == "NO_RESERVATION"
    assert (pool.initial_node_count, pool.autoscaling.total_max_node_count) == (0, 8)


def test_deletion_names_everything_and_leaves_nothing(cloud):
    cloud.create(cluster_spec())
    cloud.rest.objects["my-bucket"] = {f"checkpoints/{n}": b"" for n in range(40)}
    found = cluster.deletion_parts(cloud.access, "my-project", "us-east5-b", "rl", "my-bucket")
    assert [(part.kind, part.name) for part in found] == [
        ("cluster", "rl"),
        ("node pool", "system"),
        ("node pool", "cpu-np"),
        ("node pool", "slice-0"),
        ("service account", ACCOUNT),
        ("bucket", "gs://my-bucket"),
    ]
    cluster.delete(cloud.access, "my-project", "us-east5-b", "rl", cloud.said.append, "my-bucket", PAUSES)
    assert (cloud.gke.clusters, cloud.rest.accounts, cloud.rest.buckets) == ({}, {}, {})
    assert bindings(cloud.rest.policies["project"]) == set()
    assert cluster.deletion_parts(cloud.access, "my-project", "us-east5-b", "rl", "my-bucket") == []
    cluster.delete(cloud.access, "my-project", "us-east5-b", "rl", cloud.said.append, "my-bucket", PAUSES)


def test_the_bucket_stays_where_it_is_not_named(cloud):
    cloud.create(cluster_spec())
    cluster.delete(cloud.access, "my-project", "us-east5-b", "rl", cloud.said.append, pauses=PAUSES)
    assert list(cloud.rest.buckets) == ["my-bucket"]


def test_deletion_waits_for_work_under_way_and_goes_on_where_it_was_left(cloud):
    cloud.create(cluster_spec())
    with cloud.gke.lock:
        cloud.gke._begin("UPGRADE_NODES", f"{PATH}/nodePools/system", lambda _: None)

    def interrupted(text):
        if text.startswith("cluster rl: deletion"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.delete(cloud.access, "my-project", "us-east5-b", "rl", interrupted, pauses=PAUSES)
    assert cloud.gke.busy()
    cluster.delete(cloud.access, "my-project", "us-east5-b", "rl", cloud.said.append, pauses=PAUSES)
    assert cloud.gke.calls.count("DeleteCluster") == 1
    assert (cloud.gke.clusters, cloud.rest.accounts) == ({}, {})


def test_a_deletion_that_fails_says_so(cloud):
    cloud.create(cluster_spec())
    cloud.gke.fail("rl", "a firewall rule is still in use")
    with pytest.raises(LaunchError, match="cluster rl: deletion failed: a firewall rule"):
        cluster.delete(cloud.access, "my-project", "us-east5-b", "rl", cloud.said.append, pauses=PAUSES)
    assert ACCOUNT in cloud.rest.accounts


def test_the_account_stays_while_a_cluster_of_that_name_elsewhere_uses_it(cloud):
    cloud.create(cluster_spec(bucket=None))
    cloud.create(cluster_spec(bucket=None, location="europe-west4-a", zone="europe-west4-a"))
    cluster.delete(cloud.access, "my-project", "us-east5-b", "rl", cloud.said.append, pauses=PAUSES)
    assert ACCOUNT in cloud.rest.accounts
    cluster.delete(cloud.access, "my-project", "europe-west4-a", "rl", cloud.said.append, pauses=PAUSES)
    assert not cloud.rest.accounts


def test_description_says_what_is_there_and_what_is_wrong(cloud):
    with pytest.raises(LaunchError, match="there is no cluster rl in us-east5-b; project my-project has: none"):
        cluster.describe(cloud.access, "my-project", "us-east5-b", "rl")
    cloud.gke.fail("slice-0", "quota")
    with pytest.raises(LaunchError):
        cloud.create(cluster_spec())
    values = cluster.describe(cloud.access, "my-project", "us-east5-b", "rl")
    assert values["status"] == "RUNNING"
    assert values["controllers"] == {"JobSet": "v0.12.0", "Kueue": "v0.19.2"}
    [broken] = [pool for pool in values["node_pools"] if pool["name"] == "slice-0"]
    assert (broken["status"], broken["message"]) == ("ERROR", "quota")
    assert broken["capacity"] == "reservation my-reservation"
    with cloud.gke.lock:
        cloud.gke._begin("UPGRADE_NODES", f"{PATH}/nodePools/system", lambda _: None)
    cloud.access.credentials.token = "of somebody else"
    values = cluster.describe(cloud.access, "my-project", "us-east5-b", "rl")
    assert [operation["type"] for operation in values["operations"]] == ["UPGRADE_NODES"]
    assert "401" in values["controllers"]["unknown"]


def test_an_outage_of_google_cloud_is_one_line(cloud):
    cloud.rest.refuse("GET .*serviceAccounts", 500, "backend error")
    with pytest.raises(LaunchError, match=r"service account rl-nodes.*backend error"):
        cloud.create(cluster_spec())
    from cloud_fakes import Redirect

    cloud.access.session.mount("https://", Redirect("127.0.0.1:9"))
    with pytest.raises(LaunchError, match="Google Cloud cannot be reached"):
        cloud.create(cluster_spec())


def test_progress_is_said_while_an_operation_lasts(cloud, monkeypatch):
    monkeypatch.setattr("burnish.launch.cloud.operations.REPORT_SECONDS", 0.0)
    cloud.create(cluster_spec())
    assert any(line.startswith("node pool slice-0 … ") for line in cloud.said)
    assert any(line.startswith("node pool slice-0: done after ") for line in cloud.said)


def test_an_operation_without_end_is_given_up_and_can_be_taken_up_again(cloud, monkeypatch):
    monkeypatch.setattr("burnish.launch.cloud.operations.MAX_SECONDS", 0.05)
    monkeypatch.setattr("cloud_fakes.LOOKS", 10**9)
    with pytest.raises(LaunchError, match=r"cluster rl: not done after .*waits for it again"):
        cloud.create(cluster_spec())
    monkeypatch.undo()
    cloud.create(cluster_spec())
    assert cloud.gke.calls.count("CreateCluster") == 1


def test_two_runs_at_once_make_one_cluster(cloud):
    errors = []

    def run():
        try:
            cloud.create(cluster_spec())
        except LaunchError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert [pool.name for pool in cloud.gke.clusters[PATH].node_pools] == ["system", "cpu-np", "slice-0"]
    assert set(cloud.states(cluster_spec()).values()) == {"there"}
