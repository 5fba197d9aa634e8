"""The functions of `burnish job`: options become a JobSpec, a backend runs it, and what it says is printed.

Answers go to standard output as text or JSON; what happens while one waits goes to standard error, so that it never
stands between the answer's lines.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from burnish.config.jobs import JobPlaceOptions
from burnish.config.schema import (
    JobConfigListConfig,
    JobConfigSetConfig,
    JobListConfig,
    JobLogsConfig,
    JobNameConfig,
    JobSubmitConfig,
)
from burnish.launch.answers import json_text, yaml_text
from burnish.launch.backend import Backend, open_backend
from burnish.launch.errors import LaunchError
from burnish.launch.job import (
    ENV_NAME,
    HF_TOKEN,
    Event,
    JobSpec,
    JobStatus,
    PathwaysSpec,
    parse_assignment,
    parse_duration,
    parse_mount,
)
from burnish.launch.settings import KEYS, load_settings, save_setting
from burnish.observe.files import write_whole
from burnish.text import decode


def config_set(cfg: JobConfigSetConfig) -> None:
    settings = save_setting(cfg.key, cfg.value)
    words = f"{cfg.key} {cfg.value}" if cfg.value else f"{cfg.key} is not set any more"
    _print(asdict(settings) if cfg.output == "json" else words)


def config_list(cfg: JobConfigListConfig) -> None:
    values = asdict(load_settings())
    _print(values if cfg.output == "json" else _table([(key, value or "") for key, value in values.items()]))


def submit(cfg: JobSubmitConfig) -> None:
    """Starts the job, and waits for its end where that is asked for. Raises LaunchError, with the job's exit code
    where it has failed."""
    spec, backend = spec_of(cfg, os.environ), _backend(cfg)
    if cfg.dry_run or cfg.dry_run_out:
        _show_plan(backend.plan(spec), cfg)
        return
    timeout = None if cfg.await_timeout is None else parse_duration(cfg.await_timeout, "--await-timeout")
    status = backend.submit(spec)
    if not cfg.await_job_completion:
        _print(_status_values(status) if cfg.output == "json" else f"job {status.name} is {status.state}")
        return
    try:
        code = backend.wait(spec.name, timeout=timeout, on_event=_show_event)
    except KeyboardInterrupt:
        print(f"no longer waiting; the job goes on: {_command_line('cancel', cfg)} ends it", file=sys.stderr)
        raise
    status = backend.status(spec.name)
    if cfg.output == "json":
        _print(_status_values(status))
    elif not code:
        _print(f"job {status.name} has succeeded")
    if code:
        reason = f": {status.reason}" if status.reason else ""
        words = f"job {status.name} is {status.state}{reason}; {_command_line('logs', cfg)} shows its output"
        raise LaunchError(words, exit_code=code)


def list_jobs(cfg: JobListConfig) -> None:
    jobs = [
        status
        for status in _backend(cfg).list()
        if cfg.name_contains in status.name and cfg.status in (None, status.state)
    ]
    if cfg.output == "json":
        _print([_status_values(status) for status in jobs])
        return
    rows = [("NAME", "STATUS", "CREATION_TIME", "COMPLETION_TIME", "RESTARTS", "REASON")]
    for status in jobs:
        times = (_time(status.created), _time(status.completed))
        rows.append((status.name, status.state, *times, str(status.restarts), status.reason))
    _print(_table(rows))


def logs(cfg: JobLogsConfig) -> None:
    for line in _backend(cfg).logs(cfg.name, follow=cfg.follow, main_only=cfg.main_only):
        if cfg.output == "json":
            print(json.dumps(asdict(line), ensure_ascii=False), flush=cfg.follow)
        else:
            print(line.text if cfg.main_only else f"[{line.host}] {line.text}", flush=cfg.follow)


def describe(cfg: JobNameConfig) -> None:
    _print_values(_backend(cfg).describe(cfg.name), cfg)


def inspect(cfg: JobNameConfig) -> None:
    _print_values(_backend(cfg).inspect(cfg.name), cfg)


def cancel(cfg: JobNameConfig) -> None:
    status = _backend(cfg).cancel(cfg.name)
    _print(_status_values(status) if cfg.output == "json" else f"job {status.name} is {status.state}; its name is free")


def spec_of(cfg: JobSubmitConfig, environment: Mapping[str, str]) -> JobSpec:
    """The job that the options describe; `environment` is the submitter's own, from which secrets are taken.

    Raises LaunchError, naming the flag.
    """
    return JobSpec(
        name=cfg.name,
        command=cfg.command,
        compute_type=cfg.compute_type,
        topology=cfg.topology,
        num_slices=cfg.num_slices,
        image=cfg.image,
        env=cfg.env,
        secret_env=_secrets(cfg, environment),
        mounts=tuple(map(parse_mount, cfg.mount)),
        queue=cfg.queue,
        priority=cfg.priority,
        restarts=cfg.restarts,
        restart_on_exit_codes=_exit_codes(cfg.restart_on_exit_codes),
        ttl_seconds=parse_duration(cfg.gke_ttl_after_finished, "--gke-ttl-after-finished"),
        grace_seconds=parse_duration(cfg.grace_period, "--grace-period"),
        timeout_seconds=None if cfg.timeout is None else parse_duration(cfg.timeout, "--timeout"),
        node_constraints=cfg.node_constraint,
        image_pull_secret=cfg.image_pull_secret,
        service_account=cfg.service_account,
        verbose=cfg.verbose,
        pathways=_pathways(cfg),
    )


def _pathways(cfg: JobSubmitConfig) -> PathwaysSpec | None:
    if not cfg.pathways:
        return None
    assert cfg.pathways_gcs_location is not None  # checked with the options
    images = {
        "proxy_image": cfg.pathways_proxy_image,
        "server_image": cfg.pathways_server_image,
        "worker_image": cfg.pathways_worker_image,
    }
    return PathwaysSpec(
        gcs_location=cfg.pathways_gcs_location,
        proxy_args=cfg.pathways_proxy_args,
        server_args=cfg.pathways_server_args,
        worker_args=cfg.pathways_worker_args,
        proxy_env=cfg.pathways_proxy_env,
        server_env=cfg.pathways_server_env,
        worker_env=cfg.pathways_worker_env,
        head_node_pool=cfg.pathways_head_np,
        headless=cfg.pathways_headless,
        proxy_cpu=cfg.pathways_proxy_cpu,
        proxy_memory=cfg.pathways_proxy_memory,
        server_cpu=cfg.pathways_server_cpu,
        server_memory=cfg.pathways_server_memory,
        **{name: image for name, image in images.items() if image is not None},
    )


def _secrets(cfg: JobSubmitConfig, environment: Mapping[str, str]) -> dict[str, str]:
    secrets = {}
    if environment.get("HF_TOKEN") and "HF_TOKEN" not in cfg.env:
        secrets["HF_TOKEN"] = environment["HF_TOKEN"]
    if cfg.env_file is not None:
        secrets |= read_env_file(cfg.env_file)
    for name in cfg.secret_env:
        if "=" in name or HF_TOKEN.search(name):
            raise LaunchError("--secret-env takes the name of a variable of your environment, not its value")
        if name not in environment:
            raise LaunchError(f"--secret-env={name}: there is no such variable in your environment")
        secrets[name] = environment[name]
    return secrets


def read_env_file(path: str) -> dict[str, str]:
    """The variables in a file of NAME=VALUE lines. Empty lines and those that begin with # are left out; `export`
    before a name and quotes around a value are taken off. Raises LaunchError with the number of the line and without
    its content."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise LaunchError(f"--env-file={path}: cannot be read: {error.strerror}") from None
    variables = {}
    for number, line in enumerate(decode(data, path, LaunchError).split("\n"), start=1):
        line = line.strip().removeprefix("export ").lstrip()
        if not line or line.startswith("#"):
            continue
        name, value = parse_assignment(line, f"--env-file={path}: line {number}")
        name, value = name.rstrip(), value.strip()
        if not ENV_NAME.fullmatch(name):  # it may be a part of a secret of several lines
            raise LaunchError(
                f"--env-file={path}: line {number}: expected NAME=VALUE in one line, the name of letters, digits and "
                "_, no digit first"
            )
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        variables[name] = value
    return variables


