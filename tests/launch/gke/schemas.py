"""The JobSet CRD as a JSON Schema (Draft 7), as an independent judge of the manifests.

The CRDs are not in the repository: they are looked for in $BURNISH_FIXTURES/crds, or shared/data/crds beside it.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

CRDS = Path(os.environ.get("BURNISH_FIXTURES", Path(__file__).parents[4] / "shared" / "data")) / "crds"
JOBSET_VERSIONS = ("v0.10.1", "v0.12.0")
ABSENT = f"the JobSet CRDs are not in {CRDS}; BURNISH_FIXTURES names the folder that has crds/"


def crds_present() -> bool:
    return all(_jobset_file(version).is_file() for version in JOBSET_VERSIONS)


def _jobset_file(version: str) -> Path:
    return CRDS / f"jobset-{version}" / "jobset.x-k8s.io_jobsets.json"


@cache
def jobset_validator(version: str) -> jsonschema.Draft7Validator:
    definition = json.loads(_jobset_file(version).read_text())
    return jsonschema.Draft7Validator(_draft7(definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))


def jobset_errors(manifest: dict[str, Any], version: str) -> list[str]:
    """What the CRD's schema says against the manifest, as 'path: message'; a key that it does not know is an error."""
    errors = jobset_validator(version).iter_errors(manifest)
    return [f"{'.'.join(str(part) for part in error.absolute_path)}: {error.message}" for error in errors]


def _draft7(schema: Any) -> Any:
    """An OpenAPI v3 structural schema as JSON Schema: int-or-string, nullable, and no keys but those listed."""
    if isinstance(schema, list):
        return [_draft7(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    converted = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties"):
            converted[key] = {name: _draft7(item) for name, item in value.items()}
        elif not key.startswith("x-kubernetes-") and key not in ("nullable", "description", "default", "example"):
            converted[key] = value if key in ("enum", "required") else _draft7(value)
    if schema.get("x-kubernetes-int-or-string"):
        converted["type"] = ["integer", "string"]
        converted.pop("anyOf", None)
    if schema.get("nullable") and "type" in converted:
        kinds = converted["type"]
        converted["type"] = [*(kinds if isinstance(kinds, list) else [kinds]), "null"]
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        converted.setdefault("additionalProperties", False)
    return converted
