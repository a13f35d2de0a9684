"""`rlhf dashboard` through a real API server's service proxy."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from control_plane import ControlPlane
from rlhf_operator.cli.jobs import Jobs
from rlhf_operator.ray_jobs import Head
from shown_dashboard import Shown, shown


class Dashboard(BaseHTTPRequestHandler):
    """A head that knows its token, writes absolute links, and logs without an end until it is read."""

    read = threading.Event()

    def do_GET(self) -> None:
        known = self.headers["X-Ray-Authorization"] == "Bearer secret" and "Authorization" not in self.headers
        self.send_response(302 if self.path == "/old" else 200 if known else 401)
        self.send_header("Content-Type", "text/plain" if self.path == "/log" else "text/html")
        self.send_header("Location", "/new") if self.path == "/old" else None
        self.end_headers()
        self.wfile.write(b"one\n" if self.path == "/log" else f'<a href="/logs">{self.path}</a>'.encode())
        if self.path == "/log":
            self.wfile.write(b"two\n" if self.read.wait(30) else b"never read\n")


@contextmanager
def put_behind(service: str, plane: ControlPlane, namespace: str) -> Iterator[None]:
    """A service with the dashboard behind it, as KubeRay makes them for a head."""
    server = ThreadingHTTPServer((plane.pod_address, 0), Dashboard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = {"ip": plane.pod_address, "targetRef": {"kind": "Pod", "name": "head", "namespace": namespace}}
    behind = [{"addresses": [address], "ports": [{"name": "dashboard", "port": server.server_port}]}]
    pod = {"schedulerName": "nobody", "containers": [{"name": "ray", "image": "ray"}]}
    for kind, name, rest in (
        ("ServiceAccount", "default", {}),
        ("Service", service, {"spec": {"clusterIP": "None", "ports": [{"name": "dashboard", "port": 8265}]}}),
        ("Pod", "head", {"spec": pod}),
        ("Endpoints", service, {"subsets": behind}),
    ):
        manifest = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **rest}
        plane.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))
    told = {"status": {"podIP": plane.pod_address, "podIPs": [{"ip": plane.pod_address}], "phase": "Running"}}
    plane.kubectl("patch", "pod", "head", "-n", namespace, "--subresource=status", "-p", json.dumps(told))
    yield
    server.shutdown()
    server.server_close()


@pytest.fixture
def dashboard(api_server: ControlPlane, namespace: str) -> Iterator[Shown]:
    cluster = Jobs.connect(namespace, None, str(api_server.kubeconfig))
    head = Head(namespace, "job-1-head-svc", "secret")
    with put_behind(head.service, api_server, namespace), shown(cluster, head) as dashboard:
        yield dashboard


def test_the_dashboard_behind_the_service_proxy(dashboard: Shown) -> None:
    page = dashboard.browser.get("", headers={"Accept-Encoding": "gzip"})
    assert (page.status_code, page.text) == (200, f'<a href="{dashboard.door}logs">/</a>')
    assert dashboard.browser.get("nodes/a%20b?x=%5B1%5D").text.endswith("/nodes/a%20b?x=%5B1%5D</a>")
    assert dashboard.browser.get("old").headers["Location"] == f"{dashboard.door}new"
    with dashboard.browser.stream("GET", "log") as log:
        pieces = log.iter_raw()
        assert next(pieces) == b"one\n"
        Dashboard.read.set()
        assert b"".join(pieces) == b"two\n"


def test_a_head_that_is_gone_is_told_by_the_api_servers_words(
    dashboard: Shown, api_server: ControlPlane, namespace: str
) -> None:
    api_server.kubectl("delete", "service", "job-1-head-svc", "-n", namespace)
    answer = dashboard.browser.get("nodes")
    assert answer.status_code == 502
    assert '"job-1-head-svc" not found' in answer.text
