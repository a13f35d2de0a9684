"""What a job is closed to: others in its namespace without its token, and its own pods."""

import json

from live_cluster import LiveCluster
from manifests import example, kept
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


def test_a_job_is_closed_to_others_and_its_pods_may_do_little(cluster: LiveCluster, namespace: str) -> None:
    job = RunningJob.start(cluster, namespace, example("01-quickstart.yaml", cluster, 200, **kept(every_steps=100)))
    job.wait_for_step(1)
    [head] = [
        service["metadata"]["name"]
        for service in cluster.items("services", namespace)
        if service["metadata"]["name"].endswith("-head-svc")
    ]

    def attempt(token: str) -> dict[str, int]:
        answers: dict[str, int] = json.loads(job.in_reader(f"python3 - {head} '{token}' <<'END'{ATTEMPTS}END"))
        return answers

    assert attempt("") == dict.fromkeys(("submit", "jobs", "progress", "metrics"), 401)
    assert set(attempt("0" * 64).values()) <= {401, 403}
    token = job.run_in("headgroup", "echo $RAY_AUTH_TOKEN").strip()
    assert attempt(token) == {"submit": 200, "jobs": 200, "progress": 200, "metrics": 200}, "the test asks wrongly"

    for group in ("headgroup", "local"):
        said = job.run_in(group, LOOK)
        assert "No such file" in said, "credentials of the cluster"
        assert "Read-only file system" in said
        assert "\n1000\n" in said
        assert "CapEff:\t0000000000000000" in said
