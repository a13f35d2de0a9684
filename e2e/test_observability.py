"""What Prometheus gets of a job and of the operator, and Ray's dashboard in a browser."""

import base64
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grafana
import httpx
from live_cluster import OPERATOR_NAMESPACE, RELEASE, Json, LiveCluster
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from rlhf_operator.manifests.ports import PROGRESS
from ruamel.yaml import YAML
from running_job import RLHF, RunningJob

MANUAL = Path(__file__).parents[1] / "docs" / "running.md"
PARTS = {"counter": ("_total", "_created"), "histogram": ("_bucket", "_count", "_sum", "_created")}
"""What the names of a metric's samples end in; those of other kinds are the metric's own."""
Families = dict[str, Metric]


def scrape(cluster: LiveCluster, path: str, token: str | None = None) -> Families:
    """The metrics behind the API server's proxy, by name."""
    headers = {"X-Ray-Authorization": f"Bearer {token}"} if token else {}
    answer = cluster.api.get(f"{path}/metrics", headers=headers)
    answer.raise_for_status()
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def operator_metrics(cluster: LiveCluster) -> Families:
    """As the chart's ServiceMonitor finds them: port `metrics` of the operator's service."""
    return scrape(cluster, f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/services/{RELEASE}:metrics/proxy")


def total(families: Families, name: str, /, **labels: str) -> float:
    """Sum of a metric's samples that have these labels."""
    family = families[name]
    names = {name + part for part in PARTS.get(family.type, ("",))[:1]}
    return sum(each.value for each in family.samples if each.name in names and labels.items() <= each.labels.items())


def monitoring_of(job: str) -> list[Json]:
    """The PodMonitor and the NetworkPolicy of the manual, for another job."""
    [text] = re.findall(r"```yaml\n(apiVersion: monitoring.*?)```", MANUAL.read_text(), re.DOTALL)
    return list(YAML(typ="safe").load_all(text.replace("math-ppo", job)))


def selector_of(labels: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())


def test_a_driver_is_scraped_as_the_manual_says(cluster: LiveCluster, job: RunningJob) -> None:
    monitor, policy = monitoring_of(job.name)
    cluster.create(policy, namespace=job.namespace)
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    for selected in (monitor["spec"]["selector"], policy["spec"]["podSelector"]):
        [pod] = cluster.items("pods", job.namespace, selector_of(selected["matchLabels"]))
    [port] = [
        port["containerPort"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [])
        if port["name"] == endpoint["port"]
    ]
    assert port == PROGRESS.number
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": endpoint["port"]}]
    credentials = endpoint["authorization"]["credentials"]
    secret = cluster.get("secret", credentials["name"], job.namespace)
    token = base64.b64decode(secret["data"][credentials["key"]]).decode()

    proxy = f"/api/v1/namespaces/{job.namespace}/pods/{pod['metadata']['name']}:{port}/proxy"
    assert cluster.api.get(f"{proxy}/metrics").status_code == 401
    first = scrape(cluster, proxy, token)
    job.wait_for_step(int(total(first, "rlhf_step")) + 2)
    second = scrape(cluster, proxy, token)
    assert total(second, "rlhf_step") >= total(first, "rlhf_step") + 2
    assert total(second, "rlhf_steps") == 500
    assert total(second, "rlhf_run_info", name=job.name) == 1
    for families in (first, second):
        assert 0 <= total(families, "rlhf_reward_mean") <= 1
        assert total(families, "rlhf_response_tokens") > 0
        assert total(families, "rlhf_time_seconds", phase="update") > 0
    for moving in ("rlhf_reward_mean", "rlhf_tokens_per_second", "rlhf_eta_seconds"):
        assert total(first, moving) != total(second, moving), moving


def test_the_operator_counts_its_passes_and_the_jobs(cluster: LiveCluster, job: RunningJob) -> None:
    first = operator_metrics(cluster)
    deadline = time.monotonic() + 150  # two resyncs, after which it counts the jobs
    while (second := operator_metrics(cluster)) and time.monotonic() < deadline:
        resynced = total(second, "rlhf_operator_last_resync_timestamp_seconds")
        if resynced > total(first, "rlhf_operator_last_resync_timestamp_seconds"):
            break
        time.sleep(1)
    assert total(second, "rlhf_operator_jobs", phase="Training") >= 1
    assert total(second, "rlhf_operator_reconciles") > total(first, "rlhf_operator_reconciles")
    assert total(second, "rlhf_operator_tries") >= 1


def test_every_metric_of_the_grafana_dashboard_is_exported(cluster: LiveCluster, job: RunningJob) -> None:
    families = operator_metrics(cluster).values()
    exported = {family.name + part for family in families for part in PARTS.get(family.type, ("",))}
    asked = {name for _, query in grafana.queries() for name in grafana.NAME.findall(query)}
    assert len(asked) > 8
    assert asked <= exported


@contextmanager
def dashboard(job: RunningJob) -> Iterator[str]:
    """The URL that `rlhf dashboard` prints; Ctrl-C has to end it well."""
    command = [RLHF, "dashboard", job.name, "--no-browser", "--kubeconfig", job.cluster.kubeconfig, "-n", job.namespace]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip() if process.stdout else ""
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()


def test_rays_dashboard_is_shown_here(job: RunningJob) -> None:
    with dashboard(job) as url, httpx.Client(timeout=60) as browser:
        door = url.partition("?")[0]
        assert browser.get(door).status_code == 403, "it lets in who has no key"
        assert browser.get(url).status_code == 200
        page = browser.get(door)
        assert (page.status_code, "<title>Ray Dashboard</title>" in page.text) == (200, True)
        answer = browser.get(f"{door}api/jobs/")
        assert answer.status_code == 200
        assert [each["submission_id"] for each in json.loads(answer.text)] == [f"{job.name}-1-1"]
