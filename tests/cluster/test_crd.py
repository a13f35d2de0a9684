"""The CustomResourceDefinition on a real API server: what it refuses, in which words, and that `rlhf` agrees."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlhf_api import RLHFJob, SpecError
from rlhf_api.status import Condition, Failure, PoolStatus, Progress, RLHFJobStatus
from rlhf_operator.manifest import read_manifest
from rlhf_operator.plan import build_plan
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / "rlhfjobs.rlhf-operator.io.yaml"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
ROLES = ["policy", "rollout", "critic", "reference", "reward"]
FUNCTION = {"name": "digit_share"}
ENV = [{"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]

Json = dict[str, Any]


class Jobs:
    """RLHFJobs of one namespace over the API server's HTTP interface; strict, as kubectl asks for it."""

    def __init__(self, cluster: ControlPlane, namespace: str) -> None:
        self._api = cluster.api
        self._path = f"/apis/rlhf-operator.io/v1alpha1/namespaces/{namespace}/rlhfjobs"

    def refusal(self, manifest: Json) -> str | None:
        """The API server's message about a new job, of which nothing stays; None where it would take it."""
        answer = self._api.post(self._path, params={"dryRun": "All", "fieldValidation": "Strict"}, json=manifest)
        return None if answer.is_success else answer.json()["message"]

    def read(self, file: Path) -> Json:
        """A file of YAML as the API server reads it, of which nothing stays; or its refusal."""
        params = {"dryRun": "All", "fieldValidation": "Strict"}
        headers = {"Content-Type": "application/yaml"}
        return self._api.post(self._path, params=params, content=file.read_bytes(), headers=headers).json()

    def create(self, manifest: Json) -> Json:
        answer = self._api.post(self._path, params={"fieldValidation": "Strict"}, json=manifest)
        answer.raise_for_status()
        return answer.json()

    def get(self, name: str) -> Json:
        return self._api.get(f"{self._path}/{name}").json()

    def change(self, name: str, patch: Json, part: str = "") -> str | None:
        """Merge a patch into a job or a subresource; the message of a refusal."""
        answer = self._api.patch(
            f"{self._path}/{name}{part}", json=patch, headers={"Content-Type": "application/merge-patch+json"}
        )
        return None if answer.is_success else answer.json()["message"]


@pytest.fixture(scope="module")
def installed(api_server: ControlPlane) -> ControlPlane:
    api_server.kubectl("apply", "--server-side", "-f", CRD)
    api_server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd/rlhfjobs.rlhf-operator.io")
    return api_server


@pytest.fixture
def jobs(installed: ControlPlane, namespace: str) -> Jobs:
    return Jobs(installed, namespace)


def test_it_is_sound_and_small_enough_for_client_side_apply(installed: ControlPlane) -> None:
    conditions = installed.get("crd", "rlhfjobs.rlhf-operator.io")["status"]["conditions"]
    assert {item["type"]: item["status"] for item in conditions} == {"NamesAccepted": "True", "Established": "True"}
    assert "configured" in installed.kubectl("apply", "--dry-run=server", "-f", CRD)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_example_is_taken_and_means_the_same(jobs: Jobs, file: Path) -> None:
    manifest = YAML(typ="safe", pure=True).load(file)
    assert jobs.refusal(manifest) is None
    assert RLHFJob.from_cluster(jobs.create(manifest)).spec == read_manifest(file).spec


def grouped(spec: Json, *groups: Json, tensor_parallel: int = 1, **pool: Any) -> None:
    spec["nodePools"] = [{"name": "p", **pool}]
    spec["placement"] = {"groups": [{"name": f"g{i}", "pool": "p", **group} for i, group in enumerate(groups)]}
    spec["rollout"] = {"tensorParallelSize": tensor_parallel}


