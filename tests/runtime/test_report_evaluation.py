"""How evaluations are told."""

import json

import numpy as np
import pytest
from matplotlib.image import imread
from rlhf_runtime.driver_log import DriverLog
from rlhf_runtime.report import Report, Sample, StepRecord, sinks_of, summarize
from rlhf_runtime.report.curves import draw
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TRAINED, HELD_OUT = Sample("1+1=", "2", 1.0, 0), Sample("7+7=", "14", 0.5, 1)
DURATIONS = {"time/step": 2.0, "time/rollout": 1.5}


def rows(evaluated: dict[int, float], start: float | None = 0.1, steps: int = 6) -> list[dict]:
    """Metrics of a run that was evaluated before the first step and after some, each time in 10 seconds."""
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "reward_mean": 0.2, **DURATIONS}
        if step == 1 and start is not None:
            line |= {"eval/start/reward_mean": start, "time/eval/start": 10.0}
        if step in evaluated:
            line |= {"eval/reward_mean": evaluated[step], "time/eval": 10.0}
        lines.append(line)
    return lines


@pytest.fixture
def told(make_config, tmp_path, capsys):
    """The folder of a run of 6 steps, evaluated after 3 and 6, and what was printed."""
    config = make_config(runDir=str(tmp_path), training=make_config().training.model_dump(by_alias=True) | {"steps": 6})
    report = Report(config, sinks_of(config, DriverLog()))
    report.start()
    for line in rows({3: 0.25, 6: 0.5}):
        report.step(StepRecord(line, [TRAINED], [], [HELD_OUT] * ("eval/reward_mean" in line)))
    report.close()
    return tmp_path, capsys.readouterr().out.splitlines()


def test_a_step_with_an_evaluation_says_so_in_its_line(told):
    _, lines = told
    assert lines[2] == "step 3/6  reward 0.200  2.0 s (rollout 1.5)  held-out reward 0.250 in 10.0 s  eta 26s"
    assert "held-out" not in lines[3]


def test_samples_of_evaluations_are_marked(told):
    folder, _ = told
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    held_out = {"prompt": "7+7=", "response": "14", "score": 0.5, "weight_version": 1, "evaluation": True}
    assert [sample for sample in samples if "evaluation" in sample] == [
        {"step": 3, **held_out},
        {"step": 6, **held_out},
    ]
    assert len(samples) == 8


def test_curves_of_tensorboard_have_them(told):
    folder, _ = told
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("eval/reward_mean")] == [(3, 0.25), (6, 0.5)]
    assert [event.step for event in events.Scalars("eval/start/reward_mean")] == [1]


def test_the_summary_compares_start_and_end(told):
    _, lines = told
    assert "Reward on held-out prompts 0.1000 -> 0.5000." in lines
    summary = summarize(rows({3: 0.25, 6: 0.5}), 6)
    assert (summary.evaluation_first, summary.evaluation_last, summary.seconds) == (0.1, 0.5, 42.0)


def test_a_run_without_evaluation_is_silent_about_it():
    summary = summarize(rows({}, start=None), 6)
    assert (summary.evaluation_first, summary.evaluation_last, summary.seconds) == (None, None, 12.0)
    assert "held-out" not in summary.render()


def test_the_picture_shows_each_evaluation(tmp_path):
    def orange(lines: list[dict]) -> int:
        """Pixels of the reward's panel in the color of evaluations."""
        draw(lines, "title", tmp_path / "curves.png")
        panel = imread(tmp_path / "curves.png")[:350, :433, :3]
        return (np.abs(panel - np.array([0xD5, 0x5E, 0x00]) / 255).max(axis=2) < 0.1).sum()

    none, one, two = (orange(rows(points, start=None)) for points in ({}, {6: 0.5}, {3: 0.25, 6: 0.5}))
    assert 0 == none < one < two < orange(rows({3: 0.25, 6: 0.5}))
