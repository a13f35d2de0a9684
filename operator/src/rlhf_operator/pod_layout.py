"""What a job's pods look like inside: folders, volumes and variables that the operator gives them."""

CONFIG_DIR = "/etc/rlhf"
RUNTIME_FILE = "runtime.json"
"""Key of the ConfigMap, and file below `CONFIG_DIR` of the head, that hold the RuntimeConfig."""
CODE_DIR = "/etc/rlhf-code"
"""Where the modules of `spec.code` are mounted."""
SCRATCH_DIR = "/rlhf"
"""A folder to write to, gone with its pod; it is the home folder."""
RUNS_DIR = f"{SCRATCH_DIR}/runs"
"""Run folders of jobs without a storage for checkpoints."""
RUN_FOLDER = "run"
"""The run folder of other jobs, beside their checkpoints."""

CONFIG_VOLUME, CODE_VOLUME, SCRATCH_VOLUME, TMP_VOLUME = "rlhf-config", "rlhf-code", "rlhf-scratch", "rlhf-tmp"
LOGS_VOLUME, SHARED_MEMORY_VOLUME = "ray-logs", "shared-mem"
"""KubeRay's own names: what it finds under them it does not add again, and its autoscaler shares the logs."""

MOUNTS: dict[str, str] = {
    CONFIG_VOLUME: CONFIG_DIR,
    CODE_VOLUME: CODE_DIR,
    SCRATCH_VOLUME: SCRATCH_DIR,
    TMP_VOLUME: "/tmp",
    LOGS_VOLUME: "/tmp/ray",
    SHARED_MEMORY_VOLUME: "/dev/shm",
}
"""Each volume of the operator's own and where it is mounted."""

LAST_WORDS = "FallbackToLogsOnError"
"""A container's `terminationMessagePolicy`: the end of its log says why it failed, where it left no message."""

RESERVED_ENV = frozenset(
    {
        *("RAY_ADDRESS", "RAY_PORT", "RAY_IP", "FQ_RAY_IP", "RAY_CLUSTER_NAME", "RAY_CLUSTER_NAMESPACE"),
        *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_K8S_TOKEN_AUTH"),
        *("RAY_CLOUD_INSTANCE_ID", "RAY_NODE_TYPE_NAME", "RAY_enable_autoscaler_v2", "KUBERAY_GEN_RAY_START_CMD"),
        *("RAY_REDIS_ADDRESS", "REDIS_USERNAME", "REDIS_PASSWORD"),
    }
)
"""Variables that KubeRay and the operator decide: another value breaks the cluster, or its authentication."""