BAD: list[tuple[str, Callable[[Json], Any], str]] = [
    ("no algorithm", lambda spec: spec.update(algorithm={}), "got none of them; expected exactly one of ppo, grpo"),
    (
        "two algorithms",
        lambda spec: spec.update(algorithm={"ppo": {}, "rloo": {}}),
        "got `ppo` `rloo`; expected exactly one of ppo, grpo, rloo, reinforcePlusPlus. Fix: give one of them",
    ),
    (
        "two sources of a policy",
        lambda spec: spec["models"]["policy"].update(path="/a"),
        "got `path` `random`; expected exactly one of path, random",
    ),
    ("no source of a critic", lambda spec: spec["models"].update(critic={}), "spec.models.critic"),
    (
        "two sources of a reference",
        lambda spec: spec["models"].update(reference={"path": "/a", "random": {"architecture": "qwen2"}}),
        "got path and random; expected one of them at most",
    ),
    ("no reward", lambda spec: spec["rewards"][0].pop("function"), "exactly one of function, model"),
    ("no reward function", lambda spec: spec["rewards"][0].update(function={}), "exactly one of name, importPath"),
    (
        "two sources of prompts",
        lambda spec: spec["data"].update(prompts={"path": "/a", "builtin": "arithmetic"}),
        "got path and builtin; expected one of them at most",
    ),
    (
        "two sources of prompts to evaluate on",
        lambda spec: spec["data"].update(evaluation={"prompts": {"path": "/a", "builtin": "arithmetic"}}),
        "spec.data.evaluation.prompts",
    ),
    ("two values", lambda spec: spec.update(env=ENV), "got value and valueFrom; expected one of them at most"),
    (
        "no value's source",
        lambda spec: spec["nodePools"][0].update(env=[{"name": "A", "valueFrom": {}}]),
        "exactly one of secretKeyRef, configMapKeyRef",
    ),
    (
        "a pool that is not there",
        lambda spec: grouped(spec, {"roles": ROLES, "pool": "q"}),
        'group `g0`: got pool `q`; expected one of ["p"]. Fix: name a pool',
    ),
    (
        "a role twice",
        lambda spec: grouped(spec, {"roles": ROLES}, {"roles": ["reward"]}),
        "got `reward` in several groups; expected each role once",
    ),
    ("a role twice in a group", lambda spec: grouped(spec, {"roles": [*ROLES, "reward"]}), "Duplicate value"),
    ("a role nowhere", lambda spec: grouped(spec, {"roles": ROLES[:3]}), "got no `reference` `reward`; expected each"),
    (
        "a critic without ppo",
        lambda spec: spec.update(algorithm={"grpo": {}}, models=spec["models"] | {"critic": {"path": "/c"}}),
        "got a critic; expected none",
    ),
    (
        "more GPUs than the pool",
        lambda spec: grouped(spec, {"roles": ROLES, "workers": 17}, nodes=2, gpusPerNode=8),
        "group `g0`: got 17 workers of 1 GPUs; expected at most the 8 GPUs on each of 2 nodes of pool `p`. Fix:",
    ),
    (
        "more GPUs than a node",
        lambda spec: grouped(spec, {"roles": ROLES, "workers": 16, "strategy": "STRICT_PACK"}, nodes=2, gpusPerNode=8),
        "group `g0`: got 16 workers of 1 GPUs on one node (STRICT_PACK); expected at most the 8 GPUs of a node",
    ),
    (
        "more bundles than nodes",
        lambda spec: grouped(spec, {"roles": ROLES, "workers": 3, "strategy": "STRICT_SPREAD"}, nodes=2),
        "group `g0`: got 3 workers, each or each engine on a node of its own (STRICT_SPREAD)",
    ),
    ("bounds", lambda spec: spec["nodePools"][0].update(minNodes=2), "expected minNodes <= nodes <= maxNodes"),
    (
        "a training pool that scales",
        lambda spec: grouped(spec, {"roles": ROLES}, maxNodes=2),
        "group `g0`: got pool `p`, which scales; expected minNodes and maxNodes equal to nodes",
    ),
    ("all roles on a pool that scales", lambda spec: spec["nodePools"][0].update(maxNodes=2), "without a placement"),
    ("pools of one name", lambda spec: spec["nodePools"].append({"name": "local"}), "Duplicate value"),
    ("an unknown field", lambda spec: spec.update(trainng={}), 'unknown field "spec.trainng"'),
    ("a planned value", lambda spec: spec["training"].update(mode="async"), "spec.training.mode: Unsupported value"),
    ("a fraction as a quantity", lambda spec: spec["nodePools"][0].update(cpu=0.5), "spec.nodePools[0].cpu"),
]


