"""The driver's endpoint, read over a real socket as the operator and Prometheus read it."""

import http.client
import json
import math
import re
import socket
from contextlib import closing

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rlhf_runtime.driver_log import DriverLog
from rlhf_runtime.report import Report, StepRecord, sinks_of
from rlhf_runtime.report.endpoint import EVERYWHERE, HERE, ProgressEndpoint, ray_token

TOKEN = "3f9c2ab1"
METRICS = {
    "step": 3, "reward_mean": 0.25, "reward/digits": 0.5, "reward/mean": 0.75, "eval/reward/digits": 0.1, "kl": 0.002,
    "tokens_per_second": 820.5, "weight_version": 3, "sync_path": "gloo", "time/step": 2.0, "time/update": 0.5,
    "value_loss": math.nan,
}  # fmt: skip


@pytest.fixture
def serve(make_config):
    """Starts an endpoint of a 12-step run after `METRICS`; it is closed at the end."""
    started = []

    def start(token=None, steps=(METRICS,), host=HERE, **config):
        endpoint = ProgressEndpoint(host, 0, token)
        report = Report(make_config(**config), [endpoint])
        report.start()
        started.append(report)
        for metrics in steps:
            report.step(StepRecord(dict(metrics), [], []))
        return endpoint, report

    yield start
    for report in started:
        report.close()


def get(endpoint, path, host=HERE, **headers):
    """Status, headers and body of a request."""
    with closing(http.client.HTTPConnection(host, endpoint.port, timeout=10)) as connection:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def progress(endpoint, **headers):
    status, _, body = get(endpoint, "/progress", **headers)
    assert status == 200, body
    return json.loads(body)


def test_progress_is_the_newest_step_as_the_status_has_it(serve):
    endpoint, _ = serve()
    assert progress(endpoint) == {
        "step": 3, "steps": 12, "reward": 0.25, "kl": 0.002, "tokensPerSecond": 820.5, "weightVersion": 3,
        "lastCheckpoint": None, "etaSeconds": 18,
    }  # fmt: skip


def test_before_the_first_step_it_says_so(serve):
    endpoint, _ = serve(steps=[])
    told = progress(endpoint)
    assert (told["step"], told["steps"], told["reward"], told["etaSeconds"]) == (0, 12, None, None)
    assert "rlhf_step 0.0\n" in get(endpoint, "/metrics")[2]


def test_a_run_that_goes_on_shows_where_it_stands_before_its_next_step(make_config):
    endpoint = ProgressEndpoint(HERE, 0)
    report = Report(make_config(), [endpoint])
    report.start([dict(METRICS)])
    assert progress(endpoint)["step"] == 3
    report.close()


def test_the_newest_finished_checkpoint_is_named_without_waiting_for_a_step(serve, tmp_path):
    endpoint, _ = serve(checkpoint={"path": str(tmp_path)})
    assert progress(endpoint)["lastCheckpoint"] is None
    for name in ("step-000002", ".step-000003-partial", "step-000001", "step-000009.damaged"):
        (tmp_path / name).mkdir()
    assert progress(endpoint)["lastCheckpoint"] == str(tmp_path / "step-000002")


def test_numbers_that_are_not_finite_are_null_in_json_and_nan_to_prometheus(serve):
    endpoint, _ = serve(steps=[{**METRICS, "reward_mean": math.nan, "kl": math.inf}])
    assert (progress(endpoint)["reward"], progress(endpoint)["kl"]) == (None, None)
    assert "rlhf_reward_mean NaN\n" in get(endpoint, "/metrics")[2]


@pytest.mark.parametrize(
    "accept", ["", "application/openmetrics-text;version=1.0.0", "text/plain;version=0.0.4"], ids=lambda text: text[:12]
)
def test_prometheus_gets_every_number_of_the_step(serve, accept):
    endpoint, _ = serve()
    status, headers, body = get(endpoint, "/metrics", Accept=accept)
    assert status == 200
    assert headers["Content-Type"].startswith(accept.split(";")[0] or "text/plain")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.replace("# EOF\n", ""))
        for sample in family.samples
    }
    assert math.isnan(samples.pop(("rlhf_value_loss",)))
    assert samples == {
        ("rlhf_run_info", "tiny", "gloo"): 1.0,
        ("rlhf_step",): 3.0,
        ("rlhf_steps",): 12.0,
        ("rlhf_eta_seconds",): 18.0,
        ("rlhf_reward_mean",): 0.25,
        ("rlhf_reward", "digits"): 0.5,
        ("rlhf_reward", "mean"): 0.75,
        ("rlhf_eval_reward", "digits"): 0.1,
        ("rlhf_kl",): 0.002,
        ("rlhf_tokens_per_second",): 820.5,
        ("rlhf_weight_version",): 3.0,
        ("rlhf_time_seconds", "step"): 2.0,
        ("rlhf_time_seconds", "update"): 0.5,
    }


