"""`rlhf dashboard`, against a small double of an API server with a dashboard behind it, over real sockets."""

import base64
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import api_server_double
import httpx
import pytest
from api_server_double import CLUSTERS, JOBS, SECRETS, TOKEN
from cluster_commands import TRAINING, becomes, cluster_with, job_with, rlhf
from rlhf_operator.cli.jobs import Jobs
from shown_dashboard import Shown, shown

HEADS = "/api/v1/namespaces/default/services/"
PROXY = f"{HEADS}job-1-head-svc:8265/proxy"
AWAY = (503, {"kind": "Status", "apiVersion": "v1", "message": 'no endpoints available for service "job-1-head-svc"'})


class DashboardHandler(api_server_double._Handler):
    """Answers for the heads as well: with what the test put at a path, or tells what it was asked."""

    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        if not self.path.startswith(HEADS):
            super()._serve()
            return
        page = self.server.pages.get(self.path.partition("?")[0].partition("/proxy")[2], (200, "the dashboard"))
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        page(self) if callable(page) else self.tell(*page)

    def tell(self, status: int, body: Any, **headers: str) -> None:
        data = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        headers = {"Content_Type": "text/plain", "Content_Length": str(len(data))} | headers
        for name, value in headers.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PATCH = do_DELETE = do_POST = _serve  # noqa: N815


@pytest.fixture
def head(server):
    """A job that trains, on a RayCluster with a dashboard."""
    server.RequestHandlerClass = DashboardHandler
    server.pages, server.seen = {}, []
    server.objects |= {
        f"{JOBS}/job": job_with(**TRAINING),
        f"{CLUSTERS}/job-1": cluster_with("job-1"),
        f"{SECRETS}/job-1": {"data": {"auth_token": base64.b64encode(TOKEN.encode()).decode()}},
    }
    return server


@pytest.fixture
def dashboard(head):
    cluster = Jobs.connect(None, None, None)
    with shown(cluster, cluster.head("job-1")) as dashboard:
        yield dashboard


def test_a_browser_that_has_the_url_sees_the_dashboard_and_never_the_token(head, dashboard):
    head.pages["/"] = lambda answer: answer.tell(200, "the dashboard", Set_Cookie="ray-authentication-token=x")
    smuggled = {"Authorization": "Bearer a", "X-Ray-Authorization": "Bearer b", "Impersonate-User": "admin"}
    answer = dashboard.browser.get(
        "", headers={**smuggled, "Connection": "keep-alive, Accept", "User-Agent": "Mozilla"}
    )
    assert (answer.status_code, answer.text) == (200, "the dashboard")
    ((_, path, headers),) = head.seen
    assert (path, headers["X-Ray-Authorization"]) == (f"{PROXY}/", f"Bearer {TOKEN}")
    assert (headers["Authorization"], headers["User-Agent"]) == ("Bearer t", "Mozilla")
    assert not {"Cookie", "Impersonate-User"} & set(headers)
    assert "Set-Cookie" not in answer.headers
    assert TOKEN not in str(answer.headers)


def test_the_key_is_exchanged_for_a_cookie_that_no_script_and_no_other_folder_gets(dashboard):
    welcome = httpx.get(dashboard.url)
    cookie = welcome.headers["Set-Cookie"]
    assert all(part in cookie for part in ("HttpOnly", "SameSite=Strict", f"Path={dashboard.door}"))
    assert 'http-equiv="refresh" content="0;url=./"' in welcome.text
    assert welcome.headers["Referrer-Policy"] == "no-referrer"
    assert dashboard.url.partition("key=")[2] not in welcome.text + cookie


