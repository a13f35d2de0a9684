"""The `restricted` Pod Security Standard: what is rendered by default, and what of a pod breaks it."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_operator.manifests.base import Manifest

USER = 1000
"""User and group of all processes; volumes belong to the group."""
POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
CONTAINER_LISTS = ("initContainers", "containers")

_VOLUMES = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
)
_SYSCTLS = (
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    "net.ipv4.tcp_keepalive_probes",
)


def breaches(pod: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each field of a pod's spec that the standard forbids, as its path and what it asks for instead."""
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field, "false"
    for volume in _mappings(pod.get("volumes")):
        for kind in sorted(set(volume) - _VOLUMES - {"name"}):
            yield f"volumes[{volume.get('name')}].{kind}", f"one of {', '.join(sorted(_VOLUMES))}"
    context = _mapping(pod.get("securityContext"))
    yield from _context_breaches("securityContext", context)
    for sysctl in _mappings(context.get("sysctls")):
        if sysctl.get("name") not in _SYSCTLS:
            yield f"securityContext.sysctls[{sysctl.get('name')}]", "a safe sysctl"
    for field, value in (("runAsNonRoot", True), ("seccompProfile", POD_SECURITY["seccompProfile"])):
        if field not in context:
            yield f"securityContext.{field}", str(value)
    for name in CONTAINER_LISTS:
        for container in _mappings(pod.get(name)):
            yield from _container_breaches(f"{name}[{container.get('name')}]", container)


def _container_breaches(path: str, container: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    context, path_of = _mapping(container.get("securityContext")), f"{path}.securityContext"
    yield from _context_breaches(path_of, context)
    if context.get("privileged"):
        yield f"{path_of}.privileged", "false"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{path_of}.allowPrivilegeEscalation", "false"
    capabilities = _mapping(context.get("capabilities"))
    if "ALL" not in _list(capabilities.get("drop")):
        yield f"{path_of}.capabilities.drop", "[ALL]"
    if any(added != "NET_BIND_SERVICE" for added in _list(capabilities.get("add"))):
        yield f"{path_of}.capabilities.add", "NET_BIND_SERVICE at most"
    if context.get("procMount", "Default") != "Default":
        yield f"{path_of}.procMount", "Default"
    for port in _mappings(container.get("ports")):
        if port.get("hostPort"):
            yield f"{path}.ports[{port.get('name', port.get('containerPort'))}].hostPort", "none"
    for hook, action in _handlers(container):
        if _mapping(action).get("host"):
            yield f"{path}.{hook}.host", "none"


def _handlers(container: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What is called of a container: probes and hooks of its life, whose `host` must be its own."""
    hooks = {f"lifecycle.{name}": hook for name, hook in _mapping(container.get("lifecycle")).items()}
    probes = {name: container.get(name) for name in ("livenessProbe", "readinessProbe", "startupProbe")}
    for name, handler in (hooks | probes).items():
        for kind in ("httpGet", "tcpSocket"):
            yield f"{name}.{kind}", _mapping(handler).get(kind)


def _context_breaches(path: str, context: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the security contexts of pods and containers have in common."""
    if context.get("runAsNonRoot", True) is not True:
        yield f"{path}.runAsNonRoot", "true"
    if context.get("runAsUser", USER) == 0:
        yield f"{path}.runAsUser", "a user other than 0"
    profile = _mapping(context.get("seccompProfile", POD_SECURITY["seccompProfile"])).get("type")
    if profile not in ("RuntimeDefault", "Localhost"):
        yield f"{path}.seccompProfile.type", "RuntimeDefault or Localhost"
    if _mapping(context.get("appArmorProfile")).get("type", "RuntimeDefault") not in ("RuntimeDefault", "Localhost"):
        yield f"{path}.appArmorProfile.type", "RuntimeDefault or Localhost"
    if _mapping(context.get("windowsOptions")).get("hostProcess"):
        yield f"{path}.windowsOptions.hostProcess", "false"
    labels = _mapping(context.get("seLinuxOptions"))
    types = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
    if labels.get("type", "") not in types or labels.get("user") or labels.get("role"):
        yield f"{path}.seLinuxOptions", "a container's type, and neither user nor role"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in _list(value) if isinstance(item, dict)]
