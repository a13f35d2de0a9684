import fcntl
import json
import math
import os
import pty
import random
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console
from rlhf_api import RuntimeConfig
from rlhf_runtime.driver_log import DriverLog
from rlhf_runtime.errors import CheckpointError
from rlhf_runtime.report import Report, Sample, StepRecord, sinks_of, summarize
from rlhf_runtime.report.console import TerminalView, sparkline
from rlhf_runtime.report.curves import draw
from rlhf_runtime.single_controller.calls import Span
from rlhf_runtime.types import StepMetrics
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

REWARDS = st.lists(st.floats(-100, 100), min_size=15, max_size=40)


def metrics_of(step: int, **fields: float) -> dict:
    times = {"rollout": 0.8, "logprob": 0.2, "value": 0.1, "reward": 0.01, "update": 0.6, "sync": 0.1, "step": 1.9}
    numbers = {
        "reward_mean": 0.231, "kl": 0.0031, "entropy": 4.1, "policy_loss": -0.01, "value_loss": 0.3,
        "explained_variance": 0.5, "clip_fraction": 0.02, "response_tokens": 1558, "tokens_per_second": 820.0,
    }  # fmt: skip
    seconds = {f"time/{phase}": value for phase, value in times.items()}
    return {"step": step, **numbers, "weight_version": step, "sync_path": "shm", **seconds, **fields}


def rows_of(rewards: list[float]) -> list[dict]:
    return [metrics_of(index, reward_mean=reward) for index, reward in enumerate(rewards, start=1)]


def spans_of(step: int) -> list[Span]:
    return [
        Span("actor/training", "policy", "update", 0, step + 0.25, step + 0.75),
        Span("actor/training", "policy", "update", 1, step + 0.25, step + 0.5),
        Span("rollout", None, "generate", 0, step + 0.0, step + 0.25),
    ]


SAMPLES = [Sample(f"{index}+1=", "1\x1b[31m2\n", 0.5, 3) for index in range(6)]


