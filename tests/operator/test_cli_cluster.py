"""The commands for a cluster, against a small double of an API server over a real socket."""

import json
import re
from pathlib import Path

import pytest
import yaml
from api_server_double import EVENTS, JOBS, PODS, ApiServerDouble
from cluster_commands import DONE, TRAINING, becomes, condition, job_with, rlhf
from kubernetes.config import kube_config
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "01-quickstart.yaml"


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


PENDING, TRAINS = {"phase": "Pending"}, {"phase": "Training", "conditions": [condition("Training")]}
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
