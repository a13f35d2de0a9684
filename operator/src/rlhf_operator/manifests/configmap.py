"""The ConfigMap that the driver reads its RuntimeConfig from."""

from rlhf_api import FieldError, RuntimeConfig, SpecError

from rlhf_operator.manifests.base import Manifest, Place, metadata
from rlhf_operator.pod_layout import RUNTIME_FILE

MOST_BYTES = 2**20
"""What the API server lets a ConfigMap hold."""


def config_map(place: Place, config: RuntimeConfig) -> Manifest:
    """The ConfigMap of a cluster.

    Raises:
        SpecError: when the config is larger than a ConfigMap may be.
    """
    text = config.model_dump_json(by_alias=True, indent=2) + "\n"
    if (size := len(text.encode())) > MOST_BYTES:
        got, expected = f"{size:,} bytes of RuntimeConfig", f"at most {MOST_BYTES:,}, which a ConfigMap holds"
        fix = "move inline prompts into a file on a storage"
        raise SpecError([FieldError("spec.data.prompts.inline", got, expected, fix)])
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(place), "data": {RUNTIME_FILE: text}}
