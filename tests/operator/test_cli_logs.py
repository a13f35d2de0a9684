"""`rlhf logs`, against a small double of an API server, and of Ray behind it, over a real socket."""

import base64
import re
from typing import Any

import api_server_double
import pytest
from api_server_double import CLUSTERS, JOBS, SECRETS, TOKEN, ApiServerDouble
from cluster_commands import DONE, TRAINING, becomes, cluster_with, condition, job_with, rlhf, until


@pytest.fixture
def driver(server):
    """A job whose driver has written three lines."""
    server.objects |= {
        f"{JOBS}/job": job_with(**TRAINING),
        f"{CLUSTERS}/job-1": cluster_with("job-1"),
        f"{SECRETS}/job-1": {"data": {"auth_token": base64.b64encode(TOKEN.encode()).decode()}},
    }
    server.logs["job-1-2"] = "one\ntwo\nthree\n"
    return server


def writes(text: str, submission: str = "job-1-2") -> Any:
    return lambda server: server.logs.__setitem__(submission, server.logs.get(submission, "") + text)


@pytest.mark.parametrize(
    ("tail", "said"), [((), "one\ntwo\nthree\n"), (("--tail", 1), "three\n"), (("--tail", 0), "")], ids=str
)
def test_logs_are_read_from_ray_with_the_clusters_token(driver, tail, said):
    result = rlhf("logs", "job", *tail)
    assert (result.exit_code, result.stdout) == (0, said)


def logs_asked(server: ApiServerDouble) -> list[str]:
    return [path.rpartition("/")[2] for _, path, _ in server.asked if "/v0/logs/" in path]


def follows(server: ApiServerDouble) -> bool:
    return "stream" in logs_asked(server)


def test_logs_are_followed_over_tries_to_the_end(driver):
    def next_try(server):
        server.logs |= {"job-1-2": server.logs["job-1-2"] + "its end\n", "job-1-3": "again\n"}
        becomes(**{**TRAINING, "submissionId": "job-1-3"})(server)

    def ends(server):
        writes("to the end\n", "job-1-3")(server)
        becomes(phase="Failed", message="enough", conditions=[condition("Failed")])(server)

    driver.logs["job-1-2"] = "one\ntwo\nthr"
    driver.story = [None, until(follows, writes("ee\nfour\n")), next_try, ends]
    result = rlhf("logs", "-f", "job", "--tail", "2")
    assert (result.exit_code, result.stdout) == (1, "two\nthree\nfour\nits end\nagain\nto the end\n")
    assert result.stderr == "--- job-1-3\nFailed: enough\n"


def test_a_log_that_is_followed_is_not_asked_for_again_and_again(driver):
    driver.story = [None, until(follows, lambda _: None), *[None] * 20, becomes(**DONE)]
    assert rlhf("logs", "-f", "job").exit_code == 0
    assert logs_asked(driver) == ["stream", "file"]


def test_a_followed_log_goes_on_where_it_was_cut_off(driver):
    text = "one\ntwö\n"
    driver.logs["job-1-2"], driver.cuts = text, 2
    driver.story = [None, until(lambda server: not server.cuts, writes("three\n")), *[None] * 10, becomes(**DONE)]
    result = rlhf("logs", "-f", "job")
    assert (result.exit_code, result.stdout, driver.cuts) == (0, f"{text}three\n", 0)


def test_following_has_patience_with_an_api_server_that_is_away(driver):
    away = lambda server: server.away.update({JOBS: 3})  # noqa: E731
    driver.away, driver.cuts = {f"{CLUSTERS}/": 2}, 1
    driver.story = [None, until(lambda server: not server.cuts, away), becomes(**DONE)]
    result = rlhf("logs", "-f", "job")
    assert (result.exit_code, result.stdout) == (0, "one\ntwo\nthree\n")
    assert set(driver.away.values()) == {0}


def test_between_two_tries_the_log_is_that_of_the_last_one(driver):
    between = {key: value for key, value in TRAINING.items() if key != "submissionId"} | {"phase": "Restarting"}
    driver.objects[f"{JOBS}/job"] = job_with(**between)
    assert rlhf("logs", "job").stdout == "one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"phase": "Provisioning", "rayCluster": "job-1", "cluster": 1}, "no driver was submitted yet"),
        ({"phase": "Succeeded", "cluster": 1, "tries": 2}, "the RayCluster of its last try is gone"),
    ],
    ids=["not yet", "no longer"],
)
def test_a_job_without_a_log_says_why(driver, status, said):
    driver.objects[f"{JOBS}/job"] = job_with(**status)
    result = rlhf("logs", "job")
    assert (result.exit_code, result.stdout) == (1, "")
    assert said in result.stderr


STORAGE = [{"name": "kept", "persistentVolumeClaim": "team-checkpoints", "mountPath": "/checkpoints"}]
KEPT = "job/run/driver.log on PersistentVolumeClaim team-checkpoints, which pods see as /checkpoints/job/run/driver.log"


@pytest.mark.parametrize("follow", [(), ("-f",)], ids=["once", "follow"])
@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"storage": STORAGE, "checkpoint": {"path": "/checkpoints/job"}}, KEPT),
        ({"storage": STORAGE}, "`checkpoint` on a storage keeps the next job's"),
        ({}, "The log went with the RayCluster"),
    ],
    ids=["on a claim", "no checkpoints", "no storage"],
)
def test_a_log_whose_cluster_is_gone_is_told_where_it_is(driver, manifest, spec, said, follow):
    job = job_with(cluster=1, tries=2, **DONE)
    driver.objects[f"{JOBS}/job"] = job | {"spec": manifest["spec"] | spec}
    result = rlhf("logs", *follow, "job")
    assert (result.exit_code, result.stdout) == (0 if follow else 1, "")
    assert said in result.stderr


def test_a_driver_that_has_not_started_has_no_log_yet(driver, monkeypatch):
    monkeypatch.setattr(api_server_double, "NODE", None)
    assert "its driver has not started" in rlhf("logs", "job").stderr


@pytest.mark.parametrize(
    ("lost", "left"),
    [(f"{CLUSTERS}/job-1", None), (f"{SECRETS}/job-1", None), (f"{SECRETS}/job-1", {"data": {}})],
    ids=["cluster gone", "no Secret", "no token"],
)
def test_a_log_that_cannot_be_had_is_told(driver, lost, left):
    del driver.objects[lost]
    driver.objects |= {lost: left} if left else {}
    result = rlhf("logs", "job")
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"job: no log can be had now \(.*\)\. Training: step 12 of 200\n", result.stderr)
