"""Labels, ports and names that the manifests and those who read a cluster's answers have in common."""

OWN_LABELS = {"app.kubernetes.io/managed-by": "burnish"}
OWN_SELECTOR = ",".join(f"{key}={value}" for key, value in OWN_LABELS.items())
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
SUBMISSION = "burnish/submission"  # annotation: a word of this submission's own, to know it again

# Labels of a pod by the JobSet and Job controllers.
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"
REPLICATED_JOB_NAME = "jobset.sigs.k8s.io/replicatedjob-name"
REPLICATED_JOB_REPLICAS = "jobset.sigs.k8s.io/replicatedjob-replicas"
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
COORDINATOR = "jobset.sigs.k8s.io/coordinator"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"

EXCLUSIVE_TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"
TPU_ACCELERATOR = "cloud.google.com/gke-tpu-accelerator"
TPU_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
TPU_RESOURCE = "google.com/tpu"

WORKLOAD_CONTAINER = "workload-container"  # runs the command
WORKER_JOB = "worker"  # Pathways' replicated job on the TPU hosts


def secret_name(job: str) -> str:
    """The Secret that holds a job's secret variables."""
    return f"{job}-env"
