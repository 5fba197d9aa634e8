"""A wrong job is refused when it is described, and a secret shows nowhere."""

import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from burnish.launch.errors import LaunchError
from burnish.launch.job import (
    JobSpec,
    Mount,
    MountKind,
    PathwaysSpec,
    check_job_name,
    parse_assignment,
    parse_duration,
    parse_mount,
)

PATHWAYS = PathwaysSpec("gs://bucket/pathways/")
TOKEN = "hf_" + "aB3" * 10


def job(**changes) -> JobSpec:
    return JobSpec(**{"name": "train", "command": "true", "compute_type": "v6e-8", **changes})


@given(st.text(st.sampled_from("abz09-A_."), max_size=30), st.booleans())
def test_a_name_is_a_dns_label_that_leaves_room_for_what_is_added(name, with_pathways):
    # RFC 1035's <label>, spelt out.
    letters = "abcdefghijklmnopqrstuvwxyz"
    right = (
        0 < len(name) <= (22 if with_pathways else 28)
        and name[0] in letters
        and name[-1] in letters + "0123456789"
        and all(c in letters + "0123456789-" for c in name)
    )
    if right:
        check_job_name(name, with_pathways=with_pathways)
    else:
        with pytest.raises(LaunchError, match=r"^--name="):
            check_job_name(name, with_pathways=with_pathways)


def test_the_longest_names_fit_a_label():
    assert len(f"{'n' * 22}-pathways-head-0-0.{'n' * 22}") <= 63
    with pytest.raises(LaunchError, match="at most 22 are possible with --pathways"):
        job(name="n" * 23, pathways=PATHWAYS)
    assert job(name="n" * 23).name == "n" * 23


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Train"}, "--name=Train: expected a lower-case letter"),
        ({"command": " "}, "--command is required"),
        ({"command": "a\0b"}, "--command holds a NUL"),
        ({"compute_type": "v6e-7"}, "--compute-type=v6e-7"),
        ({"num_slices": 0}, "--num-slices=0: expected 1 to 2147483647"),
        ({"compute_type": "e2-standard-8", "num_slices": 2}, "--num-slices=2: a CPU job is one host"),
        ({"compute_type": "e2-standard-8", "pathways": PATHWAYS}, "--pathways: --compute-type=e2-standard-8 has no"),
        ({"restarts": -1}, "--restarts=-1: expected 0 to 2147483647"),
        ({"restart_on_exit_codes": (0,)}, "--restart-on-exit-codes=0"),
        ({"restart_on_exit_codes": (75,), "restarts": 0}, "--restart-on-exit-codes: --restarts=0 restarts nothing"),
        ({"timeout_seconds": 0}, "--timeout=0"),
        ({"ttl_seconds": 2**31}, "--gke-ttl-after-finished=2147483648: expected 0 to 2147483647"),
        ({"env": {"1A": "x"}}, "--env: '1A' is no name of a variable"),
        ({"env": {"JOB_COMPLETION_INDEX": "x"}}, "--env: JOB_COMPLETION_INDEX is set by the launcher"),
        ({"env": {"A": "x"}, "secret_env": {"A": "y"}}, "--env=A is a secret variable, too"),
        ({"secret_env": {"A-B": "y"}}, "--env-file or --secret-env: 'A-B' is no name"),
        ({"queue": "My_Queue"}, "--queue=My_Queue"),
        ({"priority": "High"}, "--priority=High"),
        ({"service_account": "a b"}, "--service-account=a b"),
        ({"image_pull_secret": ""}, "--image-pull-secret="),
        ({"node_constraints": {"a b": "c"}}, "--node-constraint=a b=c"),
        ({"image": "a b"}, "--image=a b"),
        ({"mounts": (parse_mount("/a:/x"), parse_mount("/b:/x"))}, "--mount: /x is given twice"),
        ({"pathways": PathwaysSpec("gs://bucket/x", headless=True)}, "--pathways-headless runs no command"),
    ],
)
def test_what_is_wrong_is_named(changes, words):
    with pytest.raises(LaunchError) as refused:
        job(**changes)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gcs_location": "/tmp"}, "--pathways-gcs-location=/tmp"),
        ({"worker_env": {"a b": "c"}}, "--pathways-worker-env: 'a b'"),
        ({"proxy_cpu": "many"}, "--pathways-proxy-cpu=many"),
        ({"server_memory": "1 GB"}, "--pathways-server-memory=1 GB"),
        ({"head_node_pool": "A"}, "--pathways-head-np=A"),
    ],
)
def test_what_is_wrong_of_pathways_is_named(changes, words):
    with pytest.raises(LaunchError) as refused:
        PathwaysSpec(**{"gcs_location": "gs://bucket/x", **changes})
    assert words in str(refused.value)


