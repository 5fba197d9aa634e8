"""Jobs and clusters: a job is described once (job.JobSpec) and run by a backend.

`local` runs it as processes of this machine, `gke` as a JobSet on Google Kubernetes Engine; `cloud` makes and
deletes clusters and virtual machines. Nothing here imports jax.
"""
