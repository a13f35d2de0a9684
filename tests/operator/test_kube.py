"""The Kubernetes client over real HTTP, against an API server that has bad days."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rlhf_operator.kube import (
    CONFIGMAPS,
    NODES,
    PODS,
    RLHFJOBS,
    ConflictError,
    ForbiddenError,
    InvalidError,
    Kube,
    KubeError,
    NoClusterError,
    NotFoundError,
    UnavailableError,
)

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts:
  - {name: here, context: {cluster: c, user: u, namespace: team}}
  - {name: there, context: {cluster: c, user: u}}
clusters: [{name: c, cluster: {server: "http://127.0.0.1:%d"}}]
users: [{name: u, user: {token: secret}}]
"""


class Server:
    """Answers in the order that it was told; the last answer is for all further requests."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = [(200, {})]
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []

    def take(self) -> tuple[int, Any]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Server]:
    made = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            made.requests.append((self.command, self.path, dict(self.headers), json.loads(body) if body else None))
            status, told = made.take()
            if status == 0:  # hang up
                self.close_connection = True
                return
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

        def log_message(self, *_args: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
    file = tmp_path / "config"
    file.write_text(KUBECONFIG % listening.server_port)
    monkeypatch.setenv("KUBECONFIG", str(file))
    yield made
    listening.shutdown()
    listening.server_close()


def refusal(status: int, reason: str = "Reason", message: str = "because") -> tuple[int, Any]:
    return status, {"kind": "Status", "reason": reason, "message": message}


def test_credentials_and_namespace_come_from_the_kubeconfigs_context(server):
    kube = Kube.connect()
    assert (kube.namespace, kube.in_pod) == ("team", False)
    assert Kube.connect(context="there").namespace == "default"
    assert kube.get(PODS, "team", "a") == {}
    ((method, path, headers, _),) = server.requests
    assert (method, path) == ("GET", "/api/v1/namespaces/team/pods/a")
    assert headers["Authorization"] == "Bearer secret"
    assert kube.access().headers()["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("bad", ["", "not: [yaml", "contexts: 3"])
def test_a_kubeconfig_that_cannot_be_used_is_told(bad, tmp_path):
    file = tmp_path / "config"
    file.write_text(bad)
    with pytest.raises(NoClusterError):
        Kube.connect(str(file))
    with pytest.raises(NoClusterError):
        Kube.connect(str(tmp_path / "nothing"))


@pytest.mark.parametrize("bad_day", [refusal(429), refusal(500), refusal(503), (0, None)])
def test_what_the_api_server_could_not_answer_is_asked_again_and_not_for_ever(server, bad_day):
    server.answers = [bad_day, (200, {"ok": True})]
    assert Kube.connect().get(PODS, "team", "a") == {"ok": True}
    server.answers = [bad_day]
    before = len(server.requests)
    with pytest.raises(UnavailableError):
        Kube.connect().get(PODS, "team", "a")
    assert len(server.requests) - before == 4


@pytest.mark.parametrize(
    ("status", "kind"), [(403, ForbiddenError), (409, ConflictError), (422, InvalidError), (400, KubeError)]
)
def test_what_is_refused_is_not_asked_again_and_says_why(server, status, kind):
    server.answers = [refusal(status)]
    with pytest.raises(kind, match="because") as raised:
        Kube.connect().create(CONFIGMAPS, {"metadata": {"name": "a", "namespace": "team"}})
    assert type(raised.value) is kind
    assert len(server.requests) == 1


def test_a_missing_object_is_none_and_a_missing_kind_an_error(server):
    server.answers = [refusal(404)]
    assert Kube.connect().get(PODS, "team", "a") is None
    assert Kube.connect().delete(PODS, "team", "a") is False
    with pytest.raises(NotFoundError):
        Kube.connect().list(RLHFJOBS, None, "", dict)


def test_a_long_list_comes_by_pages(server):
    def page(name: str, token: str = "") -> tuple[int, Any]:
        return 200, {"items": [{"n": name}], "metadata": {"resourceVersion": name, "continue": token}}

    server.answers = [page("1", "next"), page("2")]
    listing = Kube.connect().list(NODES, None, "a=b", dict)
    assert ([item["n"] for item in listing.items], listing.resource_version) == (["1", "2"], "2")
    assert [path for _, path, _, _ in server.requests] == [
        "/api/v1/nodes?limit=100&labelSelector=a%3Db",
        "/api/v1/nodes?limit=100&labelSelector=a%3Db&continue=next",
    ]


def test_a_write_names_its_manager_and_takes_nothing_by_force(server):
    manifest = {"kind": "ConfigMap", "metadata": {"name": "a", "namespace": "team"}}
    Kube.connect().apply(manifest)
    ((method, path, headers, body),) = server.requests
    assert (method, path) == ("PATCH", "/api/v1/namespaces/team/configmaps/a?fieldManager=rlhf-operator")
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert body == manifest


def test_a_deletion_means_one_object_and_what_it_owns(server):
    assert Kube.connect().delete(CONFIGMAPS, "team", "a", uid="u")
    assert server.requests[0][3] == {"propagationPolicy": "Background", "preconditions": {"uid": "u"}}
