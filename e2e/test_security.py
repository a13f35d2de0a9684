"""What a job is closed to: others in its namespace without its token, and its own pods."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from running_job import RunningJob

# Run by a pod of somebody else, in the same image. It prints what each request is answered.
ATTEMPTS = """
import json, sys, urllib.error, urllib.request
head, token = sys.argv[1:]
def ask(port, path, body=None):
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{head}:{port}{path}", data, headers)
    try:
        return urllib.request.urlopen(request, timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code
print(json.dumps({
    "submit": ask(8265, "/api/jobs/", {"entrypoint": "id"}),
    "jobs": ask(8265, "/api/jobs/"),
    "progress": ask(8090, "/progress"),
    "metrics": ask(8090, "/metrics"),
}))
"""
# Run in a pod of the job.
LOOK = """
ls /var/run/secrets/kubernetes.io 2>&1 || true
touch /opt/x 2>&1 || true
id -u
grep CapEff /proc/1/status
"""
# Run by either: which of the head's ports takes a connection, token or not. It fails where the head has no address.
CONNECT = """
import json, socket, sys
address = socket.getaddrinfo(sys.argv[1], None)[0][4][0]
def opens(port):
    try:
        socket.create_connection((address, port), timeout=3).close()
        return True
    except OSError:
        return False
print(json.dumps([port for port in map(int, sys.argv[2:]) if opens(port)]))
"""


def head_of(job: RunningJob) -> str:
    """Name of its head's service."""
    names = [service["metadata"]["name"] for service in job.cluster.items("services", job.namespace)]
    [head] = [name for name in names if name.endswith("-head-svc")]
    return str(head)


def test_the_ports_of_a_job_are_closed_to_other_pods(job: RunningJob) -> None:
    [policy] = job.cluster.items("networkpolicies", job.namespace)
    spec = policy["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    assert all(
        pod["metadata"]["labels"].items() >= spec["podSelector"]["matchLabels"].items() for pod in job.all_pods()
    )
    opened = [port for rule in spec["ingress"] if "ports" in rule for port in rule["ports"]]
    assert {port["port"] for port in opened} <= {"dashboard", "progress", "metrics"}, "to others than the job's own"
    connect = f"python3 - {head_of(job)} 6379 8265 10001 8080 8090 <<'END'{CONNECT}END"
    assert {6379, 8265, 8090} <= set(json.loads(job.run_in("local", connect))), "its own pods do not reach them either"
    reached = json.loads(job.in_reader(connect))
    if reached:
        pytest.skip(f"rendered, not enforced: this cluster's network plugin lets another pod connect to {reached}")


@contextmanager
def let_in(job: RunningJob) -> Iterator[None]:
    """Opens its ports to the pods of its namespace, where policies are enforced; a request waits until that holds."""
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "others"},
        "spec": {
            "podSelector": {"matchLabels": {"rlhf-operator.io/job": job.name}},
            "ingress": [{"from": [{"podSelector": {}}]}],
        },
    }
    job.cluster.create(policy, namespace=job.namespace)
    try:
        yield
    finally:
        job.cluster.kubectl("delete", "networkpolicy", "others", "-n", job.namespace)


def test_who_has_no_token_is_refused(job: RunningJob) -> None:
    head = head_of(job)

    def attempt(token: str) -> dict[str, int]:
        answers: dict[str, int] = json.loads(job.in_reader(f"python3 - {head} '{token}' <<'END'{ATTEMPTS}END"))
        return answers

    token = job.run_in("headgroup", "echo $RAY_AUTH_TOKEN").strip()
    with let_in(job):
        assert attempt("") == dict.fromkeys(("submit", "jobs", "progress", "metrics"), 401)
        assert set(attempt("0" * 64).values()) <= {401, 403}
        assert attempt(token) == dict.fromkeys(("submit", "jobs", "progress", "metrics"), 200), "the test asks wrongly"


@pytest.mark.parametrize("group", ["headgroup", "local"])
def test_a_pod_may_do_little(job: RunningJob, group: str) -> None:
    said = job.run_in(group, LOOK)
    assert "No such file" in said, "credentials of the cluster"
    assert "Read-only file system" in said
    assert "\n1000\n" in said
    assert "CapEff:\t0000000000000000" in said