@pytest.fixture(scope="module")
def finished(make_config, tmp_path_factory):
    """A run of 12 steps through every sink: its folder, its summary, and what a pipe saw of it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = make_config(runDir=str(folder), observability={"samplesPerStep": 2})
    with redirect_stdout(StringIO()) as output:
        report = Report(config, sinks_of(config, DriverLog()))
        report.start()
        for step in range(1, 13):
            metrics = metrics_of(step, reward_mean=step / 10, value_loss=math.nan if step == 5 else 0.3)
            report.step(StepRecord(metrics, SAMPLES[:2], spans_of(step)))
        summary = report.close()
    return folder, summary, output.getvalue()


def test_metrics_are_one_json_line_a_step(finished):
    folder, _, _ = finished
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[2] == metrics_of(3, reward_mean=0.3)
    assert rows[4]["value_loss"] is None


def test_samples_are_kept_as_they_are(finished):
    folder, _, _ = finished
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 12
    assert rows[3] == {"step": 2, "prompt": "1+1=", "response": "1\x1b[31m2\n", "score": 0.5, "weight_version": 3}


def test_the_timeline_has_a_track_a_worker(finished):
    folder, _, _ = finished
    events = json.loads((folder / "timeline.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["actor/training", "rollout"]
    tracks = [(names[e["pid"]], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert tracks == [("actor/training", 0, "rank 0"), ("actor/training", 1, "rank 1"), ("rollout", 0, "rank 0")]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 3 * 12
    assert [(names[s["pid"]], s["tid"], s["name"], s["ts"], s["dur"]) for s in spans if s["args"] == {"step": 2}] == [
        ("actor/training", 0, "policy.update", 2_250_000, 500_000),
        ("actor/training", 1, "policy.update", 2_250_000, 250_000),
        ("rollout", 0, "generate", 2_000_000, 250_000),
    ]


def test_tensorboard_reads_what_was_written(finished):
    folder, _, _ = finished
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("reward_mean")]
    assert points == [(step, pytest.approx(step / 10)) for step in range(1, 13)]
    assert {"kl", "time/rollout", "weight_version"} <= set(events.Tags()["scalars"])
    assert not {"step", "sync_path"} & set(events.Tags()["scalars"])


def test_a_pipe_sees_one_plain_line_a_step_and_the_summary(finished):
    _, summary, output = finished
    lines = output.splitlines()
    assert lines[2] == (
        "step 3/12  reward 0.300  kl 0.0031  entropy 4.10  820 tok/s  "
        "1.9 s (rollout 0.8 logprob 0.2 value 0.1 reward 0.0 update 0.6 sync 0.1)  eta 17s"
    )
    assert lines[12:] == summary.render().splitlines()
    assert "\x1b" not in output


def test_curves_are_a_picture_of_the_run(finished):
    folder, _, _ = finished
    picture = imread(folder / "curves.png")  # [height, width, 4]
    assert (picture[..., :3].min(axis=2) < 0.9).mean() > 0.02
    for rows in (slice(0, 350), slice(350, 700)):  # each of the six panels has ink of more than one color
        for columns in (slice(0, 433), slice(433, 866), slice(866, 1300)):
            panel = picture[rows, columns, :3]
            assert (panel.max(axis=2) - panel.min(axis=2) > 0.3).sum() > 100


@pytest.mark.parametrize(
    "rows",
    [
        rows_of([0.5]),
        rows_of([0.1] * 200),
        [{"step": 1}, {"step": 2, "kl": math.nan}],
        [metrics_of(step, **{"time/update": 2.0, "time/step": 1.0}) for step in range(1, 4)],
    ],
    ids=["one step", "constant", "nothing measured", "phases side by side"],
)
def test_any_run_can_be_drawn(rows, tmp_path):
    draw(rows, "title", tmp_path / "deep" / "curves.png")
    assert imread(tmp_path / "deep" / "curves.png").shape == (700, 1300, 4)


def test_only_what_is_asked_for_is_written(make_config, tmp_path):
    config = make_config(runDir=str(tmp_path), observability={"samplesPerStep": 0, "tensorboard": False})
    report = Report(config, sinks_of(config, DriverLog()))
    report.start()
    report.step(StepRecord(metrics_of(1), SAMPLES, []))
    report.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl", "timeline.json"]


def test_lines_are_on_the_disk_before_the_next_step(make_config, tmp_path):
    config = make_config(runDir=str(tmp_path))
    report = Report(config, sinks_of(config, DriverLog()))
    report.start()
    report.step(StepRecord(metrics_of(1), SAMPLES, []))
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 6


def test_a_run_without_a_step_says_so(make_config, tmp_path, capsys):
    config = make_config(runDir=str(tmp_path))
    report = Report(config, sinks_of(config, DriverLog()))
    report.start()
    assert report.close().steps == 0
    assert "No step was finished (of 12)." in capsys.readouterr().out
    assert not (tmp_path / "curves.png").exists()


def test_a_full_disk_is_told_by_the_folder(make_config, tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    report = Report(make_config(runDir=str(tmp_path)), sinks_of(make_config(runDir=str(tmp_path)), DriverLog()))
    report.start()
    told = rf"^{tmp_path}: got `No space left on device` .* Fix: free space"
    with pytest.raises(CheckpointError, match=told):
        report.step(StepRecord(metrics_of(1), SAMPLES, []))
    with pytest.raises(CheckpointError, match=told):
        report.close()


def test_a_sink_that_fails_to_close_keeps_none_open(make_config):
    closed = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def start(self, config: RuntimeConfig, earlier: Sequence[StepMetrics]) -> None: ...

        def step(self, record: StepRecord) -> None: ...

        def close(self, summary: object) -> None:
            closed.append(self.name)
            if self.name == "b":
                raise OSError("disk full")

    report = Report(make_config(), [Named("a"), Named("b"), Named("c")])
    report.start()
    with pytest.raises(CheckpointError, match="disk full"):
        report.close()
    assert closed == ["c", "b", "a"]
    assert report.close().steps == 0
    assert closed == ["c", "b", "a"]


# ---------------------------------------------------------------------------------------------------------- summary


def noisy(start: float, end: float, steps: int = 60, noise: float = 0.02, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [start + (end - start) * step / (steps - 1) + rng.gauss(0, noise) for step in range(steps)]


def test_the_numbers_of_a_summary():
    rows = rows_of([*[0.1, 0.2, 0.3, 0.2, 0.2], *[9.0] * 5, *[0.8] * 5, *[1.0] * 5])
    for index, row in enumerate(rows):
        row["explained_variance"] = index / 20
    summary = summarize(rows, planned_steps=30)
    assert (summary.steps, summary.planned_steps, summary.weight_version, summary.sync_path) == (20, 30, 20, "shm")
    assert summary.reward_first == pytest.approx(0.2)
    assert summary.reward_last == pytest.approx(0.9)
    assert summary.reward_ratio == pytest.approx(4.5)
    assert summary.reward_standard_error == pytest.approx(math.sqrt(0.005 / 5 + 0.1 / 9 / 10))
    assert summary.explained_variance_first == pytest.approx(0.1)
    assert summary.explained_variance_last == pytest.approx(0.725)
    assert summary.response_tokens == 20 * 1558
    assert summary.seconds == pytest.approx(20 * 1.9)


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        (noisy(0.05, 0.4), "rose"),
        (noisy(0.4, 0.05), "fell"),
        (noisy(0.3, 0.3), "did not rise"),
        ([0.0] * 30, "did not rise"),
        ([0.1 + 0.2, 0.3] * 10, "did not rise"),
        ([0.0] * 10 + [1.0] * 10, "rose"),
        ([-5.0, -4.0, -4.5] * 2 + [-1.0, -1.1, -0.9] * 5, "rose"),
        ([0.1, 0.9], "too few steps"),
        ([], "too few steps"),
    ],
)
def test_the_verdict(rewards, verdict):
    assert summarize(rows_of(rewards), 60).verdict == verdict


def test_noise_seldom_passes_for_a_rise():
    verdicts = [summarize(rows_of(noisy(0.3, 0.3, seed=seed)), 60).verdict for seed in range(300)]
    assert verdicts.count("rose") < 0.03 * 300
    assert verdicts.count("fell") < 0.03 * 300


def test_a_reward_that_did_not_rise_is_said_plainly():
    assert "REWARD DID NOT RISE: 0.2000 -> 0.2000" in summarize(rows_of([0.2] * 20), 20).render()
    assert "REWARD FELL" in summarize(rows_of(noisy(0.4, 0.1)), 60).render()
    text = summarize(rows_of(noisy(0.1, 0.4)), 100).render()
    assert "Finished 60 of 100 steps in 1m54s" in text
    assert "Reward rose" in text


def test_a_run_without_critic_and_reference_is_summed_up_without_them(tmp_path):
    missing = ("kl", "value_loss", "explained_variance")
    rows = [{key: value for key, value in row.items() if key not in missing} for row in rows_of([0.1] * 20)]
    summary = summarize(rows, 20)
    assert (summary.kl_last, summary.explained_variance_last) == (None, None)
    assert "Critic" not in summary.render()
    assert "KL" not in summary.render()
    draw(rows, "no critic", tmp_path / "curves.png")
    assert imread(tmp_path / "curves.png").shape[2] == 4


@given(REWARDS, st.floats(0.1, 10), st.floats(-50, 50))
def test_the_verdict_turns_with_the_sign_and_ignores_scale(rewards, scale, shift):
    def verdict(values: list[float]) -> tuple[str, float, float]:
        summary = summarize(rows_of(values), 60)
        difference = abs(summary.reward_last - summary.reward_first)
        return summary.verdict, difference, 3 * summary.reward_standard_error

    plain, difference, threshold = verdict(rewards)
    if abs(difference - threshold) < 0.01:  # too near to call once rounding or a shift has its say
        return
    opposite = {"rose": "fell", "fell": "rose", "did not rise": "did not rise"}
    assert verdict([-value for value in rewards])[0] == opposite[plain]
    assert verdict([scale * value for value in rewards])[0] == plain
    assert verdict([value + shift for value in rewards])[0] == plain


@given(st.lists(st.floats(width=32) | st.integers(-5, 5), max_size=20))
def test_a_summary_is_always_json(rewards):
    summary = summarize(rows_of(rewards), 20)
    assert json.loads(json.dumps(asdict(summary), allow_nan=False))["steps"] == len(rewards)
    assert summary.render()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_a_sparkline_fits_and_shows_its_highest_and_lowest(values):
    line = sparkline(values, width=40)
    assert len(line) == min(40, len(values))
    if len(values) <= 40 and max(values) - min(values) > 1e-3:
        assert line[values.index(max(values))] == "█"
        assert line[values.index(min(values))] == "▁"


# --------------------------------------------------------------------------------------------------------- terminal

VIEW = """
import json, signal, sys
from rlhf_api import RuntimeConfig
from rlhf_runtime.driver_log import DriverLog
from rlhf_runtime.errors import CheckpointError
from rlhf_runtime.report import Report, Sample, StepRecord, sinks_of
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell inherit that it is ignored
config = RuntimeConfig.parse(json.loads(sys.argv[1]))
report = Report(config, sinks_of(config, DriverLog()))
report.start()
try:
    for step in range(1, 9):
        print(f"a library prints {step}")
        metrics = {"step": step, "reward_mean": step / 10, "kl": 0.5, "entropy": 4.0, "tokens_per_second": 820.0,
                   "time/rollout": 0.8, "time/step": 1.0, "weight_version": step, "sync_path": "shm"}
        report.step(StepRecord(metrics, [Sample("7+5=", "evil\\x1b]0;title\\x07", 0.5, 1)], []))
    signal.raise_signal(signal.SIGINT)
