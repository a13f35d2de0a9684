"""A cluster that somebody may speak to: the processes of a test, kind, or any other."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from control_plane.credentials import client_of, write_kubeconfig
from control_plane.nodes import GpuNodes


class Cluster:
    """A cluster and its administrator.

    Attributes:
        kubeconfig: Kubeconfig of the administrator.
        folder: Folder for what is written about the cluster.
    """

    def __init__(self, kubeconfig: Path, folder: Path, kubectl: Path) -> None:
        self.kubeconfig = kubeconfig
        self.folder = folder
        self._kubectl = kubectl

    @cached_property
    def api(self) -> httpx.Client:
        """The API server over HTTP, as the administrator: `cluster.api.get("/api/v1/nodes").json()`."""
        return client_of(self._config)

    @property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(
            self.kubectl("config", "view", "--minify", "--raw", "--flatten", "-o", "json")
        )
        return config

    def kubectl(self, *arguments: str | Path, stdin: str | None = None, check: bool = True) -> str:
        """Runs kubectl as the administrator.

        Args:
            arguments: What stands after `kubectl`.
            stdin: Text for its standard input.
            check: Whether a failure raises; else its message is in what is returned.

        Returns:
            Standard output, followed by standard error where `check` is off.

        Raises:
            RuntimeError: When it fails, with what it said.
        """
        done = subprocess.run(
            [self._kubectl, f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
        )
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(map(str, arguments))}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout if check else done.stdout + done.stderr

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any]:
        """One object, as the API server gives it."""
        found: dict[str, Any] = json.loads(self.kubectl("get", kind, name, "-n", namespace, "-o", "json"))
        return found

    def items(self, kind: str, namespace: str = "default", selector: str = "") -> list[dict[str, Any]]:
        """Objects of a kind in a namespace."""
        chosen = ["-l", selector] if selector else []
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, "-n", namespace, "-o", "json", *chosen))[
            "items"
        ]
        return found

    @contextmanager
    def nodes(self, *pools: GpuNodes) -> Iterator[None]:
        """Adds nodes, waits until they are Ready, and takes them away afterwards."""
        objects = [node for pool in pools for node in pool.render()]
        names = [node["metadata"]["name"] for node in objects]
        for node in objects:
            self.api.post("/api/v1/nodes", json=node).raise_for_status()
        try:
            self.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "node", *names)
            yield
        finally:
            self.kubectl("delete", "node", "--ignore-not-found", *names)

    def kubeconfig_of_service_account(self, namespace: str, name: str) -> Path:
        """A kubeconfig of a service account, with the rights that it has in the cluster."""
        token = self.kubectl("create", "token", name, "-n", namespace, "--duration=24h").strip()
        cluster = self._config["clusters"][0]["cluster"]
        return write_kubeconfig(self.folder / f"{namespace}-{name}.kubeconfig", cluster, token)

    def apply(self, definitions: Path) -> None:
        """Applies CustomResourceDefinitions, a file or a folder, and waits until they are served."""
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", definitions)
        self.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", definitions)