@pytest.mark.parametrize(
    "attempt",
    [
        lambda shown: shown.raw(shown.door),
        lambda shown: shown.raw("/", Cookie=shown.cookie),
        lambda shown: shown.raw("/favicon.ico"),
        lambda shown: shown.raw(f"{shown.door}?key=wrong"),
        lambda shown: shown.raw(f"{shown.door}?key=%ff"),
        lambda shown: shown.raw(shown.door, Cookie="rlhf-dashboard=wrong"),
        lambda shown: shown.raw(shown.door, Cookie=shown.cookie, Host=f"evil.example:{shown.address.split(':')[1]}"),
        lambda shown: shown.raw(shown.url.removeprefix(f"http://{shown.address}"), Host="evil.example"),
        lambda shown: shown.raw(shown.door, Cookie=shown.cookie, Host="127.0.0.1"),
        lambda shown: shown.raw(shown.door, Cookie=shown.cookie, Sec_Fetch_Site="cross-site"),
        lambda shown: shown.raw(shown.door, Cookie=shown.cookie, Sec_Fetch_Site="same-site"),
        lambda shown: shown.raw(shown.door, Cookie=shown.cookie, Origin="http://evil.example"),
        lambda shown: shown.raw(shown.door, Cookie=shown.cookie, Origin="http://127.0.0.1:1"),
        lambda shown: shown.raw(f"http://{shown.address}/", Cookie=shown.cookie),
        lambda shown: shown.raw(f"{PROXY}/", Cookie=shown.cookie),
    ],
)  # fmt: skip
def test_nobody_else_gets_in(head, dashboard, attempt):
    assert attempt(dashboard).status == 403
    assert head.seen == []


def test_the_same_page_gets_in_by_either_name_of_this_machine(dashboard):
    port = dashboard.address.split(":")[1]
    let_in = {"Cookie": dashboard.cookie, "Sec_Fetch_Site": "same-origin"}
    assert dashboard.raw(dashboard.door, **let_in, Host=f"localhost:{port}").status == 200
    assert dashboard.raw(dashboard.door, **let_in, Origin=f"http://{dashboard.address}").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "../../../../secrets",
        "x/..",
        ".",
        "%2e%2e/",
        "%2E./x",
        "..%2fx",
        "%252e%252e%252fx",
        "..%5cx",
        "..\\x",
        "a#/../",
    ],
)
def test_no_path_leads_out_of_the_dashboard(head, dashboard, path):
    assert dashboard.raw(dashboard.door + path, Cookie=dashboard.cookie).status == 400
    assert head.seen == []


@pytest.mark.parametrize(
    "path", ["nodes/a%2Fb", "api/v0/logs?glob=*&ip=%5B::1%5D&x=a%2Fb+c&y=../z", "logs/a%20b..c", "//x", "?a=1"]
)
def test_paths_arrive_as_they_were_sent(head, dashboard, path):
    assert dashboard.raw(dashboard.door + path, Cookie=dashboard.cookie).status == 200
    assert head.seen[0][1] == f"{PROXY}/{path}"


def test_an_answer_is_shown_while_it_grows(head, dashboard):
    read = threading.Event()

    def log(answer):
        answer.tell(200, "", Transfer_Encoding="chunked", Content_Length="")
        answer.wfile.write(b"4\r\none\n\r\n")
        assert read.wait(10)
        answer.wfile.write(b"4\r\ntwo\n\r\n0\r\n\r\n")

    head.pages["/log"] = log
    with dashboard.browser.stream("GET", "log") as answer:
        pieces = answer.iter_raw()
        assert next(pieces) == b"one\n"
        read.set()
        assert list(pieces) == [b"two\n"]


def test_an_answer_that_is_cut_off_is_not_passed_off_as_whole(head, dashboard):
    def half(answer):
        answer.tell(200, "", Transfer_Encoding="chunked", Content_Length="")
        answer.wfile.write(b"4\r\none\n\r\n")
        answer.close_connection = True

    head.pages["/log"] = half
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        dashboard.browser.get("log")