def _exit_codes(given: tuple[str, ...]) -> tuple[int, ...]:
    texts = [text.strip() for item in given for text in item.split(",")]
    for text in texts:
        if not re.fullmatch(r"\d{1,3}", text):
            raise LaunchError(f"--restart-on-exit-codes={text}: expected exit codes such as 75,137")
    return tuple(dict.fromkeys(map(int, texts)))


def _backend(cfg: JobPlaceOptions) -> Backend:
    return open_backend(
        load_settings().override(
            backend=cfg.backend,
            project=cfg.project,
            cluster=cfg.cluster,
            location=cfg.location,
            namespace=cfg.namespace,
        )
    )


def _command_line(verb: str, cfg: JobSubmitConfig) -> str:
    """What another command on the same job is typed as: where the job is, is said as it was said here."""
    place = [f"--{key}={getattr(cfg, key)}" for key in KEYS if getattr(cfg, key) is not None]
    return " ".join(["burnish job", verb, cfg.name, *place])


def _show_plan(documents: list[dict[str, Any]], cfg: JobSubmitConfig) -> None:
    text = f"{json_text(documents)}\n" if cfg.output == "json" else yaml_text(*documents)
    if cfg.dry_run_out is None:
        sys.stdout.write(text)
        return
    try:
        write_whole(cfg.dry_run_out, text)
    except OSError as error:
        raise LaunchError(f"--dry-run-out={cfg.dry_run_out}: cannot be written: {error.strerror}") from None


def _show_event(event: Event) -> None:
    print(f"{event.time.astimezone():%H:%M:%S}  {event.text}", file=sys.stderr, flush=True)


def _status_values(status: JobStatus) -> dict[str, Any]:
    values = asdict(status)
    for name in ("created", "completed"):
        values[name] = None if values[name] is None else values[name].isoformat()
    return values


def _time(moment: Any) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%dT%H:%M:%SZ}"


def _print_values(values: dict[str, Any], cfg: JobNameConfig) -> None:
    if cfg.output == "json":
        _print(values)
    else:
        print(yaml_text(values), end="")


def _print(answer: Any) -> None:
    """A text as it is, anything else as JSON."""
    print(answer if isinstance(answer, str) else json_text(answer))


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Left-aligned columns, as wide as their longest entry."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
