"""What the tests of the operator share."""

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from api_server_double import ApiServerDouble
from kubernetes.config import kube_config
from rlhf_api import RLHFJob
from rlhf_operator import cli, kube
from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.manifests import Owner, render

KUBERAY = Path(__file__).parents[2] / "e2e/kind/programs/kuberay"
KUBERAY_CRD = "config/crd/bases/ray.io_rayclusters.yaml"


@pytest.fixture(scope="session")
def kuberay_crd() -> dict[str, Any]:
    """KubeRay's CustomResourceDefinition, of the module that the test cluster's KubeRay is built from."""
    download = ["go", "mod", "download", "-json", "github.com/ray-project/kuberay/ray-operator"]
    try:
        module = subprocess.run(download, cwd=KUBERAY, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no CRD of KubeRay here, as its Go module was not downloaded: {error}")
    file = Path(json.loads(module)["Dir"], KUBERAY_CRD)
    crd: dict[str, Any] = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
    return crd


@pytest.fixture(scope="session")
def autoscaling_config() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What Ray's autoscaler makes of a RayCluster, by the Ray that is installed."""
    pytest.importorskip("ray")
    from ray.autoscaler._private.kuberay import autoscaling_config

    return cast("Callable[..., dict[str, Any]]", autoscaling_config._derive_autoscaling_config_from_ray_cr)


@pytest.fixture
def cluster_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """The smallest manifest for a cluster: eight GPUs, an image, and roles beside each other."""
    manifest["spec"] |= {
        "image": "runtime:1",
        "nodePools": [{"name": "gpu", "gpusPerNode": 8, "memory": "64Gi"}],
        "placement": {
            "groups": [{"name": "all", "pool": "gpu", "workers": 8, "roles": ["policy", "critic", "reference"]}]
        },
    }
    manifest["spec"]["placement"]["groups"][0]["roles"] += ["rollout", "reward"]
    return manifest


@pytest.fixture
def rendered():
    """Renders a manifest: the objects of cluster 1 by their kind."""

    def rendered(manifest: dict[str, Any], cluster: int = 1, **options: Any) -> dict[str, Any]:
        owner = Owner("uid-1", manifest["metadata"]["name"], "team")
        plan = plan_cluster(RLHFJob.parse(manifest))
        return {made["kind"]: made for made in render(plan, owner, cluster, **options).objects}

    return rendered


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServerDouble]:
    """The double, named by the kubeconfig that is found; the client reads KUBECONFIG once, when it is imported."""
    with ApiServerDouble() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "here",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        monkeypatch.setattr(cli.follow, "LOOK_SECONDS", 0.01)
        monkeypatch.setattr(kube, "ATTEMPTS", 1)
        yield server
        server.shutdown()
