"""`rlhf run` as a person meets it: a real process, real Ray, real vLLM."""

import json
import os
import signal
import statistics
import time
from pathlib import Path

import pytest
import ruamel.yaml

METRICS = {
    "step", "reward_mean", "kl", "entropy", "policy_loss", "value_loss", "explained_variance", "clip_fraction",
    "weight_version", "sync_path", "response_tokens", "tokens_per_second", "time/rollout", "time/logprob", "time/value",
    "time/reward", "time/update", "time/sync", "time/driver", "sync_bytes", "object_store_bytes",
}  # fmt: skip
yaml = ruamel.yaml.YAML(typ="safe", pure=True)

TRANSPORTS = {"01-quickstart": "shm", "02-disaggregated": "gloo"}
"""How weights reach the engines, by example."""


@pytest.fixture(scope="module", params=TRANSPORTS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start_in, example):
    """An example, shortened, run once to its end."""
    job = example(request.param)
    job["spec"]["training"]["steps"] = 20
    run = start_in(tmp_path_factory.mktemp(request.param), job)
    assert run.finish() == 0, run.text
    run.transport = TRANSPORTS[request.param]
    return run


def mean(metrics: list[dict], key: str) -> float:
    return statistics.fmean(line[key] for line in metrics)


def test_every_step_has_a_line_with_every_figure(trained) -> None:
    assert [line["step"] for line in trained.metrics] == list(range(1, 21))
    for line in trained.metrics:
        assert line.keys() >= METRICS
        assert line["sync_path"] == trained.transport
        assert line["sync_bytes"] > 100_000
        assert line["response_tokens"] > 0


def test_rollouts_use_the_weights_of_the_step_before(trained) -> None:
    assert [line["weight_version"] for line in trained.metrics] == list(range(1, 21))
    assert all(sample["weight_version"] == sample["step"] - 1 for sample in trained.samples)
    assert all(line["rollout_log_prob_gap"] < 1e-3 for line in trained.metrics)


def test_the_reward_rises_and_the_critic_learns(trained) -> None:
    assert mean(trained.metrics[-10:], "reward_mean") >= 2 * mean(trained.metrics[:5], "reward_mean")
    assert mean(trained.metrics[-5:], "explained_variance") > mean(trained.metrics[:5], "explained_variance") + 0.05


def test_the_run_folder_holds_what_was_promised(trained) -> None:
    folder = trained.results
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.rglob("events.out.tfevents*"))
    assert (folder / "model" / "model.safetensors").exists()
    assert yaml.load((folder / "job.yaml").read_text())["spec"]["placement"]["groups"]
    assert {sample["step"] for sample in trained.samples} == set(range(1, 21))
    said = trained.text.partition("Run folder: ")[2].splitlines()
    assert (folder / "driver.log").read_text().splitlines()[1:] == said[1:]


def test_the_last_line_is_the_summary(trained) -> None:
    assert trained.summary["steps"] == 20
    assert trained.summary["verdict"] == "rose"
    trained.assert_nothing_left()


def test_the_timeline_shows_roles_at_work_beside_each_other(trained) -> None:
    events = json.loads((trained.results / "timeline.json").read_text())
    spans = {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X" and event["args"]["step"] == 20
    }
    step, generate, update = (spans[name] for name in ("step 20", "generate", "policy.update"))
    assert step[0] <= generate[0] < generate[1] <= update[0] < update[1] <= step[1]
    values = next(span for name, span in spans.items() if name.endswith("compute_values"))
    overlaps = min(values[1], spans["policy.compute_log_probs"][1]) - max(
        values[0], spans["policy.compute_log_probs"][0]
    )
    assert (overlaps > 0) == (trained.name == "disaggregated")  # in one process they take turns


def test_the_object_store_does_not_fill_up(trained) -> None:
    assert trained.metrics[-1]["object_store_bytes"] <= trained.metrics[4]["object_store_bytes"]


@pytest.mark.parametrize("name", TRANSPORTS)
def test_learning_rate_zero_changes_nothing(start, small, name: str) -> None:
    job = small(12, name)
    job["spec"]["data"]["batchSize"] = 64
    job["spec"]["training"] |= {"optimizer": {"learningRate": 0}, "criticOptimizer": {"learningRate": 0}}
    run = start(job)
    assert run.finish() == 0, run.text
    assert all(line["kl"] == 0 for line in run.metrics)
    assert run.summary["verdict"] == "did not rise"


@pytest.mark.parametrize(
    ("send", "signum", "code"),
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)],  # as a terminal does, and as a kubelet does
    ids=["Ctrl-C", "SIGTERM"],
)
def test_a_signal_stops_the_run_within_ten_seconds(start, small, tmp_path: Path, send, signum: int, code: int) -> None:
    """A reward that hangs keeps the driver waiting in Ray."""
    body = "calls.append(1)\n    time.sleep(60 * (len(calls) > 2))\n    return [0.0] * len(responses)"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rewards.py").write_text(
        f"import time\n\ncalls = []\n\n\ndef slow(prompts, responses, **columns):\n    {body}\n"
    )
    job = small(steps=1000)
    job["spec"]["code"] = {"configMap": "mine"}
    job["spec"]["rewards"] = [{"name": "mine", "function": {"importPath": "rewards:slow"}}]
    run = start(job)
    run.wait_for_line("step 2")
    begin = time.monotonic()
    send(run.process.pid, signum)
    assert run.process.wait(timeout=10) == code
    run.finish()
    assert run.summary["steps"] == 2
    assert f"Stopped by {signal.Signals(signum).name}" in run.text
    run.assert_nothing_left(seconds=10 - (time.monotonic() - begin))
    assert "Traceback" not in run.text
    assert (run.results / "curves.png").exists()


def test_a_lost_worker_is_named_and_ends_the_run(start, small) -> None:
    run = start(small(steps=1000))
    run.wait_for_line("step 1")
    [pid] = run.pids("ray::PolicyCriticReferenceWorker")
    os.kill(pid, signal.SIGKILL)
    assert run.finish(timeout=60) == 5
    assert "Traceback" not in run.text
    assert f"group `all/training`, rank 0 (pid {pid} on node" in run.text
    run.assert_nothing_left()


def test_numbers_that_are_not_finite_end_the_run(start, small) -> None:
    job = small(steps=20)
    job["spec"]["training"]["optimizer"] = {"learningRate": 1e30}
    run = start(job)
    assert run.finish() == 4, run.text
    assert "Traceback" not in run.text
    run.assert_nothing_left()


def test_a_killed_driver_leaves_no_process(start, small) -> None:
    run = start(small(steps=1000))
    run.wait_for_line("step 1")
    run.process.kill()
    run.process.wait()
    run.assert_nothing_left(seconds=90)


def test_a_bad_reward_stops_the_run_cleanly(start, small, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "rewards.py").write_text("def bad(prompts, responses, **columns):\n    raise KeyError\n")
    job = small(steps=3)
    job["spec"]["code"] = {"configMap": "mine"}
    job["spec"]["rewards"] = [{"name": "mine", "function": {"importPath": "rewards:bad"}}]
    run = start(job)
    assert run.finish() == 3, run.text
    assert "Traceback" not in run.text
    assert all(part in run.text for part in ("mine", "KeyError", "rewards.py:2")), run.text
    run.assert_nothing_left()