@pytest.mark.parametrize(("spoil", "message"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_what_is_refused_is_said_in_words(jobs: Jobs, manifest: Json, spoil: Any, message: str) -> None:
    spoil(manifest["spec"])
    assert message in str(jobs.refusal(manifest))
    with pytest.raises(SpecError):
        build_plan(RLHFJob.parse(manifest), "runs/job")


GOOD: list[tuple[str, Callable[[Json], Any]]] = [
    ("null is as good as nothing", lambda spec: spec["algorithm"].update(grpo=None)),
    ("null sets no bound", lambda spec: spec.update(algorithm={"ppo": {"valueClipRange": None, "dualClip": None}})),
    ("every optional value null", lambda spec: spec["nodePools"][0].update(device=None, affinity=None, rdma=None)),
    ("no KL, no reference", lambda spec: (spec.update(algorithm={"ppo": {"kl": {"coefficient": 0}}}),
                                          grouped(spec, {"roles": ["policy", "rollout", "critic", "reward"]}))),
    ("a fallback", lambda spec: grouped(
        spec, {"roles": ROLES, "workers": 16, "strategy": "STRICT_PACK", "fallback": ["PACK"]}, nodes=2, gpusPerNode=8
    )),
    ("whole engines a node", lambda spec: grouped(
        spec, {"roles": ["rollout"], "workers": 4, "strategy": "STRICT_SPREAD"}, {"roles": ["policy", "critic"]},
        {"roles": ["reference", "reward"]}, tensor_parallel=2, nodes=2, gpusPerNode=4, device="cpu"
    )),
    ("a rollout pool that scales", lambda spec: (
        grouped(spec, {"roles": ["policy", "critic", "reference", "reward"]}, {"roles": ["rollout"], "pool": "r"}),
        spec["nodePools"].append({"name": "r", "minNodes": 1, "maxNodes": 4}))),
    ("raw objects", lambda spec: spec["nodePools"][0].update(
        affinity={"nodeAffinity": {"any": ["thing"]}}, podTemplate={"spec": {"hostUsers": False}})),
    ("rows of both kinds", lambda spec: spec["data"].update(prompts={"inline": ["1+1=", {"prompt": "a", "n": 1}]})),
]  # fmt: skip


@pytest.mark.parametrize("change", [good[1] for good in GOOD], ids=[good[0] for good in GOOD])
def test_what_is_right_is_taken_and_read_back_as_it_was_meant(jobs: Jobs, manifest: Json, change: Any) -> None:
    change(manifest["spec"])
    build_plan(RLHFJob.parse(manifest), "runs/job")
    assert jobs.refusal(manifest) is None
    assert RLHFJob.from_cluster(jobs.create(manifest)).spec == RLHFJob.parse(manifest).spec


@pytest.mark.parametrize(
    ("name", "right"),
    [("a" * 45, True), ("a" * 46, False), ("1a", False), ("a.b", False), ("a-1", True)],
)
def test_names_at_the_boundary(jobs: Jobs, manifest: Json, name: str, right: bool) -> None:
    manifest["metadata"]["name"] = name
    message = jobs.refusal(manifest)
    assert (message is None) == right
    assert right or "metadata.name: expected at most 45" in str(message)


def test_labels_at_the_boundary(jobs: Jobs, manifest: Json) -> None:
    for length, right in ((63, True), (64, False)):
        manifest["spec"]["rayCluster"] = {"labels": {"queue": "a" * length}}
        assert (jobs.refusal(manifest) is None) == right
        if right:
            RLHFJob.parse(manifest)
        else:
            with pytest.raises(SpecError, match=r"rayCluster\.labels\.queue"):
                RLHFJob.parse(manifest)


@pytest.mark.parametrize(
    "number", ["60", "60.0", "6e1", "6.0E+1", "0x3C", "0o74", "+60", "6_0", "060", "08", "0b11", "'60'", "1.5"]
)
def test_whole_numbers_are_read_alike(jobs: Jobs, tmp_path: Path, number: str) -> None:
    agree(jobs, tmp_path, steps=number)


@pytest.mark.parametrize("number", ["1e-6", "1.0e-6", "0.000001", ".5", "5.", "1E-6", "1", "1e400", ".inf", "'1'"])
def test_fractions_are_read_alike(jobs: Jobs, tmp_path: Path, number: str) -> None:
    agree(jobs, tmp_path, rate=number)


@pytest.mark.parametrize(
    "quantity",
    ["4", "'4'", "500m", "'1.5'", "1.5", "2.0", "1e3", "'1e3'", "1k", ".5", "+2", "'+2'", "-1", "'4 '", "4Q", "'1.'"],
)
def test_quantities_are_read_alike(jobs: Jobs, tmp_path: Path, quantity: str) -> None:
    agree(jobs, tmp_path, cpu=quantity)


@pytest.mark.parametrize(
    "text", ["yes", "on", "n", "2026-01-01", "null", "~", "1.0", "''", "'a: b'", "!!str 1", "!!str yes", "'no'"]
)
def test_words_are_read_alike(jobs: Jobs, tmp_path: Path, text: str) -> None:
    agree(jobs, tmp_path, image=text)


def agree(jobs: Jobs, folder: Path, steps: str = "1", rate: str = "1", cpu: str = "1", image: str = "a") -> None:
    """That a file is refused by the API server and by rlhf, or that both read the same."""
    file = folder / "job.yaml"
    file.write_text(f"""\
apiVersion: rlhf-operator.io/v1alpha1
kind: RLHFJob
metadata: {{name: numbers}}
spec:
  image: {image}
  models: {{policy: {{path: /a}}}}
  rewards: [{{name: digits, function: {{name: digit_share}}}}]
  data: {{prompts: {{builtin: arithmetic}}}}
  algorithm: {{ppo: {{}}}}
  training: {{steps: {steps}, optimizer: {{learningRate: {rate}}}}}
  nodePools: [{{name: local, cpu: {cpu}}}]
""")
    answer = jobs.read(file)
    theirs = RLHFJob.from_cluster(answer).spec if answer["kind"] == "RLHFJob" else None
    try:
        mine = read_manifest(file).spec
    except SpecError:
        mine = None
    assert mine == theirs, answer


def test_a_key_twice_is_refused_by_both(jobs: Jobs, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text((ROOT / "examples" / "01-quickstart.yaml").read_text() + "\nkind: RLHFJob\n")
    assert 'key "kind" already set' in jobs.read(file)["message"]
    with pytest.raises(SpecError, match="each key once"):
        read_manifest(file)


def pools() -> st.SearchStrategy[list[Json]]:
    pool = st.fixed_dictionaries(
        {"nodes": st.integers(1, 3), "gpusPerNode": st.sampled_from([0, 1, 2, 8])},
        optional={"device": st.sampled_from(["cpu", "cuda"]), "maxNodes": st.integers(1, 4)},
    )
    return st.lists(pool, min_size=1, max_size=3).map(lambda made: [{"name": f"p{i}"} | p for i, p in enumerate(made)])


def groups() -> st.SearchStrategy[list[Json]]:
    strategy = st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
    group = st.fixed_dictionaries(
        {"workers": st.integers(1, 17), "pool": st.sampled_from(["p0", "p1", "p2"])},
        optional={
            "gpusPerWorker": st.sampled_from([0, 0.3, 0.5, 1, 1.0, 2]),
            "strategy": strategy,
            "fallback": st.lists(strategy, max_size=2),
        },
    )

    def with_roles(made: list[Json], homes: list[int]) -> list[Json]:
        roles: list[list[str]] = [[] for _ in made]
        for role, home in zip(ROLES, homes, strict=True):
            if home < 9:
                roles[home % len(made)].append(role)
        named = [{"name": f"g{i}", "roles": r} | g for i, (g, r) in enumerate(zip(made, roles, strict=True)) if r]
        return named or [{"name": "g", "pool": "p0", "roles": list(ROLES)}]

    homes = st.lists(st.integers(0, 9), min_size=5, max_size=5)
    return st.builds(with_roles, st.lists(group, min_size=1, max_size=3), homes)


ALGORITHM = st.sampled_from(
    [{"ppo": {}}, {"ppo": {"kl": {"coefficient": 0}}}, {"rloo": {}}, {"grpo": {"kl": {"coefficient": 0}}}]
)


def test_no_placement_that_the_planner_takes_is_refused(jobs: Jobs, manifest: Json) -> None:
    tally = {"taken by both": 0, "refused by both": 0, "left to the operator": 0}

    @given(pools=pools(), groups=groups(), algorithm=ALGORITHM, size=st.integers(1, 2))
    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    def compare(pools: list[Json], groups: list[Json], algorithm: Json, size: int) -> None:
        job = copy.deepcopy(manifest)
        rollout = {"samplesPerPrompt": 2, "tensorParallelSize": size}
        job["spec"] |= {"nodePools": pools, "placement": {"groups": groups}, "algorithm": algorithm, "rollout": rollout}
        try:
            build_plan(RLHFJob.parse(job), "runs/job")
        except SpecError:
            tally["refused by both" if jobs.refusal(job) else "left to the operator"] += 1
        else:
            assert jobs.refusal(job) is None
            tally["taken by both"] += 1

    compare()
    assert all(tally.values()), tally


@pytest.fixture
def job(jobs: Jobs, manifest: Json) -> Json:
    manifest["spec"]["data"]["prompts"] = {"inline": ["1+1=", {"prompt": "a"}]}
    return jobs.create(manifest)


def set_status(jobs: Jobs, **status: Any) -> None:
    assert jobs.change("job", {"status": status}, "/status") is None


MODEL = {"models": {"policy": {"random": {"seed": 7}}}}
ROWS = {"data": {"prompts": {"inline": ["2+2="]}}}
IMAGE, TOLERATIONS = {"image": "other"}, {"nodePools": [{"name": "local", "tolerations": [{"key": "a"}]}]}


def test_before_it_starts_all_of_a_job_can_change(jobs: Jobs, job: Json) -> None:
    set_status(jobs, phase="Pending", startTime="2026-01-01T00:00:00Z")
    for patch in (MODEL, ROWS, IMAGE, TOLERATIONS):
        assert jobs.change("job", {"spec": patch}) is None


def test_while_a_cluster_runs_only_limits_and_suspend_can_change(jobs: Jobs, job: Json) -> None:
    set_status(jobs, phase="Training", tries=1)
    refused = {"models": MODEL, "data.prompts": ROWS, "image": IMAGE, "nodePools": TOLERATIONS}
    for name, patch in refused.items():
        message = str(jobs.change("job", {"spec": patch}))
        assert f"got a change of `{name}`" in message
        assert "delete the job and create another" in message
    for patch in ({"backoffLimit": 9}, {"activeDeadlineSeconds": 9}, {"ttlSecondsAfterFinished": 9}, {"suspend": True}):
        assert jobs.change("job", {"spec": patch}) is None
    assert jobs.get("job")["metadata"]["generation"] == 5


def test_a_suspended_job_keeps_what_its_checkpoints_were_trained_from(jobs: Jobs, job: Json) -> None:
    set_status(jobs, phase="Suspended", tries=1)
    for name, patch in {"models": MODEL, "data.prompts": ROWS, "data.seed": {"data": {"seed": 3}}}.items():
        assert f"got a change of `{name}`; expected none: the checkpoints" in str(jobs.change("job", {"spec": patch}))
    for patch in (IMAGE, TOLERATIONS, {"data": {"maxResponseLength": 9}}, {"training": {"steps": 9}, "suspend": False}):
        assert jobs.change("job", {"spec": patch}) is None


def test_a_cluster_that_a_queue_suspends_stays_as_it_was_planned(jobs: Jobs, job: Json) -> None:
    set_status(jobs, phase="Suspended", rayCluster="job-1")
    assert "it cannot change while there is a cluster" in str(jobs.change("job", {"spec": IMAGE}))
    set_status(jobs, phase="Suspended", rayCluster=None)
    assert jobs.change("job", {"spec": IMAGE}) is None


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_job_that_has_ended_stays_as_it_was(jobs: Jobs, job: Json, phase: str) -> None:
    set_status(jobs, phase=phase)
    assert "the job has ended" in str(jobs.change("job", {"spec": IMAGE}))
    assert jobs.change("job", {"spec": {"ttlSecondsAfterFinished": 1}}) is None


def test_the_whole_status_is_kept_and_shown(jobs: Jobs, job: Json, installed: ControlPlane, namespace: str) -> None:
    now = "2026-01-01T00:00:00Z"
    status = RLHFJobStatus(
        observed_generation=1, phase="Training", message="step 3 of 60", gpus=8, cluster=1, ray_cluster="job-1", try_=2,
        conditions=[Condition(type="Training", status="True", reason="Running", message="m", last_transition_time=now,
                              observed_generation=1)],
        submission_id="job-1-2", tries=2, pools=[PoolStatus(name="local", desired=1, ready=1)],
        pool_summary="local 1/1", program_failures=1, infrastructure_failures=0, start_time=now, training_time=now,
        progress=Progress(step=3, steps=60, reward=0.25, kl=0.5, tokens_per_second=10.5, weight_version=3,
                          last_checkpoint="/c/step-2", eta_seconds=100),
        failures=[Failure(kind="Program", cluster=1, try_=1, reason="Crash", message="m", time=now, step=1)],
        unreachable_since=now, completion_time=now,
    )  # fmt: skip
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    set_status(jobs, **written)
    assert jobs.get("job")["status"] == written
    header, row = installed.kubectl("get", "rlhf", "-n", namespace, "-o", "wide").splitlines()
    assert header.split() == [
        "NAME", "PHASE", "STEP", "REWARD", "GPUS", "TRY", "AGE", "POOLS", "KL", "TOKENS/S", "RAYCLUSTER", "MESSAGE"
    ]  # fmt: skip
    assert row.split()[:6] == ["job", "Training", "3", "0.25", "8", "2"]
    assert "job" in installed.kubectl("get", "all", "-n", namespace)


def test_explain_reads_well(installed: ControlPlane) -> None:
    text = installed.kubectl("explain", "rlhfjob.spec.placement")
    for line in (
        "Roles to pools. Default: every role that the algorithm needs in one group on",
        "groups\t<[]Object> -required-",
        "Disjoint groups of roles.",
        "enum: PACK, SPREAD, STRICT_PACK, STRICT_SPREAD",
    ):
        assert line in text
    assert "name\t<string> -required-" in installed.kubectl("explain", "rlhfjob.spec.nodePools")
