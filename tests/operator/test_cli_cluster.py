"""The commands for a cluster, against a small double of an API server over a real socket."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import api_server_double
import pytest
import yaml
from api_server_double import CLUSTERS, EVENTS, JOBS, PODS, SECRETS, TOKEN, ApiServerDouble
from kubernetes.config import kube_config
from rlhf_operator import cli, kube
from ruamel.yaml import YAML
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "01-quickstart.yaml"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServerDouble]:
    """The double, named by the kubeconfig that is found; the client reads KUBECONFIG once, when it is imported."""
    with ApiServerDouble() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "here",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        monkeypatch.setattr(cli.follow, "LOOK_SECONDS", 0.01)
        monkeypatch.setattr(kube, "ATTEMPTS", 1)
        yield server
        server.shutdown()


def condition(kind: str, value: str = "True", message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": value, "reason": "Because", "message": message,
            "lastTransitionTime": "2020-01-01T00:00:00Z", "observedGeneration": 1}  # fmt: skip


def cluster_with(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "uid": "c1", "resourceVersion": "1"}
    metadata |= {"creationTimestamp": "2020-01-01T00:00:00Z"}
    return {"metadata": metadata, "status": {"head": {"serviceName": "job-1-head-svc"}}}


def job_with(name: str = "job", **fields: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": "u1",
        "generation": 1,
        "creationTimestamp": "2020-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": {"backoffLimit": 3}, "status": fields}


def rlhf(*arguments: object) -> Any:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


TRAINING = {
    "phase": "Training", "message": "step 12 of 200", "gpus": 16, "cluster": 1, "rayCluster": "job-1", "try": 2,
    "tries": 2, "submissionId": "job-1-2", "pools": [{"name": "train", "desired": 2, "ready": 2}],
    "poolSummary": "train 2/2", "programFailures": 1,
    "conditions": [condition("Accepted"), condition("Training", message="it\ntrains")],
    "failures": [{"kind": "Program", "cluster": 1, "try": 1, "reason": "NotFinite", "message": "a loss was NaN",
                  "time": "2020-01-01T00:00:00Z", "step": 7}],
    "progress": {"step": 12, "steps": 200, "reward": 0.2314, "kl": 0.0021, "tokensPerSecond": 812.4,
                 "weightVersion": 12, "lastCheckpoint": "/checkpoints/step-000010", "etaSeconds": 3700},
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- apply


def test_apply_sends_what_was_written_and_says_what_that_changed(server, tmp_path):
    first = rlhf("apply", QUICKSTART)
    assert (first.exit_code, first.output) == (0, "rlhfjob.rlhf-operator.io/quickstart created\n")
    method, path, query = server.asked[-1]
    assert (method, path, query["fieldManager"], query["force"]) == ("PATCH", f"{JOBS}/quickstart", "rlhf", "false")
    assert server.objects[path]["spec"] == YAML(typ="safe", pure=True).load(QUICKSTART.read_text())["spec"]
    assert rlhf("apply", "-f", QUICKSTART).output.endswith("unchanged\n")
    (tmp_path / "job.yaml").write_text(re.sub(r"steps: \d+", "steps: 7", QUICKSTART.read_text()))
    assert rlhf("apply", tmp_path / "job.yaml").output.endswith("configured\n")
    labelled = re.sub(r"(name: quickstart)", r"\1\n  labels: {team: a}", (tmp_path / "job.yaml").read_text(), count=1)
    (tmp_path / "job.yaml").write_text(labelled)
    assert rlhf("apply", tmp_path / "job.yaml", "--dry-run", "server").output.endswith("configured (server dry run)\n")
    assert rlhf("apply", tmp_path / "job.yaml").output.endswith("configured\n")
    server.objects[f"{JOBS}/quickstart"] |= {"status": {"phase": "Training"}}
    assert rlhf("apply", tmp_path / "job.yaml").output.endswith("unchanged\n")


def test_apply_tells_every_mistake_and_applies_nothing(server, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(re.sub(r"steps: \d+", "steps: 0", QUICKSTART.read_text()).replace("batchSize", "batchsize"))
    result = rlhf("apply", QUICKSTART, bad, tmp_path / "nowhere.yaml")
    assert result.exit_code == 2
    assert [line.split(": got")[0] for line in result.stderr.splitlines()] == [
        f"{bad}: spec.data.batchsize", f"{bad}: spec.training.steps", str(tmp_path / "nowhere.yaml")
    ]  # fmt: skip
    assert server.asked == []


def test_dry_runs_change_nothing(server):
    assert rlhf("apply", QUICKSTART, "--dry-run", "client").exit_code == 0
    assert server.asked == []
    assert rlhf("apply", QUICKSTART, "--dry-run", "server").output.endswith("created (server dry run)\n")
    assert server.asked[-1][2]["dryRun"] == "All"
    assert server.objects == {}


def test_a_namespace_that_contradicts_the_manifest(server, tmp_path):
    (tmp_path / "job.yaml").write_text(
        QUICKSTART.read_text().replace("name: quickstart", "name: job\n  namespace: mine")
    )
    result = rlhf("apply", tmp_path / "job.yaml", "-n", "yours")
    assert (result.exit_code, server.asked) == (2, [])
    assert "metadata.namespace: got `mine`; expected `yours`" in result.stderr


# --------------------------------------------------------------------------------------------------------------- get


def test_get_is_a_table(server):
    server.objects |= {
        f"{JOBS}/{name}": job_with(name, **fields) for name, fields in {"zero": {}, "job": TRAINING}.items()
    }
    lines = rlhf("get").output.splitlines()
    assert [re.split(r"\s{3,}", line)[:6] for line in lines] == [
        ["NAME", "PHASE", "STEP", "REWARD", "GPUS", "TRIES"],
        ["job", "Training", "12/200", "0.231", "16", "2"],
        ["zero", "-", "-", "-", "-", "-"],
    ]
    assert re.search(r"\d+d", lines[1])
    everywhere = rlhf("get", "-A", "-o", "wide").output
    assert all(part in everywhere for part in ("NAMESPACE", "default", "train 2/2", "812", "job-1", "step 12 of 200"))


def test_get_gives_whole_objects_and_names(server):
    server.objects[f"{JOBS}/job"] = job_with(**TRAINING)
    assert json.loads(rlhf("get", "job", "-o", "json").output)["status"] == TRAINING
    assert yaml.safe_load(rlhf("get", "-o", "yaml").output)["items"][0]["status"] == TRAINING
    assert rlhf("get", "-o", "name").output == "rlhfjob.rlhf-operator.io/job\n"


def test_get_of_nothing_says_so(server):
    result = rlhf("get")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "No jobs in namespace default.\n")


# ------------------------------------------------------------------------------------------------------------ status


def test_status_is_all_about_a_job(server):
    server.objects[f"{JOBS}/job"] = job_with(**TRAINING)
    page = rlhf("status", "job").output
    for part in (
        "Training: step 12 of 200", "█░", "step 12 of 200, 61m to go", "reward 0.231, KL 0.0021, tokens/s 812",
        "weights v12", "/checkpoints/step-000010", "job-1, try 2 (number 2)", "train 2/2 ready; 16 GPUs", "it trains",
        "Failures: program 1 of 3", "NotFinite", "cluster 1, try 1, step 7", "Next: `rlhf logs -f job`",
    ):  # fmt: skip
        assert part in page, part


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "does it run?"),
        ({"phase": "Suspended"}, "rlhf resume job"),
        ({"phase": "Pending", "conditions": [condition("Accepted", "False")]}, "mend the manifest"),
        ({"phase": "Provisioning", "conditions": [condition("PlacementFeasible", "False")]}, "add nodes"),
        ({"phase": "Provisioning"}, "rlhf events job"),
        ({"phase": "Failed"}, "rlhf delete job"),
        ({"phase": "Succeeded"}, "the trained model"),
        ({"phase": "Restarting"}, "goes on by itself"),
    ],
    ids=lambda value: value.get("phase", "new") if isinstance(value, dict) else "",
)
def test_status_says_what_to_do_next(server, fields, said):
    server.objects[f"{JOBS}/job"] = job_with(**fields)
    assert said in rlhf("status", "job").output.partition("Next: ")[2]


def test_a_status_of_another_release_is_read_as_far_as_it_is_known(server):
    server.objects[f"{JOBS}/job"] = job_with(**TRAINING, mood="cheerful")
    assert "step 12 of 200" in rlhf("status", "job").output


def test_a_status_that_cannot_be_read_is_told(server):
    server.objects[f"{JOBS}/job"] = job_with(phase="Dreaming")
    result = rlhf("status", "job")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 2)
    assert "status.phase: got 'Dreaming'" in result.stderr
    assert "rlhf get job -o yaml" in result.stderr


# ------------------------------------------------------------------------------------------------------------ events


def test_events_are_those_of_the_job_and_what_it_owns_in_order(server):
    told = [("RLHFJob", "job", "b"), ("RLHFJob", "job-1", "x"), ("RayCluster", "job-1", "c")]
    told += [("Pod", "job-1-head-x", "a"), ("Pod", "job-1-1-head-x", "x"), ("Pod", "other-1-head", "x")]
    for index, (kind, name, reason) in enumerate(told):
        time = f"2020-01-01T00:00:0{ord(reason) - ord('a') if reason != 'x' else 9}Z"
        fields = {"reason": reason, "type": "Normal", "message": "m", "count": 2, "lastTimestamp": time, "metadata": {}}
        server.objects[f"{EVENTS}/{index}"] = {"involvedObject": {"kind": kind, "name": name}, **fields}
    lines = rlhf("events", "job").output.splitlines()
    assert [re.split(r"\s{3,}", line)[2:] for line in lines[1:]] == [
        ["a", "pod/job-1-head-x", "m (x2)"],
        ["b", "rlhfjob/job", "m (x2)"],
        ["c", "raycluster/job-1", "m (x2)"],
    ]


# -------------------------------------------------------------------------------------------- wait, suspend, delete


def becomes(**fields: Any) -> Any:
    return lambda server: server.objects.__setitem__(f"{JOBS}/job", job_with(**fields))


def until(holds: Any, step: Any) -> Any:
    """A step of the story that waits for something to hold."""

    def look(server: ApiServerDouble) -> None:
        if holds(server):
            step(server)
        else:
            server.story.insert(0, look)

    return look


PENDING, TRAINS = {"phase": "Pending"}, {"phase": "Training", "conditions": [condition("Training")]}
DONE = {"phase": "Succeeded", "conditions": [condition("Succeeded")]}
FAILED = {"phase": "Failed", "message": "no\nluck", "conditions": [condition("Failed")]}


@pytest.mark.parametrize(
    ("story", "wanted", "code", "said"),
    [
        ([PENDING, DONE], "Succeeded", 0, "Pending\nSucceeded\n"),
        ([TRAINS], "Training", 0, "Training\n"),
        ([DONE], "Training", 0, "Succeeded\n"),
        ([FAILED], "Succeeded", 1, "Failed: no luck\n"),
        ([FAILED], "Failed", 0, "Failed: no luck\n"),
    ],
    ids=["succeeds", "trains", "has trained", "fails", "failure is waited for"],
)
def test_wait_ends_with_the_condition_or_when_it_cannot_come(server, story, wanted, code, said):
    server.story = [becomes(**step) for step in story]
    result = rlhf("wait", "job", "--for", wanted, "--timeout", "30s")
    assert (result.exit_code, result.stdout) == (code, said)


def test_wait_for_a_job_that_is_deleted_meanwhile(server):
    server.story = [becomes(phase="Pending"), lambda server: server.objects.clear()]
    result = rlhf("wait", "job")
    assert (result.exit_code, result.stdout) == (1, "Pending\nIt was deleted.\n")


def test_wait_has_patience_with_an_api_server_that_is_away(server):
    away = lambda server: server.away.update({JOBS: 3})  # noqa: E731
    server.story = [becomes(phase="Pending"), away, becomes(conditions=[condition("Succeeded")])]
    assert rlhf("wait", "job", "--timeout", "30s").exit_code == 0
    assert server.away == {JOBS: 0}


def test_wait_has_an_end(server):
    server.objects[f"{JOBS}/job"] = job_with(phase="Pending")
    result = rlhf("wait", "job", "--timeout", "0s")
    assert (result.exit_code, result.stderr) == (124, "job: not Succeeded after 0s\n")
    assert rlhf("wait", "job", "--timeout", "soon").exit_code == 2


def test_suspend_and_resume_set_the_field(server):
    server.objects[f"{JOBS}/job"] = job_with(phase="Training")
    assert rlhf("suspend", "job").output == "rlhfjob.rlhf-operator.io/job suspended\n"
    assert server.objects[f"{JOBS}/job"]["spec"] == {"backoffLimit": 3, "suspend": True}
    assert rlhf("suspend", "job").output.endswith("was suspended already\n")
    assert rlhf("resume", "job").output.endswith("resumed\n")
    assert server.objects[f"{JOBS}/job"]["spec"]["suspend"] is False


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_a_job_that_has_ended_is_neither_suspended_nor_resumed(server, command):
    server.objects |= {f"{JOBS}/job": job_with(phase="Failed"), f"{JOBS}/other": job_with("other")}
    server.objects[f"{JOBS}/other"]["spec"]["suspend"] = command == "resume"
    result = rlhf(command, "job", "other")
    assert (result.exit_code, result.output.splitlines()[0]) == (
        0, "rlhfjob.rlhf-operator.io/job has ended (Failed): nothing is changed")  # fmt: skip
    assert "suspend" not in server.objects[f"{JOBS}/job"]["spec"]
    assert server.objects[f"{JOBS}/other"]["spec"]["suspend"] is (command == "suspend")


def test_delete_waits_for_what_the_job_owned(server):
    server.objects |= {f"{JOBS}/job": job_with(), f"{PODS}/p": {"metadata": {"name": "p"}}}
    result = rlhf("delete", "job", "--wait", "--timeout", "0s")
    assert (result.exit_code, result.stderr) == (124, "job: after 0s there still is pod/p\n")
    del server.objects[f"{PODS}/p"]
    server.objects[f"{JOBS}/job"] = job_with()
    assert rlhf("delete", "job", "--wait").output == "rlhfjob.rlhf-operator.io/job deleted\n"


# -------------------------------------------------------------------------------------------------------------- logs


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


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("refusal", "code", "said"),
    [
        ((403, 'rlhfjobs is forbidden: User "eve" cannot get'), 2, 'User "eve" cannot get'),
        ((401, "Unauthorized"), 2, "log in again"),
        ((503, "no endpoints"), 1, "no endpoints; expected an answer"),
        ((418, "teapot"), 1, "teapot"),
    ],
)
def test_what_the_api_server_refuses_is_one_line(server, refusal, code, said):
    server.refusals["GET"] = refusal
    for command in (
        ["get"],
        ["status", "job"],
        ["logs", "job"],
        ["delete", "job"],
        ["apply", QUICKSTART],
        ["wait", "job"],
    ):
        result = rlhf(*command)
        assert (result.exit_code, result.stderr.count("\n")) == (code, 1), result.output
        assert said in result.stderr


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((409, 'conflict with "kubectl": .spec.training.steps'), "--force-conflicts"),
        (
            (422, "RLHFJob is invalid:\n* spec.models: immutable\n* spec.data: immutable"),
            "* spec.models: immutable * spec.data",
        ),
    ],
)
def test_what_cannot_be_applied_is_one_line(server, refusal, said):
    server.refusals["PATCH"] = refusal
    result = rlhf("apply", QUICKSTART)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


def test_a_cluster_without_the_operator_is_told(server):
    server.kinds.discard(JOBS)
    for command in (["get"], ["status", "job"], ["apply", QUICKSTART], ["wait", "job"]):
        result = rlhf(*command)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
        assert "helm install" in result.stderr


def test_a_wrong_name_is_told_with_the_right_ones(server):
    server.objects[f"{JOBS}/job"] = job_with()
    result = rlhf("status", "jbo")
    assert (result.exit_code, result.stderr) == (
        2, "NAME: got `jbo` in namespace default; expected one of job. "
           "Fix: correct the name, or give its namespace with -n\n")  # fmt: skip


def test_without_a_cluster_it_says_what_to_set(monkeypatch, tmp_path):
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = rlhf("get")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "set KUBECONFIG" in result.stderr


def test_a_context_that_is_not_there(server):
    result = rlhf("get", "--context", "elsewhere")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "elsewhere" in result.stderr


def test_an_answer_that_is_not_kubernetes_leaves_no_traceback(server, monkeypatch):
    monkeypatch.setattr(ApiServerDouble, "answer", lambda *_: (200, "<html>a proxy's login page</html>"))
    result = rlhf("get")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
