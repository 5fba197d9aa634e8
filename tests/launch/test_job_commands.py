"""`burnish job …` as it is typed: what each flag becomes, what is printed, and how it exits."""

import json
import os
import subprocess
import sys
import time

import pytest
import yaml

from burnish.cli.main import main
from burnish.config.overrides import load_config
from burnish.config.schema import JobSubmitConfig
from burnish.launch.commands import read_env_file, spec_of
from burnish.launch.errors import LaunchError
from burnish.launch.job import JobSpec, Mount, MountKind, PathwaysSpec
from burnish.launch.local.backend import LocalBackend

TOKEN = "hf_" + "aB3" * 10
QUICK = ("--backend=local", "--compute-type=v6e-4")


@pytest.fixture(autouse=True)
def own_directories(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield
    for status in LocalBackend().list():
        LocalBackend().cancel(status.name)


def burnish(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["job", *args])
    printed = capsys.readouterr()
    return exit_.value.code or 0, printed.out, printed.err


def answer(capsys, *args: str):
    code, out, err = burnish(capsys, *args, "--output", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def spec(*args: str, environment: dict[str, str] | None = None) -> JobSpec:
    needed = ["--name=n", "--compute-type=v6e-32", "--command=run"]
    return spec_of(load_config(JobSubmitConfig, [*needed, *args]), environment or {})


def test_workflow_bs_training_job_is_read_as_it_is_typed():
    # As the tutorial writes it, of the flags of job submit.
    made = spec(
        "--name=gemma4-training",
        "--num-slices=1",
        "--image=us-docker.pkg.dev/p/maxtext-images/tpu_post_training:0.2.4",
        "--compute-type=ct6e-standard-4t",
        "--topology=4x8",
        "--pathways",
        "--pathways-gcs-location=gs://bucket/pathways/",
        "--gke-ttl-after-finished=24h",
        "--restarts=0",
        "--env=A=1",
        "--env=B=x=y",
        "--pathways-proxy-env=P=1",
        "--pathways-server-env=S=1",
        "--pathways-worker-env=W=1",
        "--pathways-worker-args=--flag=1",
        "--pathways-worker-args=--other",
        "--command=JAX_PLATFORMS=proxy,cpu train_rl run_name=rl vllm_hf_overrides='{\"a\": 1}'",
    )
    assert made == JobSpec(
        name="gemma4-training",
        command="JAX_PLATFORMS=proxy,cpu train_rl run_name=rl vllm_hf_overrides='{\"a\": 1}'",
        compute_type="ct6e-standard-4t",
        topology="4x8",
        image="us-docker.pkg.dev/p/maxtext-images/tpu_post_training:0.2.4",
        env={"A": "1", "B": "x=y"},
        restarts=0,
        ttl_seconds=24 * 3600,
        pathways=PathwaysSpec(
            "gs://bucket/pathways/",
            proxy_env={"P": "1"},
            server_env={"S": "1"},
            worker_env={"W": "1"},
            worker_args=("--flag=1", "--other"),
        ),
    )


def test_every_other_flag_reaches_the_job():
    made = spec(
        *("--num_slices", "2", "-n", "m", "--mount=gs://bucket:/data:ro", "--queue=q", "--priority=high"),
        *("--restarts=2", "--restart-on-exit-codes=75,137", "--restart-on-exit-codes=1", "--grace-period=2m"),
        *("--timeout=3h", "--node-constraint=k=v", "--image-pull-secret=s", "--service-account=a", "--verbose"),
        *("--pathways", "--pathways-gcs-location=gs://bucket/x", "--pathways-head-np=pool"),
        *(
            "--pathways-proxy-args=a",
            "--pathways-server-args=b",
            "--pathways-proxy-image=i",
            "--pathways-server-image=j",
        ),
        *("--pathways-worker-image=k", "--pathways-proxy-cpu=1", "--pathways-proxy-memory=2Gi"),
        *("--pathways-server-cpu=3", "--pathways-server-memory=4Gi"),
    )
    assert (made.name, made.num_slices, made.queue, made.priority) == ("m", 2, "q", "high")
    assert made.mounts == (Mount(MountKind.BUCKET, "gs://bucket", "/data", True),)
    assert (made.restarts, made.restart_on_exit_codes, made.grace_seconds) == (2, (75, 137, 1), 120)
    assert (made.timeout_seconds, dict(made.node_constraints)) == (3 * 3600, {"k": "v"})
    assert (made.image_pull_secret, made.service_account, made.verbose) == ("s", "a", True)
    assert made.pathways == PathwaysSpec(
        "gs://bucket/x",
        head_node_pool="pool",
        proxy_args=("a",),
        server_args=("b",),
        proxy_image="i",
        server_image="j",
        worker_image="k",
        proxy_cpu="1",
        proxy_memory="2Gi",
        server_cpu="3",
        server_memory="4Gi",
    )


def test_a_job_can_be_described_in_a_file_and_changed_on_the_command_line(tmp_path):
    recipe = tmp_path / "job.yaml"
    recipe.write_text("compute_type: v6e-8\ncommand: |\n  one\n  two\nenv:\n  A: 1\n  B: 2\nmount: [/a:/a, /b:/b]\n")
    made = spec_of(load_config(JobSubmitConfig, [str(recipe), "--name=n", "--env=B=3", "--env=C=4"]), {})
    assert (made.command, made.compute_type) == ("one\ntwo\n", "v6e-8")
    assert dict(made.env) == {"A": "1", "B": "3", "C": "4"}
    assert [mount.path for mount in made.mounts] == ["/a", "/b"]


def test_secrets_come_from_the_environment_and_from_files(tmp_path):
    file = tmp_path / "secrets"
    file.write_text("# mine\n\nexport A='x y'\r\nB=\"q\"\nC=a=b # c\nHF_TOKEN=of-the-file\n")
    assert read_env_file(str(file)) == {"A": "x y", "B": "q", "C": "a=b # c", "HF_TOKEN": "of-the-file"}
    environment = {"HF_TOKEN": "mine", "WANDB_API_KEY": "key", "OTHER": "x"}
    assert dict(spec(environment=environment).secret_env) == {"HF_TOKEN": "mine"}
    assert dict(spec("--secret-env=WANDB_API_KEY", environment=environment).secret_env) == {
        "HF_TOKEN": "mine",
        "WANDB_API_KEY": "key",
    }
    assert spec(f"--env-file={file}", environment=environment).secret_env["HF_TOKEN"] == "of-the-file"
    assert dict(spec("--env=HF_TOKEN=", environment=environment).secret_env) == {}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--secret-env=NOT_THERE"], "--secret-env=NOT_THERE: there is no such variable"),
        (["--secret-env=A=secret"], "not its value"),
        ([f"--secret-env={TOKEN}"], "not its value"),
        (["--env-file=/nowhere"], "--env-file=/nowhere: cannot be read"),
        (["--grace-period=x"], "--grace-period=x: expected a duration"),
        (["--timeout=1.5h"], "--timeout=1.5h: expected a duration"),
        (["--gke-ttl-after-finished="], "--gke-ttl-after-finished=: expected a duration"),
        (["--restart-on-exit-codes=many"], "--restart-on-exit-codes=many: expected exit codes"),
        (["--mount=x"], "--mount=x: expected gs://"),
    ],
)
def test_what_is_wrong_is_named(args, words):
    with pytest.raises(LaunchError) as refused:
        spec(*args)
    assert words in str(refused.value)


