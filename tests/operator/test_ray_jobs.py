"""Ray's job API over real HTTP, as a head and the API server's proxy answer."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fake_head import FakeHead, fake_head
from operator_values import cluster
from rlhf_api.status import Progress
from rlhf_operator import ray_jobs
from rlhf_operator.kube import Access
from rlhf_operator.ray_jobs import Head, RayJobs, RefusedError, UnreachableError, head_of

HEAD = Head("team", "math-1-head-svc", "secret")
RUN = "python -m rlhf_runtime x"


@pytest.fixture
def head() -> Iterator[FakeHead]:
    with fake_head() as made:
        yield made


def proxied(head: FakeHead) -> Access:
    return Access(head.url, tls=False, headers=lambda: {"Authorization": "Bearer api-server"})


def ask(head: FakeHead, *calls):
    """Make calls one after the other over one client, and return what the last one returned."""

    async def made():
        rays = RayJobs(proxied(head))
        try:
            for call in calls:
                answer = await call(rays)
            return answer
        finally:
            await rays.close()

    return asyncio.run(made())


def look(target=HEAD):
    return lambda rays: rays.look(target, "math-1-1")


def submit(entrypoint=RUN):
    return lambda rays: rays.submit(HEAD, "math-1-1", entrypoint, {"job": "math"})


def test_a_submission_is_taken_once_however_often_it_is_made(head):
    assert ask(head, look()).state == "unknown"
    assert ask(head, submit(), submit(), look()).state == "pending"
    assert head.jobs["math-1-1"]["entrypoint"] == RUN
    assert head.jobs["math-1-1"]["metadata"] == {"job": "math"}


def test_through_the_proxy_the_token_goes_where_ray_finds_it(head):
    ask(head, look())
    assert head.headers["X-Ray-Authorization"] == "Bearer secret"
    assert head.headers["Authorization"] == "Bearer api-server"
    assert head.paths == ["/api/v1/namespaces/team/services/math-1-head-svc:8265/proxy/api/jobs/math-1-1"]


def test_in_a_cluster_the_head_is_reached_by_its_services_name():
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((str(request.url), request.headers["Authorization"]))
        return httpx.Response(200, json={"status": "PENDING"})

    async def made():
        return await RayJobs(transport=httpx.MockTransport(answer)).look(HEAD, "math-1-1")

    assert asyncio.run(made()).state == "pending"
    assert asked == [("http://math-1-head-svc.team.svc:8265/api/jobs/math-1-1", "Bearer secret")]


def test_a_driver_that_runs_tells_its_progress_and_one_that_does_not_tell_it_runs_all_the_same(head):
    head.jobs["math-1-1"] = {"status": "RUNNING"}
    assert ask(head, look()).progress is None
    head.progress = {"step": 3, "steps": 10, "tokensPerSecond": 12.5}
    assert ask(head, look()).progress == Progress(step=3, steps=10, tokens_per_second=12.5)
    head.progress = {"step": "three"}
    view = ask(head, look())
    assert (view.state, view.progress) == ("running", None)


def test_an_end_comes_with_its_exit_code_and_the_end_of_its_log(head):
    head.jobs["math-1-1"] = {"status": "FAILED", "message": "exit 5", "driver_exit_code": 5, "error_type": "X"}
    head.logs["math-1-1"] = "x" * 100_000 + "\nlast line\n"
    view = ask(head, look())
    assert (view.state, view.exit_code, view.message, view.error_type) == ("failed", 5, "exit 5", "X")
    assert view.log.endswith("last line\n")
    assert len(view.log) < 20_000


def test_of_a_long_log_only_its_end_is_asked_for_and_kept(head):
    head.jobs["math-1-1"] = {"status": "FAILED"}
    head.logs["math-1-1"] = "".join(f"line {number}\n" for number in range(100_000))
    assert ask(head, look()).log == "".join(f"line {number}\n" for number in range(99_900, 100_000))
    head.logs["math-1-1"] = "progress \r" * 100_000 + "done"
    log = ask(head, look()).log
    assert log.endswith("progress \rdone")
    assert len(log) < 20_000


def test_a_driver_that_never_started_has_no_log(head):
    head.jobs["math-1-1"] = {"status": "FAILED", "driver_node_id": None}
    assert (ask(head, look()).state, ask(head, look()).log) == ("failed", "")


def test_an_answer_without_an_end_is_not_read_to_its_end(head):
    head.jobs["math-1-1"] = {"status": "RUNNING"}
    head.progress = {"step": 1, "steps": 2, "note": "x" * 2_000_000}
    assert (ask(head, look()).state, ask(head, look()).progress) == ("running", None)


async def trickle() -> AsyncIterator[bytes]:
    """Ten bytes, each of them soon after the last."""
    for _ in range(10):
        await asyncio.sleep(0.1)
        yield b" "


def test_an_answer_that_trickles_in_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(ray_jobs, "ANSWER_SECONDS", 0.3)
    slow: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        whole = {"status": "RUNNING", "driver_node_id": "0b"}
        if request.url.path in slow:
            return httpx.Response(200, content=trickle())
        return httpx.Response(200, json=whole)

    async def made(path: str):
        slow[:] = [path]
        began = time.monotonic()
        view = await RayJobs(transport=httpx.MockTransport(answer)).look(HEAD, "math-1-1")
        return view.state, view.progress, view.message, time.monotonic() - began < 0.8

    assert asyncio.run(made("/progress")) == ("running", None, "", True)
    assert asyncio.run(made("/api/jobs/math-1-1")) == ("unreachable", None, "it did not answer in time", True)


def test_a_log_may_take_longer_than_an_answer(monkeypatch):
    monkeypatch.setattr(ray_jobs, "ANSWER_SECONDS", 0.3)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/api/v0/logs/"):
            return httpx.Response(200, content=trickle())
        return httpx.Response(200, json={"driver_node_id": "0b"})

    async def made() -> bytes:
        rays = RayJobs(transport=httpx.MockTransport(answer))
        return b"".join([chunk async for chunk in rays.log(HEAD, "math-1-1")])

    assert asyncio.run(made()) == b" " * 10


def test_an_answer_that_is_nested_too_deeply_is_none():
    async def made():
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content='{"a":' * 10_000))
        return await RayJobs(transport=transport).look(HEAD, "math-1-1")

    assert asyncio.run(made()).message == "its answer is not JSON"


def test_progress_of_another_release_is_read_as_far_as_it_is_known(head):
    head.jobs["math-1-1"] = {"status": "RUNNING"}
    head.progress = {"step": 1, "steps": 2, "mood": "cheerful"}
    assert ask(head, look()).progress == Progress(step=1, steps=2)


SECRET = {"data": {"auth_token": base64.b64encode(b"secret").decode()}}


@pytest.mark.parametrize(
    ("secret", "token"), [(SECRET, "secret"), (None, None), ({}, None), ({"data": {"auth_token": "a"}}, None)]
)
def test_a_head_is_reached_by_its_service_and_the_clusters_token(secret, token):
    assert head_of(cluster(head_service="a-service"), secret) == Head("team", "a-service", token)
    assert head_of(cluster(head_service=None), secret).service == "math-1-head-svc"


def test_no_answer_is_an_answer_and_reads_the_same_every_time(head):
    head.broken = True
    assert ask(head, look()).state == "unreachable"
    head.broken, head.token = False, "another"
    assert ask(head, look()).message == "it answered 401"
    gone = FakeHead.__new__(FakeHead)
    gone.url = "http://127.0.0.1:1"
    first, second = ask(gone, look()), ask(gone, look())
    assert first == second
    assert first.state == "unreachable"


def test_a_proxy_that_knows_no_such_service_is_not_a_head_that_forgot(head):
    head.jobs = {}
    head.answer = lambda *_: (404, {"kind": "Status", "message": 'services "math-1-head-svc" not found'})
    assert ask(head, look()).state == "unreachable"


def test_a_submission_that_ray_does_not_take_says_why(head):
    with pytest.raises(RefusedError, match="entrypoint must be a string"):
        ask(head, submit(""))
    head.broken = True
    with pytest.raises(UnreachableError, match="500"):
        ask(head, submit())
