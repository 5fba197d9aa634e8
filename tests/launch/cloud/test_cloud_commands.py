"""`burnish cluster` and `burnish vm` as they are typed: what is asked, printed and refused; a dry run sends nothing."""

import io
import json
import sys
from functools import partial

import pytest
import yaml
from cloud_setup import ACCOUNT, PAUSES, installs

from burnish.cli.main import main
from burnish.launch.cloud import access, cluster, commands, controllers, identity, vm
from burnish.launch.errors import LaunchError

WHERE = ("--project=my-project", "--location=us-east5-b")
VM = ("--project=my-project", "--zone=us-east5-b")
CREATE = (
    *("cluster", "create", "rl", *WHERE),
    *("--compute-type=ct6e-standard-4t", "--topology=4x8", "--reservation=my-reservation"),
    *("--authorized-cidr=203.0.113.7/32", "--bucket=gs://my-bucket"),
)


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def typed(cloud, monkeypatch):
    """Commands that find the fake cloud where they look for Google's."""
    monkeypatch.setattr(commands, "cluster_access", lambda project: cloud.access)
    monkeypatch.setattr(commands, "vm_access", lambda: cloud.vms)
    monkeypatch.setattr(cluster, "create", partial(cluster.create, pauses=PAUSES))
    monkeypatch.setattr(cluster, "delete", partial(cluster.delete, pauses=PAUSES))
    monkeypatch.setattr(vm, "create", partial(vm.create, poll_seconds=0.005))
    monkeypatch.setattr(vm, "delete", partial(vm.delete, poll_seconds=0.005))
    monkeypatch.setattr(controllers, "read_manifest", lambda release, file: installs()[release.name])
    return cloud


