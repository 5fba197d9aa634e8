"""Jobs on Google Kubernetes Engine: a JobSpec becomes a JobSet, and what the cluster says of it becomes plain words.

Pure parts (objects, manifests, pathways, validate, progress) and parts that talk to the API server through the
official client (api, feeds, logs, backend). Clusters themselves are launch/cloud's.
"""
