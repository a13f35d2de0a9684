"""The Kubernetes API by its paths: the only file that imports the official client.

The client gives credentials and connections; objects stay plain mappings, since a class a kind would cost memory and
drop the fields that it does not know. Calls block: the operator runs them in threads.
"""

import json
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import config
from kubernetes.client import ApiClient, Configuration
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlhf_operator.manifests.names import MANAGER

Object = dict[str, Any]
"""A Kubernetes object as the API server gives it."""
T = TypeVar("T")

PAGE = 100
"""Objects a request of a list: as Python has them, some 0.2 MB each, they are what takes most memory at once."""
ATTEMPTS = 4
"""Tries of a request that the API server could not answer."""
CONNECT_SECONDS, READ_SECONDS = 5.0, 15.0
SERVICE_HOST = "KUBERNETES_SERVICE_HOST"
"""The variable that tells a process that it runs in a pod."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
RETRIED = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True)
class Resource:
    """One kind, as the API server's paths spell it."""

    group: str
    """API group; empty for the core one."""
    version: str
    """Version of the group."""
    plural: str
    """The kind in a path."""
    kind: str
    """The kind in an object."""
    namespaced: bool = True
    """Whether its objects lie in namespaces."""

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """Path of the kind, of all its objects in a namespace, or of one object."""
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        parts += ["namespaces", namespace] if self.namespaced and namespace else []
        parts += [self.plural, *([name] if name else []), *([subresource] if subresource else [])]
        return "/" + "/".join(quote(part, safe="") for part in parts)


RLHFJOBS = Resource("rlhf-operator.io", "v1alpha1", "rlhfjobs", "RLHFJob")
RAYCLUSTERS = Resource("ray.io", "v1", "rayclusters", "RayCluster")
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
NETWORKPOLICIES = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
PODS = Resource("", "v1", "pods", "Pod")
SECRETS = Resource("", "v1", "secrets", "Secret")
EVENTS = Resource("", "v1", "events", "Event")
NODES = Resource("", "v1", "nodes", "Node", namespaced=False)
CRDS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False)
RENDERED = (CONFIGMAPS, NETWORKPOLICIES, RAYCLUSTERS)
"""The kinds that a job's cluster is made of, in the order in which they are applied."""


def resource_of(manifest: Mapping[str, Any]) -> Resource:
    """The resource of a rendered object.

    Raises:
        ValueError: for a kind that is never rendered.
    """
    for resource in RENDERED:
        if resource.kind == manifest["kind"]:
            return resource
    raise ValueError(f"no resource is known for kind {manifest['kind']}")


class KubeError(Exception):
    """A request that the API server refused, with its own words."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status, self.reason, self.message = status, reason, message
        super().__init__(f"{reason} ({status}): {message}" if status else f"{reason}: {message}")


class NotFoundError(KubeError):
    """There is no such object, or no such kind."""


class ConflictError(KubeError):
    """Another wrote in between, owns the field, or has the name."""


class ForbiddenError(KubeError):
    """RBAC, a quota or an admission policy says no."""


class InvalidError(KubeError):
    """The object is not one that the API server takes."""


class UnavailableError(KubeError):
    """The API server did not answer, or not in time, or said that it cannot; more than once."""


ERRORS: dict[int, type[KubeError]] = {
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    422: InvalidError,
    **dict.fromkeys(RETRIED, UnavailableError),
}


class NoClusterError(Exception):
    """There is no kubeconfig, or not one that can be used; the message says why."""


@dataclass(frozen=True)
class Listing(Generic[T]):
    """The objects of a list, and when they were so."""

    items: list[T]
    """What was kept of each."""
    resource_version: str
    """The version of the whole list."""


@dataclass(frozen=True)
class Access:
    """What another HTTP client needs to speak through the API server's proxy."""

    url: str
    """The API server."""
    tls: ssl.SSLContext | bool
    """How it is verified, with the client's own certificate."""
    headers: Callable[[], dict[str, str]]
    """Credentials, fresh at each call."""