def test_a_browser_that_leaves_ends_an_answer_that_is_silent(head, dashboard):
    ended = threading.Event()

    def log(answer):
        answer.tell(200, "one\n", Content_Length="")
        answer.close_connection = True
        if answer.rfile.read(1) == b"":  # the connection's end
            ended.set()

    head.pages["/log"] = log
    with dashboard.browser.stream("GET", "log") as answer:
        next(answer.iter_raw())
    assert ended.wait(10)


def test_a_request_is_sent_on_while_it_grows(head, dashboard):
    arrived = threading.Event()

    def take(answer):
        first = answer.rfile.read(3)
        arrived.set()
        answer.tell(200, first + answer.rfile.read(3))

    def pieces():
        yield b"one"
        assert arrived.wait(10)
        yield b"two"

    head.pages["/upload"] = take
    answer = dashboard.browser.post("upload", content=pieces(), headers={"Content-Length": "6"})
    assert answer.text == "onetwo"


def test_compression_is_left_to_the_two_ends(head, dashboard):
    squeezed = gzip.compress(b"a script")
    head.pages["/main.js"] = lambda answer: answer.tell(200, squeezed, Content_Encoding="gzip")
    with dashboard.browser.stream("GET", "main.js", headers={"Accept-Encoding": "gzip, br"}) as answer:
        assert b"".join(answer.iter_raw()) == squeezed
    assert dashboard.browser.get("main.js").text == "a script"
    dashboard.raw(f"{dashboard.door}main.js", Cookie=dashboard.cookie)
    assert [headers["Accept-Encoding"] for _, _, headers in head.seen][::2] == ["gzip, br", "identity"]


def test_links_that_the_api_server_turned_to_itself_lead_back(head, dashboard):
    html = f'<a href="{PROXY}/logs/x">x</a>'.encode()
    kind = "text/html; charset=utf-8"
    head.pages["/"] = lambda answer: answer.tell(200, html, Content_Type=kind)
    head.pages["/gzip"] = lambda answer: answer.tell(
        200, gzip.compress(html), Content_Type=kind, Content_Encoding="gzip"
    )
    head.pages["/old"] = lambda answer: answer.tell(302, "", Location=f"{PROXY}/new?a=1")
    head.pages["/out"] = lambda answer: answer.tell(302, "", Location="https://docs.example/")
    for path in ("", "gzip"):
        assert dashboard.browser.get(path).text == f'<a href="{dashboard.door}logs/x">x</a>'
    assert dashboard.browser.get("old").headers["Location"] == f"{dashboard.door}new?a=1"
    assert dashboard.browser.get("out").headers["Location"] == "https://docs.example/"


def test_what_the_dashboard_itself_refuses_is_its_own_to_tell(head, dashboard):
    head.pages["/api/grafana_health"] = (500, {"result": False, "msg": "Grafana healthcheck failed"})
    answer = dashboard.browser.get("api/grafana_health")
    assert (answer.status_code, answer.json()["msg"]) == (500, "Grafana healthcheck failed")


def person(dashboard: Shown) -> httpx.Response:
    return dashboard.browser.get("", headers={"Accept": "text/html,*/*"})


def test_a_head_that_goes_away_is_told_with_the_jobs_status(head, dashboard):
    head.pages["/"] = AWAY
    becomes(**TRAINING | {"phase": "Restarting", "message": "the <head> is gone"})(head)
    page = person(dashboard)
    assert page.status_code == 502
    for said in ("no endpoints available", "the &lt;head&gt; is gone", "Next: nothing: it goes on by itself"):
        assert said in page.text
    assert 'http-equiv="refresh" content="5;url="' in page.text
    script = dashboard.browser.get("")
    assert script.text == f"Ray's dashboard of job does not answer: {AWAY[1]['message']}\n"
    del head.objects[f"{JOBS}/job"]
    assert "It was deleted." in person(dashboard).text


