"""What the end of a try means, and when the next one may begin."""

import json

import pytest
from operator_values import at, failure, status, terms
from rlhf_api.run_end import RunEnd
from rlhf_operator.observe import DriverView
from rlhf_operator.policies.retries import end_of, exhausted, not_before


def ended(code, **changes):
    return end_of(DriverView("failed", exit_code=code, **changes))


@pytest.mark.parametrize(
    ("code", "kind", "reason", "fatal"),
    [
        (1, "Program", "Unexpected", False),
        (2, "Program", "BadInput", True),
        (3, "Program", "RewardFailed", False),
        (4, "Program", "NotFinite", True),
        (5, "Infrastructure", "InfrastructureLost", False),
        (6, "Program", "CheckpointFailed", False),
        (130, "Infrastructure", "Interrupted", False),
        (143, "Infrastructure", "Interrupted", False),
        (-2, "Infrastructure", "Interrupted", False),
        (-15, "Infrastructure", "Interrupted", False),
        (-9, "Program", "Unexpected", False),
    ],
)
def test_an_exit_code_says_whose_fault_it_was(code, kind, reason, fatal):
    end = ended(code)
    assert (end.kind, end.reason, end.fatal) == (kind, reason, fatal)


def test_a_driver_that_goes_on_has_not_ended():
    for state in ("unknown", "pending", "running", "unreachable"):
        assert end_of(DriverView(state)) is None


def test_success_is_nobodys_fault():
    assert end_of(DriverView("succeeded")).kind is None


def test_the_last_line_of_the_log_tells_more_than_rays_message():
    log = "step 1\n" + RunEnd.of(5, "worker actor-3 was lost").line({"steps": 4})
    end = end_of(DriverView("failed", message="Job entrypoint command failed", exit_code=1, log=log))
    assert (end.kind, end.reason) == ("Infrastructure", "InfrastructureLost")
    assert "worker actor-3 was lost" in end.message


@pytest.mark.parametrize("number", ["step", "steps", "weightVersion", "etaSeconds"])
def test_a_last_word_with_a_number_that_no_status_can_hold_is_none(number):
    progress = {"step": 1, "steps": 2, number: 2**63}
    word = {"exitCode": 5, "reason": "InfrastructureLost", "message": "lost", "progress": progress}
    assert ended(1, log=json.dumps({"end": word})).reason == "Unexpected"
    progress[number] = 2**63 - 1
    assert ended(1, log=json.dumps({"end": word})).progress.model_dump(by_alias=True)[number] == 2**63 - 1


def test_the_largest_measurement_is_still_a_number():
    progress = {"step": 1, "steps": 2, "reward": 1.7976931348623157e308}
    word = {"exitCode": 0, "reason": "Completed", "message": "", "progress": progress}
    told = ended(0, log=json.dumps({"end": word})).progress
    assert json.loads(json.dumps(told.model_dump(), allow_nan=False))["reward"] == 1.7976931348623157e308


def test_a_last_line_that_is_nested_too_deeply_is_let_through():
    log = RunEnd.of(5, "worker actor-3 was lost").line({}) + "\n" + '{"a":' * 3000
    assert ended(1, log=log).reason == "InfrastructureLost"


def test_what_ray_could_not_run_counts_against_the_infrastructure():
    assert ended(None, error_type="JOB_SUPERVISOR_ACTOR_DIED", message="node died").kind == "Infrastructure"
    assert ended(None, error_type="RUNTIME_ENV_SETUP_FAILURE").kind == "Program"


def test_who_stops_the_driver_means_it():
    assert end_of(DriverView("stopped")).fatal


def test_limits_count_failures_apart():
    asked = terms(backoff_limit=1, infrastructure_backoff_limit=0)
    assert exhausted(asked, status(program_failures=1)) is None
    assert "backoffLimit of 1" in exhausted(asked, status(program_failures=2))
    assert "infrastructureBackoffLimit of 0" in exhausted(asked, status(infrastructure_failures=1))


def test_delays_double_up_to_a_bound():
    delays = [
        (not_before(status(failures=[failure(100)], program_failures=count), 10) - at(100)).total_seconds()
        for count in (1, 2, 3, 4, 40)
    ]
    assert delays == [10, 20, 40, 80, 300]
    assert not_before(status(), 10) is None


@pytest.mark.parametrize(("code", "words"), [(-9, "SIGKILL, as by the kernel when memory runs out"), (139, "SIGSEGV")])
def test_a_driver_that_was_killed_is_told_by_its_signal_not_by_the_end_of_its_log(code, words):
    end = end_of(DriverView("failed", message="Job entrypoint command failed, last logs: ...", exit_code=code))
    assert end.message.endswith(f"it was ended by {words}")