class Kube:
    """An API server, with credentials. Safe to use from several threads."""

    def __init__(self, client: ApiClient, namespace: str = "default", in_pod: bool = False) -> None:
        self._client = client
        self._config: Configuration = client.configuration
        self.namespace = namespace
        """The namespace that the credentials name."""
        self.in_pod = in_pod
        """Whether this process runs in a pod of the cluster, where services are reached by their names."""

    @classmethod
    def connect(cls, kubeconfig: str | None = None, context: str | None = None, connections: int = 16) -> "Kube":
        """Find credentials: those of the pod this runs in, unless a kubeconfig or context is named, else a kubeconfig.

        Args:
            kubeconfig: file; by default $KUBECONFIG, then ~/.kube/config.
            context: of the kubeconfig; by default its current one.
            connections: how many calls may run at once.

        Raises:
            NoClusterError: when there are none.
        """
        settings = Configuration()
        in_pod = kubeconfig is None and context is None and SERVICE_HOST in os.environ
        namespace = _load_pod(settings) if in_pod else _load_kubeconfig(settings, kubeconfig, context)
        settings.connection_pool_maxsize = connections
        return cls(ApiClient(settings), namespace, in_pod)

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        """One object; None where there is none.

        Raises:
            KubeError: when the API server refuses.
        """
        try:
            return self._json("GET", resource.path(namespace, name))
        except NotFoundError:
            return None

    def list(self, resource: Resource, namespace: str | None, labels: str, read: Callable[[Object], T]) -> Listing[T]:
        """All objects of a kind, in one namespace or in all, by pages.

        Args:
            resource: the kind.
            namespace: None for all namespaces.
            labels: a label selector; empty for none.
            read: what to keep of an object; of the rest never more than a page is held.

        Raises:
            KubeError: when the API server refuses; NotFoundError where the kind is not installed.
        """
        query = {"limit": str(PAGE), "labelSelector": labels}
        items: list[T] = []
        while True:
            page = self._json("GET", resource.path(namespace), {key: value for key, value in query.items() if value})
            items += map(read, page["items"])
            token = page["metadata"].get("continue")
            if not token:
                return Listing(items, page["metadata"]["resourceVersion"])
            query["continue"] = token

    def apply(self, manifest: Mapping[str, Any], resource: Resource | None = None, **query: str) -> Object:
        """Apply an object server-side: own the fields that it gives, leave others alone.

        Args:
            manifest: the object.
            resource: its kind, where it is not a rendered one.
            query: further parameters, such as `force="true"` or `dryRun="All"`.

        Raises:
            ConflictError: when another owns one of the fields and `force` is not given.
            KubeError: when the API server refuses.
        """
        meta = manifest["metadata"]
        path = (resource or resource_of(manifest)).path(meta["namespace"], meta["name"])
        query = {"fieldManager": MANAGER, **query}
        return self._json("PATCH", path, query, manifest, "application/apply-patch+yaml")

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> Object:
        """Create an object.

        Raises:
            ConflictError: when one of its name is there.
            KubeError: when the API server refuses.
        """
        path = resource.path(manifest["metadata"].get("namespace"))
        return self._json("POST", path, {"fieldManager": MANAGER}, manifest)

    def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        patch: Mapping[str, Any],
        subresource: str = "",
        manager: str = MANAGER,
    ) -> Object:
        """Merge a patch into an object; with a `metadata.resourceVersion` in it only into that version.

        Raises:
            ConflictError: when the version is no longer the one given.
            KubeError: when the API server refuses.
        """
        path = resource.path(namespace, name, subresource)
        return self._json("PATCH", path, {"fieldManager": manager}, patch, "application/merge-patch+json")

    def delete(self, resource: Resource, namespace: str, name: str, uid: str | None = None) -> bool:
        """Delete an object, and what it owns after it.

        Args:
            resource: the kind.
            namespace: where it lies.
            name: its name.
            uid: delete this one only, not another of the same name.

        Returns:
            Whether there was such an object.

        Raises:
            KubeError: when the API server refuses.
        """
        body: Object = {"propagationPolicy": "Background"}
        body |= {"preconditions": {"uid": uid}} if uid else {}
        try:
            self._json("DELETE", resource.path(namespace, name), None, body)
        except (NotFoundError, ConflictError):
            return False
        return True

    def access(self) -> Access:
        """What it takes to speak through this API server's proxy.

        Raises:
            NoClusterError: when the credentials' files cannot be read.
        """
        tls: ssl.SSLContext | bool = False
        try:
            if self._config.host.startswith("https") and self._config.verify_ssl:
                tls = ssl.create_default_context(cafile=self._config.ssl_ca_cert)
            elif self._config.host.startswith("https"):
                tls = ssl.create_default_context()
                tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
            if isinstance(tls, ssl.SSLContext) and self._config.cert_file:
                tls.load_cert_chain(self._config.cert_file, self._config.key_file)
        except OSError as error:
            raise NoClusterError(f"the kubeconfig's certificates cannot be read: {error}") from None
        return Access(self._config.host, tls, self._credentials)

    def _credentials(self) -> dict[str, str]:
        """Headers that say who we are; a pod's token is read anew when it may have been rotated."""
        settings = self._config.auth_settings()
        token = settings.get("BearerToken")
        return {"User-Agent": MANAGER} | ({"Authorization": str(token["value"])} if token else {})

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send a request until it is answered, at most `ATTEMPTS` times, and read the answer."""
        url = f"{path}?{urlencode(query)}" if query else path
        headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if body is not None else {})
        data = None if body is None else json.dumps(body).encode()
        for attempt in Retrying(
            retry=retry_if_exception_type(UnavailableError),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.25, max=3),
            reraise=True,
        ):
            with attempt:
                response = self._send(method, url, data, headers)
                if response.status >= 400:
                    raise _error(response.status, response.data)
                answer: Object = json.loads(response.data)
        return answer

    def _send(
        self,
        method: str,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str],
    ) -> urllib3.BaseHTTPResponse:
        pool = self._client.rest_client.pool_manager
        try:
            response: urllib3.BaseHTTPResponse = pool.request(
                method,
                self._config.host + url,
                body=data,
                headers={**self._credentials(), **headers},
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            pool.clear()  # what made one connection go silent made the others so too
            raise UnavailableError(0, "Unreachable", f"{self._config.host} did not answer: {error}") from None
        return response


def _load_pod(settings: Configuration) -> str:
    """Take the pod's own credentials, and tell its namespace."""
    try:
        config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        return (SERVICE_ACCOUNT / "namespace").read_text().strip()
    except (config.ConfigException, OSError) as error:
        raise NoClusterError(f"the pod's service account cannot be used: {error}") from None


def _load_kubeconfig(settings: Configuration, kubeconfig: str | None, context: str | None) -> str:
    """Take a kubeconfig's credentials, and tell the namespace of its context."""
    kubeconfig = kubeconfig or os.environ.get("KUBECONFIG")  # the client reads it once, when it is imported
    try:
        config.load_kube_config(kubeconfig, context, settings)  # type: ignore[no-untyped-call]
        contexts, current = config.list_kube_config_contexts(kubeconfig)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever a broken file makes the client stumble over
        raise NoClusterError(f"the kubeconfig cannot be used: {error}") from None
    chosen = next((entry for entry in contexts if entry["name"] == context), current)
    return str(chosen["context"].get("namespace") or "default")


def _error(status: int, data: bytes) -> KubeError:
    """The API server's refusal by its kind."""
    try:
        answer = json.loads(data)
        reason, message = answer.get("reason") or "Refused", answer.get("message") or ""
    except (ValueError, AttributeError):
        reason, message = "Refused", data[:200].decode(errors="replace")
    return ERRORS.get(status, KubeError)(status, reason, message)