# The second is the end of a key of several lines.
@pytest.mark.parametrize("line", ["secret", "MII+secret/==", "9secret=x"])
def test_a_line_of_an_env_file_that_is_no_assignment_is_not_repeated(tmp_path, line):
    file = tmp_path / "envfile"
    file.write_text(f"A=1\n{line}\n")
    with pytest.raises(LaunchError, match=r"line 2: expected NAME=VALUE") as refused:
        read_env_file(str(file))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--env=A"], "env=… is refused: expected NAME=VALUE"),
        (["--pathways-proxy-env=A=1"], "--pathways-proxy-env says how Pathways runs; give --pathways, too"),
        (["--pathways"], "--pathways needs --pathways-gcs-location"),
        (["--await-timeout=1h"], "give --await-job-completion, too"),
        (["--num-slices=two"], "num_slices=two is refused: expected integer"),
        (["--nmae=x"], "unknown option nmae; nearest: name"),
        (["--backend=slurm"], "backend=slurm is refused: expected gke | local"),
        (["--command"], "--command needs a value"),
        (["-x"], "-x: options are written"),
    ],
)
def test_a_wrong_command_line_exits_with_two_and_starts_nothing(capsys, args, words):
    code, out, err = burnish(capsys, "submit", "--name=n", *QUICK, "--command=true", *args)
    assert (code, out) == (2, "")
    assert words in err
    assert LocalBackend().list() == []