finally:
    report.close()
"""


def on_a_terminal(config: RuntimeConfig) -> tuple[str, int]:
    """What VIEW writes to a terminal of 100 columns, and its return code."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "CI")}
    process = subprocess.Popen(
        [sys.executable, "-c", VIEW, config.model_dump_json(by_alias=True)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment | {"TERM": "xterm-256color"},
    )
    os.close(slave)
    output = b""
    while True:
        try:
            output += os.read(master, 65536)
        except OSError:  # the last writer is gone
            break
    os.close(master)
    return output.decode(), process.wait()


def plain(output: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)


def test_a_terminal_sees_a_live_view_until_the_run_is_interrupted(make_config, tmp_path):
    output, code = on_a_terminal(make_config(runDir=str(tmp_path)))
    assert code == -signal.SIGINT
    assert "\x1b[?25l" in output  # the cursor is hidden while the view is redrawn ...
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")  # ... and shown again
    text = plain(output)
    assert all(f"a library prints {step}\r\n" in text for step in range(1, 9))
    frame = text[text.rindex("a library prints 8") :]
    for part in ("tiny ━", "8/12", "eta 4s", "reward   0.800", "▁▂", "kl 0.5000", "rollout 0.8", "v8 by shm", "evil"):
        assert part in frame, part
    assert "critic" not in frame  # VIEW has none
    assert "\x1b]0;" not in output
    assert "Finished 8 of 12 steps" in frame
    assert "too few steps to tell" in frame
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 8
    assert imread(tmp_path / "curves.png").shape[2] == 4


def test_a_dumb_terminal_sees_plain_lines(make_config, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    output = StringIO()
    view = TerminalView(Console(file=output, force_terminal=True))
    view.start(make_config(), [])
    view.step(StepRecord(metrics_of(2), [], []))
    view.close(summarize(rows_of([0.1] * 2), 12))
    assert output.getvalue().startswith("step 2/12  reward 0.231")
    assert "\x1b[" not in output.getvalue()


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_view_fits_the_width(make_config, columns):
    console = Console(file=StringIO(), force_terminal=True, width=columns, height=40, legacy_windows=False)
    view = TerminalView(console)
    view.start(make_config(), [])
    for step in range(1, 4):
        view.step(StepRecord(metrics_of(step), [Sample("p" * 500, "r" * 500, 0.5, 1)], []))
    view.close(summarize(rows_of([0.1] * 3), 12))
    frames = plain(console.file.getvalue()).split("Finished")[0]
    assert max(len(line.strip("\r")) for line in frames.splitlines()) <= columns