@pytest.mark.parametrize("path", ["/progress", "/metrics", "/nowhere"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"X_Ray_Authorization": "Bearer "},
        {"Authorization": f"Bearer {TOKEN}é"},
    ],
    ids=["none", "another", "no scheme", "another scheme", "empty", "longer"],
)
def test_without_the_token_nothing_is_told(serve, path, headers):
    endpoint, _ = serve(token=TOKEN)
    encoded = {name: value.encode() for name, value in headers.items()}
    status, answered, body = get(endpoint, path, **encoded)
    assert (status, answered["WWW-Authenticate"]) == (401, "Bearer")
    assert "step" not in body


@pytest.mark.parametrize("header", ["Authorization", "X_Ray_Authorization"])
def test_the_token_is_taken_where_ray_takes_it(serve, header):
    endpoint, _ = serve(token=TOKEN)
    assert progress(endpoint, **{header: f"Bearer {TOKEN}"})["step"] == 3
    assert get(endpoint, "/nowhere", **{header: f"Bearer {TOKEN}"})[0] == 404


def test_health_needs_no_token(serve):
    endpoint, _ = serve(token=TOKEN)
    assert get(endpoint, "/healthz")[0] == 200


def test_an_empty_token_lets_nobody_in(serve):
    endpoint, _ = serve(token="")
    assert get(endpoint, "/progress", Authorization="Bearer ")[0] == 401


def test_the_token_is_found_where_ray_finds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").write_text("of-file\n")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of-home")
    path = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "file")}
    assert ray_token({}) is None
    assert ray_token({"RAY_AUTH_TOKEN": "of-variable", **path}) == "of-variable"
    assert ray_token(path) == "of-file"
    assert ray_token({"RAY_AUTH_MODE": "token"}) == "of-home"


def test_a_reader_that_says_nothing_keeps_nobody_waiting(serve):
    endpoint, report = serve()
    with socket.create_connection((HERE, endpoint.port)) as silent:
        silent.send(b"GET /progress HT")
        report.step(StepRecord({**METRICS, "step": 4}, [], []))
        assert progress(endpoint)["step"] == 4
        report.close()
    with pytest.raises(ConnectionRefusedError):
        get(endpoint, "/healthz")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_a_pods_endpoint_answers_over_ipv4_and_ipv6(serve):
    endpoint, _ = serve(host=EVERYWHERE)
    assert [get(endpoint, "/healthz", host=host)[0] for host in ("127.0.0.1", "::1")] == [200, 200]


def test_a_port_that_is_taken_is_told_and_ends_no_run(make_config, caplog):
    with socket.create_server((HERE, 0)) as taken:
        endpoint = ProgressEndpoint(HERE, taken.getsockname()[1])
        report = Report(make_config(), [endpoint])
        report.start()
        report.step(StepRecord(dict(METRICS), [], []))
        report.close()
    assert re.search(r"No progress endpoint: port \d+ cannot be had \(Address already in use\)", caplog.text)


@pytest.mark.parametrize(
    ("fields", "address"),
    [
        ({"localNodes": None}, (EVERYWHERE, 8090)),
        ({"observability": {"prometheus": True}}, ("127.0.0.1", 8090)),
        ({}, None),
    ],
    ids=["on a cluster", "asked for", "not asked for"],
)
def test_others_than_this_machine_may_ask_on_a_cluster_alone(make_config, fields, address, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    made = [sink for sink in sinks_of(make_config(**fields), DriverLog()) if isinstance(sink, ProgressEndpoint)]
    assert [(sink._address, sink._token) for sink in made] == ([(address, TOKEN)] if address else [])
