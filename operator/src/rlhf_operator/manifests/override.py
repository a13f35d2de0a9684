"""A user's override of a pod template, laid over ours as far as the operator need not decide itself."""

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_api import FieldError, SpecError

from rlhf_operator.kuberay import POD_LABELS
from rlhf_operator.manifests.base import Manifest
from rlhf_operator.manifests.merge import merge
from rlhf_operator.manifests.ports import HEAD_PORTS
from rlhf_operator.manifests.security import CONTAINER_LISTS, CONTAINER_SECURITY, breaches
from rlhf_operator.pod_layout import CODE_VOLUME, CONFIG_VOLUME, LAST_WORDS, MOUNTS, RESERVED_ENV
from rlhf_operator.volumes import below

_METADATA = ("labels", "annotations")
_POD_FIELDS = {
    "restartPolicy": "a head must not start again blank, and KubeRay sets that of workers",
    "automountServiceAccountToken": "no credentials of the cluster go to the pods",
    "nodeName": "the scheduler places pods: use nodeSelector or affinity",
    "ephemeralContainers": "they are for pods that run",
}
"""Fields of a pod that stay as they are, and why."""
_TOKEN = "serviceAccountToken"
"""Source of a projected volume that would hold such credentials."""
_RESOURCES = {"cpu": "`cpu`", "memory": "`memory`"}


def overridden(template: Manifest, override: Mapping[str, Any] | None, path: str) -> Manifest:
    """A pod template with a user's override over it. Containers that it adds get our security context, and if they fail
    and say nothing else, the end of what they wrote is their message.

    Raises:
        SpecError: with every part of it that the operator must decide itself, or that breaks the security standard.
    """
    template = copy.deepcopy(template)
    if not override:
        return template
    ours = template["metadata"]["labels"]
    override = json.loads(json.dumps(override))  # as the API server has it: every key a text
    errors = list(_foreign(override, path))
    if not errors:
        template = merge(template, override, path, errors)
    if not errors:
        _complete(template["spec"])
        errors = [
            FieldError(
                f"{path}.spec.{field}", "what the restricted Pod Security Standard forbids", expected, "remove it"
            )
            for field, expected in breaches(template["spec"])
        ]
        errors += _decided(override.get("spec", {}), template, f"{path}.spec")
        errors += _labels(override.get("metadata", {}).get("labels", {}), ours, f"{path}.metadata.labels")
    if errors:
        raise SpecError(errors)
    return template


def _foreign(override: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    """Fields beside what a pod template's override may have."""
    levels = [(path, override, ("metadata", "spec")), (f"{path}.metadata", override.get("metadata"), _METADATA)]
    for here, mapping, known in levels:
        if mapping is not None and not isinstance(mapping, dict):
            yield FieldError(here, "no mapping", "a mapping", "indent its fields below it")
        for key in mapping if isinstance(mapping, dict) else ():
            if key not in known:
                yield FieldError(f"{here}.{key}", f"`{key}`", f"one of {', '.join(known)}", "remove it")


def _complete(pod: Manifest) -> None:
    """Give every container what it does not set itself: of our security context, and where its last words come from."""
    for name in CONTAINER_LISTS:
        for container in pod.get(name, ()):
            given = container.get("securityContext")
            if given is None or isinstance(given, dict):
                container["securityContext"] = {**copy.deepcopy(CONTAINER_SECURITY), **(given or {})}
            container.setdefault("terminationMessagePolicy", LAST_WORDS)


def _decided(override: Mapping[str, Any], template: Manifest, path: str) -> Iterator[FieldError]:
    """What an override may not touch, since the operator's own arithmetic, credentials or files depend on it."""
    for field, why in _POD_FIELDS.items():
        if field in override:
            yield FieldError(f"{path}.{field}", f"`{field}`", f"none: {why}", "remove it")
    ours = template["spec"]["containers"][0]
    yield from _volumes(override, path)
    for name in CONTAINER_LISTS:
        for index, container in enumerate(override.get(name, ())):
            here = f"{path}.{name}[{index}]"
            yield from _variables(container, here)
            if name == "containers" and container["name"] == ours["name"]:
                yield from _ray_container(container, here)


def _labels(given: Mapping[str, Any], ours: Mapping[str, str], path: str) -> Iterator[FieldError]:
    for key in given:
        if key in ours or key in POD_LABELS:
            fix = "choose another, or remove it"
            yield FieldError(f"{path}.{key}", f"`{key}`", "another label: the operator and KubeRay set this one", fix)


def _volumes(override: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    for index, volume in enumerate(override.get("volumes", ())):
        here = f"{path}.volumes[{index}]"
        if volume["name"] in (CONFIG_VOLUME, CODE_VOLUME):
            expected = "another name: the operator mounts this one"
            yield FieldError(f"{here}.name", f"`{volume['name']}`", expected, "choose another")
        projected = volume.get("projected")
        sources = projected.get("sources") if isinstance(projected, dict) else None
        for number, source in enumerate(sources if isinstance(sources, list) else ()):
            if isinstance(source, dict) and _TOKEN in source:
                expected = f"none: {_POD_FIELDS['automountServiceAccountToken']}"
                yield FieldError(f"{here}.projected.sources[{number}].{_TOKEN}", f"`{_TOKEN}`", expected, "remove it")


def _variables(container: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    for index, variable in enumerate(container.get("env", ())):
        if variable["name"] in RESERVED_ENV:
            expected = "another variable: the operator and KubeRay set this one"
            yield FieldError(f"{path}.env[{index}].name", f"`{variable['name']}`", expected, "remove it")


def _ray_container(container: Mapping[str, Any], path: str) -> Iterator[FieldError]:
    for index, mount in enumerate(container.get("volumeMounts", ())):
        if any(below(own, mount["mountPath"]) is not None for own in MOUNTS.values()):
            expected = "another path: to have other storage there, replace the volume by its name"
            yield FieldError(
                f"{path}.volumeMounts[{index}].mountPath", f"`{mount['mountPath']}`", expected, "remove it"
            )
    for index, port in enumerate(container.get("ports", ())):
        if any(port["name"] == own.name or port.get("containerPort") == own.number for own in HEAD_PORTS):
            fix = "choose another name and number"
            yield FieldError(f"{path}.ports[{index}]", f"`{port['name']}`", "a port that Ray does not have", fix)
    resources = container.get("resources")
    for kind in ("requests", "limits"):
        amounts = resources.get(kind) if isinstance(resources, dict) else None
        for name in amounts if isinstance(amounts, dict) else ():
            if (kind, name) == ("requests", "cpu"):  # the scheduler's alone: Ray reckons with what the pool offers
                continue
            if name in _RESOURCES or "/" in name:
                expected = "what the planner does not reckon with, such as ephemeral-storage or hugepages-2Mi"
                fix = f"use the pool's {_RESOURCES.get(name, '`gpusPerNode`, `gpuResource` or `rdma`')}"
                yield FieldError(f"{path}.resources.{kind}.{name}", f"`{name}`", expected, fix)
