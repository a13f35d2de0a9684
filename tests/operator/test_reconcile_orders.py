"""Whatever happens in whatever order, what a job may never do, it does not."""

import copy
from datetime import timedelta

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from operator_world import OUTAGES, World
from rlhf_operator.kube import RAYCLUSTERS, RLHFJOBS, KubeError
from rlhf_operator.observe import DriverView, cluster_view
from rlhf_operator.ray_jobs import UnreachableError
from rlhf_operator.work_queue import RetrySoon

COUNTERS = ("cluster", "tries", "programFailures", "infrastructureFailures")
ENDS = ("Succeeded", "Failed")
CODES = st.sampled_from([1, 2, 3, 5, 130, None])


class Orders(RuleBasedStateMachine):
    """A world in which anything may happen between two passes, and requests may fail in the middle of one."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.submit(backoffLimit=2, infrastructureBackoffLimit=2, activeDeadlineSeconds=50_000)
        self.world.rays.on_submit = self.check_submission
        self.seen: dict[str, int] = {}
        self.end: str | None = None
        self.deleted = False

    def check_submission(self, submission_id: str) -> None:
        (made,) = self.world.kube.all(RAYCLUSTERS)
        assert cluster_view(made).ready_by_sums, "submitted to a cluster that is not ready"
        assert self.status["submissionId"] == submission_id, "submitted what the status does not tell"

    @property
    def status(self) -> dict:
        return {} if self.deleted else self.world.status()

    @property
    def cluster(self) -> str | None:
        return next(iter(self.world.clusters()), None)

    @property
    def submission(self) -> str | None:
        jobs = self.world.rays.heads.get(f"{self.cluster}-head-svc", {})
        return next((key for key, view in jobs.items() if view.state in ("pending", "running")), None)

    @rule(passes=st.integers(1, 4), seconds=st.sampled_from([1, 12, 31, 310, 2000]))
    def passes(self, passes: int, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)
        for _ in range(passes):
            try:
                self.world.pass_over()
            except (RetrySoon, KubeError, UnreachableError):
                continue

    @rule(seconds=st.sampled_from([0, 12, 31]))
    def good_day(self, seconds: int) -> None:
        """For a while all goes well: pods start, drivers run."""
        self.world.kube.failures.clear()
        self.world.rays.away = False
        self.world.now += timedelta(seconds=seconds)
        for _ in range(3):
            if self.cluster and not cluster_view(self.world.kube.peek(RAYCLUSTERS, self.cluster)).suspended:
                self.world.set_cluster(self.cluster)
            if self.submission:
                self.world.rays.set(self.submission, DriverView("running"))
            self.world.settle()

    @rule(verb=st.sampled_from(["get", "list", "apply", "patch", "delete", "create"]), outage=st.sampled_from(OUTAGES))
    def api_server_fails(self, verb: str, outage: KubeError) -> None:
        if verb == "list":  # the test's own lists are not the operator's
            return
        self.world.kube.failures.setdefault(verb, []).append(outage)

    @rule(away=st.booleans())
    def ray_comes_and_goes(self, away: bool) -> None:
        self.world.rays.away = away

    @precondition(lambda self: self.cluster)
    @rule(ready=st.integers(0, 3), head=st.booleans(), gone=st.booleans())
    def pods_change(self, ready: int, head: bool, gone: bool) -> None:
        if not head and gone:
            self.world.rays.heads.pop(f"{self.cluster}-head-svc", None)
        self.world.set_cluster(self.cluster, ready, head, "HeadPodNotFound" if gone and not head else "")

    @precondition(lambda self: self.cluster)
    @rule()
    def cluster_gets_ready(self) -> None:
        self.world.set_cluster(self.cluster)

    @precondition(lambda self: self.cluster)
    @rule()
    def another_deletes_the_cluster(self) -> None:
        self.world.rays.heads.pop(f"{self.cluster}-head-svc", None)
        self.world.kube.remove(RAYCLUSTERS, self.cluster)

    @precondition(lambda self: self.cluster)
    @rule(held=st.booleans())
    def queue_decides(self, held: bool) -> None:
        changed = copy.deepcopy(self.world.kube.peek(RAYCLUSTERS, self.cluster))
        changed["spec"]["suspend"] = held
        self.world.kube.put(RAYCLUSTERS, changed)
        if held:
            self.world.rays.heads.pop(f"{self.cluster}-head-svc", None)
            self.world.set_cluster(self.cluster, 0, False, conditions={"RayClusterProvisioned": False})

    @precondition(lambda self: self.submission)
    @rule()
    def driver_runs(self) -> None:
        self.world.rays.set(self.submission, DriverView("running"))

    @precondition(lambda self: self.submission)
    @rule(code=CODES)
    def driver_fails(self, code: int | None) -> None:
        self.world.rays.set(self.submission, DriverView("failed", exit_code=code))

    @precondition(lambda self: self.submission)
    @rule()
    def driver_succeeds(self) -> None:
        self.world.rays.set(self.submission, DriverView("succeeded"))

    @precondition(lambda self: not self.deleted)
    @rule(suspend=st.booleans())
    def user_edits(self, suspend: bool) -> None:
        self.world.edit(suspend=suspend)

    @rule()
    def operator_restarts(self) -> None:
        self.world.start_operator()

    @precondition(lambda self: not self.deleted)
    @rule(sure=st.integers(0, 9))
    def user_deletes(self, sure: int) -> None:
        if sure == 0:
            self.world.kube.remove(RLHFJOBS, "math")
            self.deleted = True

    @invariant()
    def one_cluster_at_most(self) -> None:
        assert len(self.world.clusters()) <= 1

    @invariant()
    def counters_never_fall(self) -> None:
        for counter in COUNTERS:
            value = self.status.get(counter, 0)
            assert self.deleted or value >= self.seen.get(counter, 0), counter
            self.seen[counter] = value

    @invariant()
    def an_end_is_an_end(self) -> None:
        if self.end and not self.deleted:
            assert self.status["phase"] == self.end
        self.end = self.status.get("phase") if self.status.get("phase") in ENDS else self.end

    @invariant()
    def every_submission_is_counted(self) -> None:
        assert self.deleted or len({name for name, _ in self.world.rays.submitted}) <= self.seen["tries"]

    def teardown(self) -> None:
        """On a good day again, it comes to rest; and where the job has ended or is gone, nothing is left of it."""
        self.world.kube.failures.clear()
        self.world.rays.away = False
        self.world.settle(passes=40)
        if self.deleted or self.status.get("phase") in (*ENDS, "Suspended"):
            queued = self.status.get("rayCluster") is not None
            assert queued or self.world.clusters() == []


def test_no_order_of_events_breaks_what_always_holds():
    chosen = settings(
        max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    run_state_machine_as_test(Orders, settings=chosen)
