"""Groups of options of the `burnish job` commands.

Here is only what each option is called, its type and its meaning; what makes a job valid is checked by
launch.job.JobSpec, so that the same errors meet whoever makes one.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, model_validator

from burnish.config.fields import Options, assigned, option
from burnish.config.groups import TextList

Assignments = Annotated[dict[str, str], BeforeValidator(assigned)]
_DURATION = "such as 30s, 10m, 24h or 1h30m"


class JobOutputOptions(Options):
    section: ClassVar[str] = "Output"

    output: Literal["text", "json"] = option("text", "How the answer is printed", short="o")


class JobPlaceOptions(JobOutputOptions):
    """Which jobs a command speaks of."""

    section: ClassVar[str] = "Where"

    backend: Literal["gke", "local"] | None = option(
        None,
        "What runs the job: gke a cluster, local this machine's own processes",
        default_words="what `burnish job config set` says, or gke",
    )
    project: str | None = option(None, "Google Cloud project", default_words="what `burnish job config set` says")
    cluster: str | None = option(None, "Name of the cluster", default_words="what `burnish job config set` says")
    location: str | None = option(
        None, "Region or zone of the cluster", default_words="what `burnish job config set` says"
    )
    namespace: str | None = option(
        None, "Kubernetes namespace of the job", default_words="what `burnish job config set` says, or default"
    )


class JobNameOptions(JobPlaceOptions):
    section: ClassVar[str] = "Job"

    name: str = option(..., "Name of the job", short="n")


class JobDescriptionOptions(Options):
    section: ClassVar[str] = "Job"

    name: str = option(
        ...,
        "Name of the job: a lower-case letter, then lower-case letters, digits and '-', 28 characters at most, 22 "
        "with pathways",
        short="n",
    )
    command: str = option(
        "", "What each host runs, as one text for bash", default_words="required, but with pathways_headless"
    )
    image: str | None = option(
        None, "Container image that the command runs in; on this machine its own programs", default_words="none"
    )


class JobHostsOptions(Options):
    section: ClassVar[str] = "Hosts"

    compute_type: str = option(
        ...,
        "Machine type of a host (ct6e-standard-4t has 4 chips), a TPU type (v6e-32), or for a job without TPUs a CPU "
        "machine type (e2-standard-8)",
    )
    topology: str | None = option(
        None, "Shape of a slice in chips, such as 4x8", default_words="that of the TPU type, if one is given"
    )
    num_slices: int = option(1, "Slices, each of the same shape", unit="slices")


class JobEnvironmentOptions(Options):
    section: ClassVar[str] = "Environment"

    env: Assignments = option({}, "Environment variable of the command", default_words="none", repeatable=True)
    env_file: str | None = option(
        None,
        "File of NAME=VALUE lines that become environment variables and are kept secret: never in the command, the "
        "manifest or what list and describe print",
        default_words="none",
    )
    secret_env: TextList = option(
        (),
        "Name of a variable of your own environment that the job gets and that is kept secret; HF_TOKEN always is, "
        "where you have it",
        default_words="HF_TOKEN",
        repeatable=True,
    )
    mount: TextList = option(
        (),
        "What the command sees as a directory: gs://bucket/directory:/path, /directory:/path of the node, or "
        "claim:/path, and :ro after it for reading only",
        default_words="none",
        repeatable=True,
    )
    verbose: bool = option(False, "Let the TPU runtime log what it does")


class JobEndOptions(Options):
    section: ClassVar[str] = "Ends and restarts"

    restarts: int = option(1, "How often the whole job is started anew when a host fails", unit="restarts")
    restart_on_exit_codes: TextList = option(
        (),
        "Exit codes that restart the job, separated by commas; any other fails it at once",
        default_words="whatever the code",
        repeatable=True,
    )
    gke_ttl_after_finished: str = option("1h", f"How long a finished job and its logs are kept, {_DURATION}")
    grace_period: str = option("30s", f"Time between SIGTERM and SIGKILL when a host is stopped, {_DURATION}")
    timeout: str | None = option(
        None, f"How long one attempt may run; then the job has failed, {_DURATION}", default_words="no limit"
    )
    await_job_completion: bool = option(
        False, "Wait until the job has ended, say what happens meanwhile, and exit with its exit code"
    )
    await_timeout: str | None = option(
        None,
        f"How long await_job_completion waits, {_DURATION}; the job goes on",
        default_words="no limit",
    )


class JobClusterObjectsOptions(Options):
    section: ClassVar[str] = "Cluster objects"

    queue: str | None = option(
        None, "Kueue's local queue that admits the job", default_words="none: it starts at once, or the cluster's own"
    )
    priority: str | None = option(None, "Priority class of the job", default_words="none")
    node_constraint: Assignments = option({}, "Label that a node needs to have", default_words="none", repeatable=True)
    image_pull_secret: str | None = option(None, "Secret with the credentials of a private image", default_words="none")
    service_account: str | None = option(
        None, "Kubernetes service account of the job", default_words="the namespace's own"
    )


class JobPathwaysOptions(Options):
    section: ClassVar[str] = "Pathways"

    pathways: bool = option(False, "One controller for all hosts: the command runs once, on a CPU node")
    pathways_gcs_location: str | None = option(
        None,
        "Directory of a bucket for Pathways' own files, such as gs://bucket/pathways/",
        default_words="none; required with pathways",
    )
    pathways_proxy_args: TextList = option((), "Argument added to the proxy's", default_words="none", repeatable=True)
    pathways_server_args: TextList = option(
        (), "Argument added to the resource manager's", default_words="none", repeatable=True
    )
    pathways_worker_args: TextList = option((), "Argument added to the workers'", default_words="none", repeatable=True)
    pathways_proxy_env: Assignments = option(
        {}, "Environment variable of the proxy", default_words="none", repeatable=True
    )
    pathways_server_env: Assignments = option(
        {}, "Environment variable of the resource manager", default_words="none", repeatable=True
    )
    pathways_worker_env: Assignments = option(
        {}, "Environment variable of the workers", default_words="none", repeatable=True
    )
    pathways_proxy_image: str | None = option(None, "Image of the proxy", default_words="Pathways' latest")
    pathways_server_image: str | None = option(None, "Image of the resource manager", default_words="Pathways' latest")
    pathways_worker_image: str | None = option(None, "Image of the workers", default_words="Pathways' latest")
    pathways_head_np: str | None = option(
        None, "Node pool of the head", default_words="any CPU node that is large enough"
    )
    pathways_headless: bool = option(False, "Run no command: the proxy waits for a client from outside")
    pathways_proxy_cpu: str = option("16", "CPUs that the proxy asks for")
    pathways_proxy_memory: str = option("100Gi", "Memory that the proxy asks for")
    pathways_server_cpu: str = option("8", "CPUs that the resource manager asks for")
    pathways_server_memory: str = option("32Gi", "Memory that the resource manager asks for")

    @model_validator(mode="after")
    def _pathways_is_asked_for(self) -> Self:
        given = sorted(name for name in self.model_fields_set if name.startswith("pathways_"))
        if given and not self.pathways:
            raise ValueError(f"--{given[0].replace('_', '-')} says how Pathways runs; give --pathways, too")
        if self.pathways and not self.pathways_gcs_location:
            raise ValueError(
                "--pathways needs --pathways-gcs-location: a directory of a bucket such as gs://bucket/pathways/"
            )
        return self


class JobDryRunOptions(JobPlaceOptions):
    section: ClassVar[str] = "Output"

    dry_run: bool = option(False, "Print what would be sent or started, and do neither")
    dry_run_out: str | None = option(
        None, "File that this is written to in place of the terminal; implies dry_run", default_words="none"
    )