def test_the_next_cluster_is_shown_once_a_head_was_lost(head, dashboard):
    token = base64.b64encode(b"another").decode()
    head.objects |= {
        f"{CLUSTERS}/job-2": cluster_with("job-2") | {"status": {"head": {"serviceName": "job-2-head-svc"}}},
        f"{SECRETS}/job-2": {"data": {"auth_token": token}},
    }
    head.pages["/"] = AWAY
    becomes(**TRAINING | {"cluster": 2, "rayCluster": "job-2"})(head)
    assert person(dashboard).status_code == 502
    del head.pages["/"]
    assert person(dashboard).text == "the dashboard"
    assert head.seen[-1][1] == f"{HEADS}job-2-head-svc:8265/proxy/"
    assert head.seen[-1][2]["X-Ray-Authorization"] == "Bearer another"


def test_an_api_server_that_goes_away_is_told(head, dashboard):
    head.pages["/"], head.away = AWAY, {JOBS: 1}
    page = person(dashboard)
    assert page.status_code == 502
    assert "check that the cluster runs" in page.text


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_ray_refuses_is_never_asked_of_the_user(head, dashboard, status):
    """The dashboard's page answers 401 and 403 by a dialog for the token."""
    head.pages["/nodes"] = (status, "Unauthorized: Missing authentication token")
    answer = dashboard.browser.get("nodes")
    assert (answer.status_code, "does not take the token" in answer.text) == (502, True)


def test_a_right_that_is_missing_is_told_before_anything_is_shown(head):
    head.pages["/api/version"] = (403, {"kind": "Status", "apiVersion": "v1", "message": 'User "eve" cannot get it'})
    result = rlhf("dashboard", "job")
    assert (result.exit_code, result.stdout) == (1, "")
    assert 'got no dashboard of job-1 (User "eve" cannot get it); expected one that answers. Fix:' in result.stderr


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            {"phase": "Suspended"},
            "got no RayCluster (Suspended); expected one to show the dashboard of. Fix: `rlhf res",
        ),
        (TRAINING | {"rayCluster": "job-9"}, "got no dashboard of job-9 (its RayCluster is gone)"),
    ],
    ids=["no cluster", "gone"],
)
def test_a_job_without_a_cluster_says_so_and_what_to_do(head, status, said):
    head.objects[f"{JOBS}/job"] = job_with(**status)
    result = rlhf("dashboard", "job")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert said in result.stderr


def test_a_port_that_is_taken_is_told(head):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = rlhf("dashboard", "job", "--port", port)
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        result.stderr
        == f"--port: got {port}, which is taken; expected a free port. Fix: leave it out, or give another\n"
    )


def test_in_a_terminal_it_opens_the_browser_and_ends_well_by_ctrl_c(head, tmp_path):
    fifo, browser = tmp_path / "fifo", tmp_path / "browser.py"
    os.mkfifo(fifo)
    browser.write_text(
        "import sys, urllib.request\n"
        f"open({str(fifo)!r}, 'w').write(sys.argv[1] + ' ' + urllib.request.urlopen(sys.argv[1]).read().decode())\n"
    )
    terminal, end = os.openpty()
    environment = os.environ | {"BROWSER": f"{sys.executable} {browser} %s &"}
    command = [sys.executable, "-m", "rlhf_operator", "dashboard", "job", "--kubeconfig", str(tmp_path / "kubeconfig")]
    with subprocess.Popen(command, stdout=end, stderr=subprocess.PIPE, env=environment, text=True) as process:
        os.close(end)
        with os.fdopen(terminal) as screen:
            url = screen.readline().strip()
            argument, _, page = fifo.read_text().partition(" ")
            assert f"url={url}" in page
            assert "key" not in argument, "every user of the machine sees it"
            assert Path(argument.removeprefix("file://")).parent.stat().st_mode & 0o077 == 0
            with httpx.Client() as client:
                assert client.get(url).status_code == 200
                assert client.get(url.partition("?")[0]).text == "the dashboard"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        assert process.stderr.read() == "Whoever has this URL gets in. Ctrl-C ends it.\n"
    assert not Path(argument.removeprefix("file://")).exists()
