"""What holds for the repository as a whole."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from rlhf_api import RLHFJob
from rlhf_api.algorithm import Algorithm
from rlhf_operator.manifest import read_manifest
from rlhf_operator.plan import build_plan
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SNIPPETS = [
    pytest.param(text, id=f"{page.name}-{index}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for index, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


def test_the_folder_operator_does_not_replace_the_standard_module():
    folder = ROOT / "operator"
    shadows = [
        *folder.glob("__init__.py"),
        *folder.rglob("conftest.py"),
        *folder.rglob("test_*.py"),
        *folder.rglob("*_test.py"),
    ]
    assert shadows == []
    assert not (ROOT / "tests" / "operator" / "__init__.py").exists()
    code = "import operator, os; print(operator.add(1, 2), os.path.basename(operator.__file__))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "operator.py"]


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_example_is_planned_and_says_how_to_launch_it(file):
    opening = [line for line in file.read_text().split("apiVersion")[0].splitlines() if line.startswith("#")]
    launches = (f"rlhf run examples/{file.name}", f"kubectl apply -f examples/{file.name}")
    assert any(launch in line for line in opening for launch in launches)
    build_plan(read_manifest(file), "runs/example")


@pytest.mark.parametrize("text", SNIPPETS)
def test_every_manifest_of_the_documentation_is_planned(text, manifest):
    """A snippet that shows a part of a spec is read in the place of that part of the smallest manifest."""
    for document in YAML(typ="safe", pure=True).load_all(text):
        if document.get("kind", "RLHFJob") != "RLHFJob":
            continue  # another's kind, which e2e/ applies
        if "kind" not in document:
            manifest["spec"] |= document.pop("spec")
            assert not document
            document = manifest
        build_plan(RLHFJob.parse(document), "runs/docs")


def options(model, prefix=""):
    """Every option below a model, as the manual writes it: `kl.adaptive.target`."""
    for name, field in model.model_fields.items():
        inner = [arg for arg in (field.annotation, *get_args(field.annotation)) if hasattr(arg, "model_fields")]
        path = f"{prefix}{field.alias or name}"
        yield from options(inner[0], f"{path}.") if inner else [path]


def test_the_manual_has_every_option_of_every_algorithm():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    algorithms = [get_args(field.annotation)[0] for field in Algorithm.model_fields.values()]
    named = {option for model in algorithms for option in options(model)}
    assert {"kl.adaptive.target", "overlong.buffer", "baseline"} <= named
    assert [option for option in sorted(named) if not re.search(rf"`{re.escape(option)}[`:]", text)] == []
