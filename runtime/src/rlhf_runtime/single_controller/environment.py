"""Which of the driver's environment variables reach workers.

Reward functions are a user's code, so what is not named here or by a worker class stays with the driver: it may be a
secret. A variable that a worker class names in `env_allow_list` reaches its workers on whatever node.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

LOCAL_NODE = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "XDG_*"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "UV_CACHE_DIR", "UV_PROJECT*", "UV_PYTHON*", "LD_*", "MALLOC_*"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_*", "RAY_*", "RLHF_*"),
    *("SSL_CERT_*", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "*_proxy", "*_PROXY"),
)
"""Patterns of what a Ray node on this machine, and so each of its workers, has of the driver's environment."""


def allowed(environment: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """The variables whose names match a glob pattern, case and all."""
    return {
        name: value for name, value in environment.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