def run(*words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code


def terminal(monkeypatch, answer):
    stdin = io.StringIO(answer + "\n")
    stdin.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", stdin)


@pytest.fixture
def no_cloud(monkeypatch):
    """Whoever opens a client fails the test."""

    def opened(*_):
        raise AssertionError("a client was opened")

    monkeypatch.setattr(access, "credentials", opened)
    monkeypatch.setattr(access, "needed", opened)


def test_a_dry_run_needs_no_client_and_prints_plan_and_requests(no_cloud, capsys):
    assert run(*CREATE, "--dry-run", "--price-per-chip-hour=2.5") == 0
    printed = capsys.readouterr().out
    assert "to make      node pool slice-0: 8 hosts of ct6e-standard-4t" in printed
    assert "costs: about 80.00 an hour (1920 a day) for 32 chips at 2.5" in printed
    requests = yaml.safe_load(printed[printed.index("\ncluster:") :])
    assert [pool["name"] for pool in requests["node_pools"]] == ["cpu-np", "slice-0"]
    assert requests["cluster"]["workload_identity_config"] == {"workload_pool": "my-project.svc.id.goog"}
    assert run(*CREATE, "--dry-run", "--output=json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["requests"] == requests
    assert {part["state"] for part in values["parts"]} == {"to make"}
    assert run("vm", "create", "vm", *VM, "--spot", "--dry-run", "--output=json") == 0
    values = json.loads(capsys.readouterr().out)
    assert values["requests"]["instance"]["scheduling"]["provisioning_model"] == "SPOT"


def test_requests_of_a_dry_run_are_ones_that_the_clients_take(capsys):
    container = pytest.importorskip("google.cloud.container_v1")
    compute = pytest.importorskip("google.cloud.compute_v1")
    assert run(*CREATE, "--dry-run", "--output=json") == 0
    requests = json.loads(capsys.readouterr().out)["requests"]
    assert container.Cluster(requests["cluster"]).name == "rl"
    assert [container.NodePool(pool).name for pool in requests["node_pools"]] == ["cpu-np", "slice-0"]
    for capacity in (["--reservation=r"], ["--spot"], ["--flex-start"], []):
        assert run("vm", "create", "vm", *VM, *capacity, "--dry-run", "--output=json") == 0
        assert compute.Instance(json.loads(capsys.readouterr().out)["requests"]["instance"]).name == "vm"


def test_nothing_is_made_without_a_yes(typed, capsys, monkeypatch):
    terminal(monkeypatch, "n")
    assert run(*CREATE) == 1
    said = capsys.readouterr().err
    assert "make this? [y/N]" in said
    assert "error: nothing was done" in said
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(*CREATE) == 1
    assert "give --yes" in capsys.readouterr().err
    assert run("vm", "create", "vm", *VM) == 1
    assert typed.changes == []


def test_a_cluster_is_made_described_and_deleted(typed, capsys, monkeypatch):
    terminal(monkeypatch, "y")
    assert run(*CREATE) == 0
    captured = capsys.readouterr()
    assert "burnish job submit --queue=burnish" in captured.out
    assert "node pool slice-0: done" in captured.err
    calls = len(typed.changes)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run(*CREATE) == 0  # all is there: nobody is asked, nothing is done
    assert len(typed.changes) == calls
    capsys.readouterr()
    assert run("cluster", "describe", "rl", *WHERE, "--output=json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "RUNNING"
    assert run("cluster", "describe", "rl", *WHERE) == 0
    assert yaml.safe_load(capsys.readouterr().out)["controllers"]["Kueue"] == "v0.19.2"
    assert run("cluster", "delete", "rl", *WHERE) == 1
    captured = capsys.readouterr()
    assert all(name in captured.err for name in ("cluster rl", "slice-0", "cpu-np", "system", ACCOUNT))
    assert "gs://my-bucket" not in captured.err
    assert len(typed.changes) == calls
    assert run("cluster", "delete", "rl", *WHERE, "--delete-bucket=my-bucket", "-y", "--output=json") == 0
    deleted = json.loads(capsys.readouterr().out)["deleted"]
    assert {part["name"] for part in deleted} >= {"rl", "slice-0", ACCOUNT, "gs://my-bucket"}
    assert (typed.gke.clusters, typed.rest.buckets, typed.rest.accounts) == ({}, {}, {})
    assert run("cluster", "delete", "rl", *WHERE, "--yes") == 0
    assert "nothing is left of cluster rl" in capsys.readouterr().out


def test_ctrl_c_says_what_goes_on(typed, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "create", interrupted)
    assert run(*CREATE, "--yes") == 130
    assert "the same command continues from it" in capsys.readouterr().err


def test_a_machine_is_made_reached_and_deleted(typed, tmp_path, capsys):
    key = tmp_path / "id.pub"
    key.write_text("ssh-ed25519 AAAAC3Nz me@home\n")
    made = ("vm", "create", "vm", *VM, "--reservation=r", "--ssh-user=me", f"--ssh-public-key-file={key}")
    assert run(*made, "--yes") == 0
    assert "It costs money until burnish vm delete vm" in capsys.readouterr().out
    assert run(*made) == 0  # it is there: nobody is asked
    capsys.readouterr()
    assert run("vm", "ssh-command", "vm", *VM) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ssh me@203.0.113.50"
    assert "export TPU_ACCELERATOR_TYPE=v6e-8" in lines
    assert run("vm", "ssh-command", "vm", *VM, "--output=json") == 0
    assert json.loads(capsys.readouterr().out)["environment"]["TPU_TOPOLOGY"] == "2x4"
    typed.rest.instances["vm"]["labels"] = {}
    assert run("vm", "delete", "vm", *VM, "--yes") == 1
    assert "not made by burnish" in capsys.readouterr().err
    typed.rest.instances["vm"]["labels"] = {"managed-by": "burnish"}
    assert run("vm", "delete", "vm", *VM, "--yes") == 0
    assert "machine vm is deleted" in capsys.readouterr().out
    assert run("vm", "delete", "vm", *VM) == 0
    assert "gone already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("cluster", "create", "--compute-type=v6e-8"), "the cluster's name is required"),
        (("cluster", "create", "rl", "--compute-type=v6e-8"), "no project is set"),
        (("cluster", "create", "A", *WHERE, "--compute-type=v6e-8"), "--name=A"),
        (("cluster", "create", "rl", *WHERE), "compute_type is required"),
        (
            ("cluster", "create", "rl", "--project=my-project", "--location=us-east5", "--compute-type=v6e-8"),
            "--zone is required",
        ),
        ((*CREATE, "--spot"), "--reservation and --spot are both given"),
        ((*CREATE, "--max-run-duration=1h"), "--max-run-duration goes with --flex-start"),
        (("cluster", "create", "rl", *WHERE, "--compute-type=v6e-8", "--price-per-chip-hour=0"), "above 0"),
        (("cluster", "delete", "rl", *WHERE, "--delete-bucket=X"), "--delete-bucket=X"),
        (("vm", "create", "vm", "--project=my-project"), "no zone is given"),
        (("vm", "create", "vm", *VM, "--ssh-user=me", "--ssh-public-key-file=/missing"), "cannot be read"),
    ],
)
def test_wrong_options_are_refused_before_a_client_is_opened(no_cloud, capsys, words, message):
    assert run(*words) in (1, 2)
    assert message in capsys.readouterr().err


def test_settings_of_jobs_are_those_of_clusters_and_machines(capsys, no_cloud):
    for key, value in (("project", "my-project"), ("location", "us-east5-b"), ("cluster", "rl"), ("namespace", "team")):
        assert run("job", "config", "set", key, value) == 0
    capsys.readouterr()
    assert run("cluster", "create", "--compute-type=v6e-32", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "cluster rl in us-east5-b of project my-project" in printed
    assert "queue burnish: in namespace team" in printed
    assert run("vm", "create", "vm", "--dry-run") == 0
    assert "machine vm in us-east5-b of project my-project" in capsys.readouterr().out


def test_a_missing_package_or_credential_is_mended_by_the_command_that_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "google.cloud.container_v1", None)
    monkeypatch.setitem(sys.modules, "google.cloud.compute_v1", None)
    for words in (("cluster", "describe", "rl", *WHERE), ("vm", "delete", "vm", *VM)):
        assert run(*words) == 1
        assert "pip install 'burnish[gke]'" in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("google.cloud.compute_v1")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    for words in (("cluster", "describe", "rl", *WHERE), ("vm", "delete", "vm", *VM)):
        assert run(*words) == 1
        assert "gcloud auth application-default login" in capsys.readouterr().err


def test_clients_are_those_of_google_cloud_with_the_credentials_of_the_environment(monkeypatch, tmp_path):
    pytest.importorskip("google.cloud.compute_v1")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {
        "type": "service_account",
        "client_email": "me@my-project.iam.gserviceaccount.com",
        "token_uri": "http://127.0.0.1:9/token",
        "private_key": key.decode(),
    }
    file = tmp_path / "key.json"
    file.write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    opened = access.cluster_access("my-project")
    assert opened.credentials.service_account_email == account["client_email"]
    assert opened.clusters.transport.host == "container.googleapis.com:443"
    assert opened.storage.project == "my-project"
    assert access.vm_access().instances.transport._host == "https://compute.googleapis.com"
    with pytest.raises(LaunchError, match=r"service account a@b.c: the credentials were not accepted"):
        identity.find_account(opened, "my-project", "a@b.c")
