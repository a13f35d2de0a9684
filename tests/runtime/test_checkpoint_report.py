"""A run that goes on after a step: what it reports follows what was reported, and replaces what came after."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from matplotlib.image import imread
from rlhf_api import RuntimeConfig
from rlhf_runtime.driver_log import DriverLog
from rlhf_runtime.report import Report, Sample, StepRecord, Summary, sinks_of
from rlhf_runtime.single_controller.calls import Span
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def row(step: int, reward: float) -> dict:
    return {"step": step, "reward_mean": reward, "response_tokens": 10, "time/step": 1.0, "weight_version": step}


def report_steps(config: RuntimeConfig, steps: range, reward: float, earlier: list[dict]) -> tuple[str, Summary]:
    """Report some steps; what a pipe saw of it, and what it came to."""
    with redirect_stdout(StringIO()) as output:
        report = Report(config, sinks_of(config, DriverLog()))
        report.start(earlier)
        for step in steps:
            sample = Sample("1+1=", f"of step {step}", reward, step)
            spans = [Span(f"group of {steps}", None, "generate", 0, step, step + 0.5)]
            report.step(StepRecord(row(step, reward), [sample], spans))
        summary = report.close()
    return output.getvalue(), summary


@pytest.fixture(scope="module", params=["closed", "cut short"])
def resumed(request, make_config, tmp_path_factory) -> tuple[Path, tuple[str, Summary]]:
    """A run of steps 1 to 6 that went on after step 4 to the end: its folder, and what the second time told."""
    folder = tmp_path_factory.mktemp("resumed")
    config = make_config(runDir=str(folder))
    report_steps(config, range(1, 7), 0.1, [])
    if request.param == "cut short":
        for name in ("metrics.jsonl", "samples.jsonl", "timeline.json"):
            content = (folder / name).read_text().removesuffix("\n]\n")
            (folder / name).write_text(content[:-9])
    told = report_steps(config, range(5, 13), 0.2, [row(step, 0.1) for step in range(1, 5)])
    return folder, told


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_and_samples_have_every_step_once(resumed):
    folder, _ = resumed
    assert [line["step"] for line in lines(folder / "metrics.jsonl")] == list(range(1, 13))
    assert [line["reward_mean"] for line in lines(folder / "metrics.jsonl")] == [0.1] * 4 + [0.2] * 8
    assert [line["step"] for line in lines(folder / "samples.jsonl")] == list(range(1, 13))


def test_the_timeline_has_every_step_once(resumed):
    folder, _ = resumed
    events = json.loads((folder / "timeline.json").read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["args"]["step"] for span in spans] == list(range(1, 13))
    assert len({span["pid"] for span in spans}) == 2


def test_tensorboard_shows_every_step_once(resumed):
    folder, _ = resumed
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("reward_mean")]
    assert points == [(step, pytest.approx(0.1 if step < 5 else 0.2)) for step in range(1, 13)]


def test_summary_and_curves_are_of_all_steps(resumed):
    folder, (said, summary) = resumed
    assert said.startswith("step 5/12")
    assert (summary.steps, summary.reward_first, summary.response_tokens) == (12, 0.1, 120)
    assert imread(folder / "curves.png").shape == (700, 1300, 4)
