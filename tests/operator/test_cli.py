import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rlhf_api import RuntimeConfig, SpecError
from rlhf_operator import cli, run_folder
from rlhf_operator.manifest import read_manifest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "01-quickstart.yaml"


def rlhf(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def bad(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(re.sub(r"steps: \d+", "steps: 0", QUICKSTART.read_text()).replace("batchSize", "batchsize"))
    return file


@pytest.fixture
def become(monkeypatch):
    """The arguments of the program that `rlhf run` would become."""
    calls = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: calls.append(arguments))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda how, signals: None)
    return calls


def test_validate_answers_for_every_file(bad, tmp_path):
    result = rlhf("validate", QUICKSTART, bad, tmp_path / "nowhere.yaml")
    assert result.exit_code == 2
    assert result.stdout == f"{QUICKSTART}: valid\n"
    assert result.stderr.splitlines() == [
        f"{bad}: spec.data.batchsize: got unknown field `batchsize`; expected one of batchSize, evaluation, "
        "maxPromptLength, maxResponseLength, prompts, seed. Fix: did you mean `batchSize`?",
        f"{bad}: spec.training.steps: got 0; expected a value greater than or equal to 1. Fix: give such a value",
        f"{tmp_path / 'nowhere.yaml'}: got no readable file (No such file or directory); expected a YAML file. "
        "Fix: correct the name",
    ]


def test_plan_shows_who_runs_where_and_why():
    result = rlhf("plan", QUICKSTART)
    assert result.exit_code == 0
    for words in ("policy", "3 CPU", "PACK", "Weight sync: shm (policy and rollout share group `all`", "64 samples"):
        assert words in result.stdout


def test_plan_shows_engines_fallbacks_and_how_weights_travel(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "examples" / "02-disaggregated.yaml").read_text()
    text = text.replace("roles: [rollout], workers: 2}", "roles: [rollout], workers: 4}")
    text = text.replace("roles: [critic], workers: 1}", "roles: [critic], strategy: STRICT_PACK, fallback: [PACK]}")
    file = tmp_path / "job.yaml"
    file.write_text(f"{text}  rollout: {{tensorParallelSize: 2}}\n  weightSync: {{verify: none}}\n")
    result = rlhf("plan", file)
    assert result.exit_code == 0, result.output
    table, _, rest = result.stdout.partition("Weight sync: ")
    assert all(len(line) <= 100 for line in table.splitlines())
    assert "2 engines × 2" in table
    assert re.search(r"STRICT_PACK, .*\n.* else PACK ", table)
    assert rest.startswith("gloo (policy runs in group `actor` on the `cpu` pool `train`, rollout in group `rollout`")
    assert "Note: weights are not compared after a sync" in rest


@pytest.mark.parametrize("command", ["plan", "run"])
def test_bad_input_ends_with_2_and_no_traceback(bad, command, become):
    result = rlhf(command, bad)
    assert (result.exit_code, become) == (2, [])
    assert "Traceback" not in result.output


def test_run_writes_the_job_and_becomes_the_runtime(tmp_path, become):
    result = rlhf("run", QUICKSTART, "--runs-dir", tmp_path)
    folder = tmp_path / "quickstart"
    assert result.exit_code == 0, result.output
    assert become == [[sys.executable, "-m", "rlhf_runtime", str(folder / "runtime.json")]]
    config = RuntimeConfig.parse(json.loads((folder / "runtime.json").read_text()))
    resolved = read_manifest(folder / "job.yaml")
    assert (config.run_dir, config.training.steps) == (str(folder), resolved.spec.training.steps)
    assert resolved.spec.models.critic == read_manifest(QUICKSTART).spec.models.policy
    assert rlhf("plan", folder / "job.yaml").exit_code == 0