def test_what_a_refused_job_says_is_one_line_and_exit_code_one(capsys):
    code, out, err = burnish(capsys, "submit", "--name=Train", *QUICK, "--command=true")
    assert (code, out) == (1, "")
    assert err.startswith("error: --name=Train: expected")
    assert err.count("\n") == 1


def test_settings_are_set_listed_and_used(capsys):
    assert burnish(capsys, "config", "set", "project", "p-1") == (0, "project p-1\n", "")
    assert answer(capsys, "config", "set", "backend", "local")["backend"] == "local"
    assert answer(capsys, "config", "list") == {
        **{"project": "p-1", "cluster": None, "location": None, "namespace": None},
        "backend": "local",
    }
    assert "project    p-1\n" in burnish(capsys, "config", "list")[1]
    assert answer(capsys, "list") == []
    code, _, err = burnish(capsys, "config", "set", "zone", "x")
    assert (code, err) == (
        1,
        "error: zone: no such setting; there are project, cluster, location, namespace, backend\n",
    )


def test_a_job_from_submit_to_cancel(capsys):
    code, out, err = burnish(
        capsys, "submit", "--name=good", *QUICK, "--command=echo a; echo b >&2", "--await-job-completion"
    )
    assert (code, out) == (0, "job good has succeeded\n")
    assert [line.split("  ")[1] for line in err.splitlines()] == ["running: 1 process", "succeeded"]
    (listed,) = answer(capsys, "list", "--backend=local")
    assert (listed["name"], listed["state"], listed["exit_code"]) == ("good", "Succeeded", 0)
    head, row = burnish(capsys, "list", "--backend=local")[1].splitlines()
    assert head.split() == ["NAME", "STATUS", "CREATION_TIME", "COMPLETION_TIME", "RESTARTS", "REASON"]
    assert row.split()[:2] == ["good", "Succeeded"]
    assert burnish(capsys, "logs", "good", "--backend=local")[1] == "[main-job-0-0] a\n[main-job-0-0] b\n"
    assert burnish(capsys, "logs", "good", "--main-only", "-f", "--backend=local")[1] == "a\nb\n"
    lines = burnish(capsys, "logs", "good", "-o", "json", "--backend=local")[1].splitlines()
    assert [json.loads(line) for line in lines] == [
        {"host": "main-job-0-0", "text": "a"},
        {"host": "main-job-0-0", "text": "b"},
    ]
    described = answer(capsys, "describe", "good", "--backend=local")
    assert (described["state"], described["spec"]["command"]) == ("Succeeded", "echo a; echo b >&2")
    assert yaml.safe_load(burnish(capsys, "describe", "good", "--backend=local")[1]) == described
    end = time.monotonic() + 10  # the supervisor says how a job has ended, and then ends itself
    while (inspected := answer(capsys, "inspect", "good", "--backend=local"))["supervisor"]["running"]:
        assert time.monotonic() < end
    assert inspected["logs"] == {"main-job-0-0": ["a", "b"]}
    assert inspected["supervisor"] == {"running": False, "log": []}
    assert burnish(capsys, "cancel", "good", "--backend=local")[1] == "job good is Succeeded; its name is free\n"
    assert answer(capsys, "list", "--backend=local") == []