def test_a_job_is_made_of_plain_values():
    made = job(
        mounts=(parse_mount("gs://bucket:/data"),), env={"A": "1"}, pathways=PATHWAYS, restart_on_exit_codes=(75,)
    )
    assert json.loads(json.dumps(made.public())) == yaml.safe_load(yaml.safe_dump(made.public())) == made.public()
    assert made.public()["mounts"] == [{"kind": "bucket", "source": "gs://bucket", "path": "/data", "read_only": False}]
    assert made.public()["pathways"]["gcs_location"] == "gs://bucket/pathways/"


def test_secrets_are_in_no_text_of_a_job():
    made = job(secret_env={"HF_TOKEN": TOKEN, "SHORT": "s3cret"})
    for text in (repr(made), str(made), str(made.public())):
        assert TOKEN not in text
        assert "s3cret" not in text
    assert made.public()["secret_env"] == ["HF_TOKEN", "SHORT"]
    assert made.secret_env["HF_TOKEN"] == TOKEN


@pytest.mark.parametrize(
    "changes",
    [
        {"command": f"to_maxtext hf_access_token={TOKEN}"},
        {"env": {"TOKEN": TOKEN}},
        {"pathways": PathwaysSpec("gs://bucket/x", proxy_args=(f"--token={TOKEN}",))},
        {"pathways": PathwaysSpec("gs://bucket/x", worker_env={"T": TOKEN})},
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_token_in_the_open_is_refused_and_not_repeated(changes, known):
    with pytest.raises(LaunchError) as refused:
        job(secret_env={"HF_TOKEN": TOKEN} if known else {}, **changes)
    assert TOKEN not in str(refused.value)
    assert "HF_TOKEN" in str(refused.value)


def test_a_secret_of_any_kind_in_the_command_is_refused():
    with pytest.raises(LaunchError, match=r"--command holds the value of WANDB_API_KEY") as refused:
        job(command="run --key=0123456789", secret_env={"WANDB_API_KEY": "0123456789"})
    assert "0123456789" not in str(refused.value)


@given(st.integers(0, 400), st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_durations_add_up(days, hours, minutes, seconds):
    parts = [f"{n}{unit}" for n, unit in ((days, "d"), (hours, "h"), (minutes, "m"), (seconds, "s")) if n]
    total = seconds + 60 * (minutes + 60 * (hours + 24 * days))
    assert parse_duration("".join(parts) or "0", "--x") == total
    assert parse_duration(str(total), "--x") == total


@pytest.mark.parametrize("text", ["", "x", "1", "1.5h", "-1s", "1s1h", "h", "1 h", "1w", "９s", "9" * 5000])
def test_what_is_no_duration_is_refused(text):
    if text == "1":
        assert parse_duration(text, "--timeout") == 1
        return
    with pytest.raises(LaunchError, match=re.escape(f"--timeout={text}: expected a duration")):
        parse_duration(text, "--timeout")


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("gs://bucket/dir:/data", Mount(MountKind.BUCKET, "gs://bucket/dir", "/data")),
        ("/mnt/disk:/data:ro", Mount(MountKind.HOST, "/mnt/disk", "/data", True)),
        ("claim-1:/data/x", Mount(MountKind.CLAIM, "claim-1", "/data/x")),
    ],
)
def test_mounts_are_read(text, mount):
    assert parse_mount(text) == mount


@pytest.mark.parametrize("text", ["", "/a", "/a:b", "gs://x", "/a:/b:rw", "A:/b", "/a:/../b"])
def test_what_is_no_mount_is_refused(text):
    with pytest.raises(LaunchError, match="--mount"):
        parse_mount(text)


def test_an_assignment_without_a_name_is_not_repeated():
    assert parse_assignment("A=b=c", "--env") == ("A", "b=c")
    for text in ("=secret", "secret"):
        with pytest.raises(LaunchError) as refused:
            parse_assignment(text, "--env")
        assert "secret" not in str(refused.value)
