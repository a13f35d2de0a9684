"""The programs of the cluster, built from pinned Go modules by `e2e/kind/build.sh` on first use."""

import shutil
import subprocess
from pathlib import Path

BUILD = Path(__file__).parents[1] / "kind" / "build.sh"
API_SERVER = ("etcd", "kube-apiserver", "kubectl")
CONTROLLERS = ("kube-controller-manager", "kube-scheduler", "kuberay", "kwok")


class BuildError(Exception):
    """A program could not be built; the message is one line that says why."""


def build(*names: str) -> dict[str, Path]:
    """Builds what the cache lacks (about 20 minutes on two cores the first time) and tells where each program is.

    Args:
        names: Programs, as `build.sh` calls them. A `kubectl` on the PATH is taken as it is.

    Returns:
        The path of each program by its name.

    Raises:
        BuildError: When Go is missing, or a build fails.
    """
    paths: dict[str, Path] = {}
    if "kubectl" in names and (found := shutil.which("kubectl")):
        paths["kubectl"] = Path(found)
    wanted = [name for name in names if name not in paths]
    if not wanted:
        return paths
    process = subprocess.Popen([BUILD, *wanted], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout
    assert process.stderr
    last = ""
    for line in process.stderr:
        last = line.strip()
        print(last, flush=True)  # noqa: T201  a cold build takes many minutes: whoever waits is told
    for line in process.stdout:
        name, path = line.split(maxsplit=1)
        paths[name] = Path(path.strip())
    if process.wait():
        raise BuildError(last or f"{BUILD} ended with {process.returncode}")
    return paths
