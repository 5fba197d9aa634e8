"""The emulated API server answers as a real one did, through the official client."""

import time
from typing import Any

import pytest
from emulator import Server, selects
from kubernetes import client, watch
from schemas import ABSENT, crds_present
from test_gke_manifests import PLAIN, manifest_of

PLACE = ("jobset.x-k8s.io", "v1alpha2", "default", "jobsets")


@pytest.fixture
def custom(server: Server) -> client.CustomObjectsApi:
    return client.CustomObjectsApi(client.ApiClient(client.Configuration(host=server.url)))


def suspended(name: str = "j1") -> dict[str, Any]:
    manifest = manifest_of(PLAIN)
    manifest["metadata"]["name"] = name
    manifest["spec"]["suspend"] = True
    return manifest


def refusal(function: Any, *args: Any, **kwargs: Any) -> client.ApiException:
    with pytest.raises(client.ApiException) as caught:
        function(*args, **kwargs)
    return caught.value


def test_an_object_is_made_read_listed_changed_and_deleted(custom: client.CustomObjectsApi) -> None:
    made = custom.create_namespaced_custom_object(*PLACE, suspended())
    assert {"uid", "resourceVersion", "creationTimestamp"} <= made["metadata"].keys()
    assert custom.get_namespaced_custom_object(*PLACE, "j1")["metadata"]["uid"] == made["metadata"]["uid"]
    listed = custom.list_namespaced_custom_object(*PLACE)
    assert [item["metadata"]["name"] for item in listed["items"]] == ["j1"]
    assert int(listed["metadata"]["resourceVersion"]) >= int(made["metadata"]["resourceVersion"])
    changed = custom.patch_namespaced_custom_object(*PLACE, "j1", {"metadata": {"labels": {"a": "b"}}})
    assert changed["metadata"]["labels"]["a"] == "b"
    assert changed["metadata"]["resourceVersion"] != made["metadata"]["resourceVersion"]
    assert custom.delete_namespaced_custom_object(*PLACE, "j1")["status"] == "Success"
    assert refusal(custom.get_namespaced_custom_object, *PLACE, "j1").status == 404


def test_what_is_there_already_is_a_conflict(custom: client.CustomObjectsApi) -> None:
    custom.create_namespaced_custom_object(*PLACE, suspended())
    error = refusal(custom.create_namespaced_custom_object, *PLACE, suspended())
    assert error.status == 409
    assert 'jobsets.jobset.x-k8s.io \\"j1\\" already exists' in error.body


def test_what_is_not_there_is_not_found(custom: client.CustomObjectsApi) -> None:
    elsewhere = ("jobset.x-k8s.io", "v1alpha2", "elsewhere", "jobsets")
    unknown = ("jobset.x-k8s.io", "v1alpha2", "default", "unknowns")
    assert refusal(custom.create_namespaced_custom_object, *elsewhere, suspended()).status == 404
    assert refusal(custom.list_namespaced_custom_object, *unknown).status == 404
    assert refusal(custom.delete_namespaced_custom_object, *PLACE, "none").status == 404


@pytest.mark.skipif(not crds_present(), reason=ABSENT)
def test_what_the_schema_forbids_is_refused_with_the_fields_path(custom: client.CustomObjectsApi) -> None:
    manifest = suspended()
    manifest["spec"]["failurePolicy"]["rules"][0].pop("name")
    error = refusal(custom.create_namespaced_custom_object, *PLACE, manifest)
    assert error.status == 422
    assert "spec.failurePolicy.rules.0" in error.body
    misspelt = suspended()
    misspelt["spec"]["suspnd"] = True
    error = refusal(custom.create_namespaced_custom_object, *PLACE, misspelt, field_validation="Strict")
    assert error.status == 400
    assert "suspnd" in error.body


def test_a_status_is_set_only_by_its_own_path(custom: client.CustomObjectsApi) -> None:
    made = custom.create_namespaced_custom_object(*PLACE, suspended() | {"status": {"restarts": 7}})
    assert "status" not in made
    custom.patch_namespaced_custom_object(*PLACE, "j1", {"status": {"restarts": 8}})
    assert custom.get_namespaced_custom_object(*PLACE, "j1").get("status", {}).get("restarts") != 8
    custom.patch_namespaced_custom_object_status(*PLACE, "j1", {"status": {"restarts": 9}})
    assert custom.get_namespaced_custom_object(*PLACE, "j1")["status"]["restarts"] == 9


def test_a_watch_tells_every_change_in_order_and_ends_in_time(custom: client.CustomObjectsApi) -> None:
    before = custom.list_namespaced_custom_object(*PLACE)["metadata"]["resourceVersion"]
    custom.create_namespaced_custom_object(*PLACE, suspended())
    custom.patch_namespaced_custom_object(*PLACE, "j1", {"metadata": {"labels": {"a": "b"}}})
    custom.create_namespaced_custom_object(*PLACE, suspended("j2"))
    custom.delete_namespaced_custom_object(*PLACE, "j1")
    start = time.monotonic()
    events = watch.Watch(return_type="object").stream(
        custom.list_namespaced_custom_object,
        *PLACE,
        resource_version=before,
        timeout_seconds=1,
        field_selector="metadata.name=j1",
    )
    kinds = [event["type"] for event in events]
    assert 0.9 < time.monotonic() - start < 5
    assert kinds[0] == "ADDED"
    assert kinds[-1] == "DELETED"
    assert set(kinds[1:-1]) == {"MODIFIED"}


def test_a_forgotten_version_is_gone(custom: client.CustomObjectsApi, server: Server) -> None:
    before = custom.list_namespaced_custom_object(*PLACE)["metadata"]["resourceVersion"]
    server.cluster.store.forget_history()
    stream = watch.Watch(return_type="object").stream(
        custom.list_namespaced_custom_object, *PLACE, resource_version=before, timeout_seconds=1
    )
    assert refusal(list, stream).status == 410


@pytest.mark.parametrize(
    ("labels", "fields", "chosen"),
    [
        ("", "", True),
        ("a=1", "", True),
        ("a==1,b", "", True),
        ("a=2", "", False),
        ("a!=2", "", True),
        ("!c", "", True),
        ("c", "", False),
        ("a in (1, 2),b in (x)", "", True),
        ("a notin (1)", "", False),
        ("", "metadata.name=n", True),
        ("", "metadata.name=m", False),
        ("a=1", "status.phase=Running,metadata.name=n", True),
    ],
)
def test_selectors_choose_as_kubernetes_does(labels: str, fields: str, chosen: bool) -> None:
    item = {"metadata": {"name": "n", "labels": {"a": "1", "b": "x"}}, "status": {"phase": "Running"}}
    assert selects(item, labels, fields) == chosen
