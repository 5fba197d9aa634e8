"""The parts of Kubernetes objects that burnish writes: one frozen model per kind, one field per key.

Only what is emitted is here, so a misspelt key is an error of construction and not a key that the API server drops
without a word. Fields are the API's names in snake case; `manifest` gives the JSON of the API. Objects that are read
back from a cluster stay plain JSON: a server may add any key to them.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Labels = dict[str, str]


class KubernetesObject(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, frozen=True, extra="forbid")

    def manifest(self) -> dict[str, Any]:
        """The object as the API's JSON; keys that have no value are left out."""
        return self.model_dump(by_alias=True, exclude_none=True, mode="json")


class OwnerReference(KubernetesObject):
    api_version: str
    kind: str
    name: str
    uid: str


class Metadata(KubernetesObject):
    name: str | None = None
    namespace: str | None = None
    labels: Labels | None = None
    annotations: Labels | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class FieldRef(KubernetesObject):
    field_path: str


class SecretKeyRef(KubernetesObject):
    name: str
    key: str


class EnvSource(KubernetesObject):
    field_ref: FieldRef | None = None
    secret_key_ref: SecretKeyRef | None = None


class EnvVar(KubernetesObject):
    name: str
    value: str | None = None
    value_from: EnvSource | None = None


class ContainerPort(KubernetesObject):
    container_port: int


class VolumeMount(KubernetesObject):
    name: str
    mount_path: str
    read_only: bool | None = None


class Resources(KubernetesObject):
    requests: Labels | None = None
    limits: Labels | None = None


class Container(KubernetesObject):
    name: str
    image: str
    command: tuple[str, ...] | None = None
    args: tuple[str, ...] | None = None
    env: tuple[EnvVar, ...] | None = None
    ports: tuple[ContainerPort, ...] | None = None
    resources: Resources | None = None
    volume_mounts: tuple[VolumeMount, ...] | None = None
    restart_policy: Literal["Always"] | None = None  # of an init container that runs beside the others


class CsiVolume(KubernetesObject):
    driver: str
    read_only: bool | None = None
    volume_attributes: Labels


class HostPathVolume(KubernetesObject):
    path: str


class ClaimVolume(KubernetesObject):
    claim_name: str
    read_only: bool | None = None


class EmptyDirVolume(KubernetesObject):
    medium: Literal["Memory"] | None = None


class Volume(KubernetesObject):
    name: str
    csi: CsiVolume | None = None
    host_path: HostPathVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    empty_dir: EmptyDirVolume | None = None


class Toleration(KubernetesObject):
    key: str
    operator: Literal["Exists", "Equal"]
    value: str | None = None
    effect: str | None = None


class LocalObjectReference(KubernetesObject):
    name: str


class PodSpec(KubernetesObject):
    restart_policy: Literal["Never", "OnFailure"]
    termination_grace_period_seconds: int
    containers: tuple[Container, ...]
    init_containers: tuple[Container, ...] | None = None
    host_network: bool | None = None
    dns_policy: Literal["ClusterFirst", "ClusterFirstWithHostNet"] | None = None
    node_selector: Labels | None = None
    tolerations: tuple[Toleration, ...] | None = None
    volumes: tuple[Volume, ...] | None = None
    image_pull_secrets: tuple[LocalObjectReference, ...] | None = None
    service_account_name: str | None = None
    priority_class_name: str | None = None


class PodTemplate(KubernetesObject):
    metadata: Metadata
    spec: PodSpec


class OnExitCodes(KubernetesObject):
    container_name: str
    operator: Literal["In", "NotIn"]
    values: tuple[int, ...]


class OnPodCondition(KubernetesObject):
    type: str
    status: Literal["True", "False"]


class PodFailureRule(KubernetesObject):
    action: Literal["FailJob", "Count"]
    on_exit_codes: OnExitCodes | None = None
    on_pod_conditions: tuple[OnPodCondition, ...] | None = None


class PodFailurePolicy(KubernetesObject):
    rules: tuple[PodFailureRule, ...]


class JobSpecification(KubernetesObject):
    parallelism: int
    completions: int
    backoff_limit: int
    completion_mode: Literal["Indexed"]
    active_deadline_seconds: int | None = None
    pod_failure_policy: PodFailurePolicy | None = None
    template: PodTemplate


class JobTemplate(KubernetesObject):
    metadata: Metadata | None = None
    spec: JobSpecification


class ReplicatedJob(KubernetesObject):
    name: str
    replicas: int
    template: JobTemplate


class Network(KubernetesObject):
    enable_dns_hostnames: bool = Field(serialization_alias="enableDNSHostnames")
    publish_not_ready_addresses: bool
    subdomain: str


class SuccessPolicy(KubernetesObject):
    operator: Literal["All", "Any"]
    target_replicated_jobs: tuple[str, ...] | None = None


class StartupPolicy(KubernetesObject):
    startup_policy_order: Literal["AnyOrder", "InOrder"]


class FailureRule(KubernetesObject):
    name: str
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    on_job_failure_reasons: tuple[str, ...] | None = None
    target_replicated_jobs: tuple[str, ...] | None = None


class FailurePolicy(KubernetesObject):
    max_restarts: int
    restart_strategy: Literal["Recreate", "BlockingRecreate"]
    rules: tuple[FailureRule, ...] | None = None


class Coordinator(KubernetesObject):
    replicated_job: str
    job_index: int
    pod_index: int


class JobSetSpecification(KubernetesObject):
    replicated_jobs: tuple[ReplicatedJob, ...]
    network: Network
    success_policy: SuccessPolicy
    startup_policy: StartupPolicy
    failure_policy: FailurePolicy
    coordinator: Coordinator | None = None
    suspend: bool | None = None
    ttl_seconds_after_finished: int | None = None


class JobSet(KubernetesObject):
    api_version: Literal["jobset.x-k8s.io/v1alpha2"] = "jobset.x-k8s.io/v1alpha2"
    kind: Literal["JobSet"] = "JobSet"
    metadata: Metadata
    spec: JobSetSpecification


class Secret(KubernetesObject):
    api_version: Literal["v1"] = "v1"
    kind: Literal["Secret"] = "Secret"
    metadata: Metadata
    type: Literal["Opaque"] = "Opaque"
    string_data: dict[str, str] = Field(repr=False)
