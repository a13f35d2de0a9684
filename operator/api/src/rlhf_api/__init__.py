"""The contract between the control plane and the data plane.

Both planes import this package and never each other. It depends on pydantic alone, holds no logic that needs a
cluster, a GPU or a file, and is the one place where literal defaults are written down.
"""

from rlhf_api.errors import FieldError, SpecError
from rlhf_api.job import RLHFJob
from rlhf_api.runtime_config import RuntimeConfig
from rlhf_api.spec import RLHFJobSpec

__all__ = ["FieldError", "RLHFJob", "RLHFJobSpec", "RuntimeConfig", "SpecError"]