def test_a_failed_jobs_exit_code_is_the_programs(capsys):
    args = ("submit", "--name=bad", *QUICK, "--command=exit 9", "--restarts=0", "--await-job-completion")
    code, out, err = burnish(capsys, *args)
    assert (code, out) == (9, "")
    assert err.splitlines()[-1] == (
        "error: job bad is Failed: main-job-0-0 has ended with exit code 9; burnish job logs bad --backend=local "
        "shows its output"
    )
    code, _, err = burnish(capsys, *args)
    assert code == 1
    assert "--name=bad is taken" in err
    burnish(capsys, "cancel", "bad", "--backend=local")
    code, out, _ = burnish(capsys, *args, "--output=json")
    assert (code, json.loads(out)["state"]) == (9, "Failed")


def test_waiting_no_longer_leaves_the_job_alone(capsys):
    args = ("submit", "--name=long", *QUICK, "--command=sleep 60", "--await-job-completion", "--await-timeout=1s")
    code, _, err = burnish(capsys, *args)
    assert (code, err.splitlines()[-1]) == (124, "error: job long has not ended within 1 s; it goes on")
    assert answer(capsys, "list", "--backend=local", "--status=Running")[0]["name"] == "long"
    assert answer(capsys, "cancel", "long", "--backend=local")["state"] == "Cancelled"


def test_an_interrupt_while_waiting_leaves_the_job_alone(capsys, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalBackend, "wait", interrupted)
    code, _, err = burnish(capsys, "submit", "--name=long", *QUICK, "--command=sleep 60", "--await-job-completion")
    assert (code, err) == (
        130,
        "no longer waiting; the job goes on: burnish job cancel long --backend=local ends it\ninterrupted\n",
    )
    assert not LocalBackend().status("long").state.is_final


def test_the_list_can_be_narrowed(capsys):
    for name, command in (("a-1", "true"), ("a-2", "false"), ("b-1", "true")):
        burnish(
            capsys, "submit", f"--name={name}", *QUICK, f"--command={command}", "--restarts=0", "--await-job-completion"
        )

    def names(*args: str) -> list[str]:
        return [job["name"] for job in answer(capsys, "list", "--backend=local", *args)]

    assert names() == ["a-1", "a-2", "b-1"]
    assert names("--status=Failed") == ["a-2"]
    assert names("--name-contains=a-", "--status=Succeeded") == ["a-1"]


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_dry_run_shows_the_processes_and_starts_none(capsys, tmp_path, output, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    args = ["submit", "--name=n", "--backend=local", "--compute-type=v6e-32", "--command=run", f"--output={output}"]
    code, out, err = burnish(capsys, *args, "--dry-run")
    assert (code, err) == (0, "")
    (plan,) = json.loads(out) if output == "json" else yaml.safe_load_all(out)
    assert [host["host"] for host in plan["hosts"]] == [f"main-job-0-{i}" for i in range(8)]
    assert (plan["argv"], plan["secrets"]) == (["bash", "-c", "trap 'exit $?' TERM\nrun"], ["HF_TOKEN"])
    assert TOKEN not in out
    assert burnish(capsys, *args, f"--dry-run-out={tmp_path / 'plan'}") == (0, "", "")
    assert (tmp_path / "plan").read_text() == out
    code, _, err = burnish(capsys, *args, f"--dry-run-out={tmp_path / 'plan' / 'x'}")
    assert (code, err.split(":")[1].split("=")[0].strip()) == (1, "--dry-run-out")
    assert LocalBackend().list() == []


def test_a_token_in_the_command_is_refused_before_anything_is_made(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, out, err = burnish(capsys, "submit", "--name=n", *QUICK, f"--command=to_maxtext hf_access_token={TOKEN}")
    assert (code, out) == (1, "")
    assert TOKEN not in err
    assert "--command holds the value of HF_TOKEN" in err
    assert not (tmp_path / "state").exists()


def test_job_commands_import_nothing_heavy():
    script = (
        "import sys\nfrom burnish.cli.main import main\n"
        "try: main(['job', 'list', '--backend=local'])\nexcept SystemExit as e: assert not e.code, e.code\n"
        "heavy = [m for m in ('jax', 'transformers', 'numpy', 'kubernetes', 'google.cloud') if m in sys.modules]\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env={**os.environ})