def test_folders_of_earlier_runs_are_kept(tmp_path, become):
    for name in ("quickstart", "quickstart.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(name)
    result = rlhf("run", QUICKSTART, "--runs-dir", tmp_path)
    assert f"The earlier run's folder is now {tmp_path / 'quickstart.2'}\n" in result.stdout
    assert (tmp_path / "quickstart.1/metrics.jsonl").read_text() == "quickstart.1"
    assert (tmp_path / "quickstart.2/metrics.jsonl").read_text() == "quickstart"
    assert not (tmp_path / "quickstart/metrics.jsonl").exists()


def test_a_folder_whose_run_goes_on_is_left_alone(tmp_path):
    """The lock must survive exec, as `rlhf run` becomes the runtime."""
    folder = tmp_path / "job"
    runtime = "import sys; print('up', flush=True); sys.stdin.read()"
    code = "import os, sys; from pathlib import Path; from rlhf_operator import run_folder; "
    code += f"run_folder.prepare(Path({str(folder)!r})); os.execv(sys.executable, [sys.executable, '-c', {runtime!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout.readline() == b"up\n"
        with pytest.raises(SpecError, match="where a run is going on"):
            run_folder.prepare(folder)
        running.stdin.close()
    assert run_folder.prepare(folder) == tmp_path / "job.1"


def test_a_folder_that_cannot_be_made(tmp_path, become):
    (tmp_path / "file").write_text("")
    result = rlhf("run", QUICKSTART, "--runs-dir", tmp_path / "file")
    assert (result.exit_code, become) == (2, [])
    assert "--runs-dir" in result.stderr


def test_a_full_disk_is_told(tmp_path, become, monkeypatch):
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "job.yaml").symlink_to("/dev/full")
    monkeypatch.setattr(run_folder, "prepare", lambda folder, resume: None)
    result = rlhf("run", QUICKSTART, "--runs-dir", tmp_path)
    assert (result.exit_code, become) == (2, [])
    assert "--runs-dir: got" in result.stderr
    assert "No space left on device" in result.stderr


def test_a_missing_runtime_is_told(tmp_path, monkeypatch, become):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = rlhf("run", QUICKSTART, "--runs-dir", tmp_path)
    assert (result.exit_code, become) == (2, [])
    assert "no module rlhf_runtime" in result.stderr
    assert not (tmp_path / "quickstart").exists()


def test_ctrl_c_ends_with_130(monkeypatch):
    def interrupted(file):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.local, "read_manifest", interrupted)
    assert rlhf("plan", QUICKSTART).exit_code == 130


def test_ctrl_c_while_the_program_is_still_imported_leaves_no_traceback():
    code = (
        "import os, signal, sys\n"
        "class Late:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'rlhf_operator.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "from rlhf_operator.__main__ import main\n"
        "sys.meta_path.insert(0, Late)\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_between_the_programs_is_answered_by_the_runtime(tmp_path):
    code = (
        "import os, signal\n"
        "become = os.execv\n"
        "def late(*arguments):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    become(*arguments)\n"
        "os.execv = late\n"
        "from rlhf_operator.__main__ import main\n"
        "main()"
    )
    command = [sys.executable, "-c", code, "run", str(QUICKSTART), "--runs-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "Stopped by SIGINT.\n")


def test_help_teaches_with_an_example():
    assert "rlhf run examples/01-quickstart.yaml" in rlhf("--help").stdout
    assert rlhf("--version").stdout.startswith("rlhf 0.")


def test_the_real_program_answers_without_the_data_planes_libraries(bad):
    code = (
        "import sys\n"
        "from rlhf_operator.__main__ import main\n"
        "try: main()\n"
        "finally: print([*{'torch', 'ray', 'vllm', 'transformers'} & {*sys.modules}])"
    )
    done = subprocess.run([sys.executable, "-c", code, "validate", str(bad)], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "[]\n")
    assert done.stderr.count("\n") == 2


def test_as_a_plugin_of_kubectl_it_goes_by_that_name(tmp_path):
    """kubectl runs the first `kubectl-rlhf` on the path."""
    plugin = tmp_path / "kubectl-rlhf"
    plugin.write_text(f"#!{sys.executable}\nfrom rlhf_operator.__main__ import main\nmain()\n")
    plugin.chmod(0o755)
    done = subprocess.run([plugin, "get", "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split("[", 1)[0].strip()) == (0, "Usage: kubectl rlhf get")
    scripts = tomllib.loads((ROOT / "operator" / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["kubectl-rlhf"] == scripts["rlhf"]
