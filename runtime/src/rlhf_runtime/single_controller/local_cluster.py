"""Ray for one run: the nodes of the config on this machine, or the cluster that is there."""

import logging
import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Self

import ray
from ray._common.utils import reset_ray_address
from ray.cluster_utils import Cluster
from rlhf_api.pools import Device
from rlhf_api.runtime_config import LocalNode

from rlhf_runtime.errors import InfrastructureError
from rlhf_runtime.single_controller.environment import LOCAL_NODE, allowed

_OBJECT_STORE_BYTES = 256 * 2**20
"""Most memory of a local node's object store; what does not fit goes to disk."""


@dataclass(frozen=True)
class NodeArguments:
    """A local node as Ray's start functions take it."""

    num_cpus: int
    num_gpus: int
    resources: dict[str, int]
    """Custom resources."""
    device: Device
    """GPUs of a `cpu` node are made up."""

    @classmethod
    def of(cls, node: LocalNode) -> Self:
        """The resources of the node; what it does not name is zero, never detected.

        Ray's nodes have whole resources only, so half a CPU becomes one.
        """
        whole = {key: math.ceil(amount) for key, amount in node.resources.items()}
        return cls(whole.pop("CPU", 0), whole.pop("GPU", 0), whole, node.device)


def worker_environment(python_path: Sequence[str]) -> dict[str, str]:
    """Environment of all workers: `python_path` goes before the driver's own PYTHONPATH."""
    if not python_path:
        return {}
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([*python_path, *([inherited] if inherited else [])])
    return {"PYTHONPATH": path}


def device_shares(nodes: Sequence[NodeArguments], visible: str | None) -> list[dict[str, str]]:
    """Environment a node that shows it GPUs of its own: each would count this machine's from the first on.

    A `cpu` node is shown as many as it asks for, whatever is there.

    Args:
        nodes: The local nodes.
        visible: This process' CUDA_VISIBLE_DEVICES; none where it sees all.
    """
    real = iter(map(str, count()) if visible is None else filter(None, visible.split(",")))
    shares = (islice(real if node.device == "cuda" else map(str, count()), node.num_gpus) for node in nodes)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


class LocalCluster:
    """A connection to Ray, and the nodes behind it where they were started here. A context manager.

    Args:
        nodes: Nodes to start on this machine; none joins the cluster that is there. Of this process' environment they
            have what `environment.LOCAL_NODE` names.
        python_path: Folders put on the workers' path.
    """

    def __init__(self, nodes: Sequence[LocalNode] | None, python_path: Sequence[str] = ()):
        self._nodes = None if nodes is None else [NodeArguments.of(node) for node in nodes]
        self._environment = worker_environment(python_path)
        self._cluster: Cluster | None = None

    def start(self) -> None:
        """Start the nodes and connect.

        Raises:
            InfrastructureError: when Ray cannot be started or found.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls that are not waited for after a failure
        logging.getLogger("ray").setLevel(logging.ERROR)
        ray._private.worker.print_to_stdstream = _keep_to_itself
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._environment:
            options["runtime_env"] = {"env_vars": self._environment}
        try:
            with _own_signal_handlers(), _filtered_environment():
                self._connect(options)
        except Exception as error:  # Ray's own for a node that does not come up in time is of that very class
            self.shutdown()
            where = "in reach" if self._nodes is None else "on this machine"
            raise InfrastructureError(
                f"Ray: got {error}; expected a cluster {where}. Fix: look at Ray's logs, by default below /tmp/ray"
            ) from error

    def _connect(self, options: dict[str, Any]) -> None:
        if self._nodes is None:
            ray.init(address="auto", **options)
        elif len(self._nodes) == 1:
            devices = device_shares(self._nodes, os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
            start = _start_arguments(self._nodes[0])
            with _environment(devices):
                ray.init(address="local", include_dashboard=False, **start, **options)
        else:
            self._start_nodes()
            ray.init(address=self._cluster.address, **options)  # type: ignore[union-attr]

    def _start_nodes(self) -> None:
        self._cluster = Cluster()
        head, *others = self._nodes or []
        lean = {"include_log_monitor": False, "no_monitor": True}
        head_devices, *others_devices = device_shares(self._nodes or [], os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._cluster.add_node(include_dashboard=False, env_vars=head_devices, **lean, **_start_arguments(head))
        # The address that Ray has just written down for everyone would draw other programs of this machine here.
        reset_ray_address()
        for node, devices in zip(others, others_devices, strict=True):
            self._cluster.add_node(wait=False, env_vars=devices, **lean, **_start_arguments(node))
        self._cluster.wait_for_nodes()

    def shutdown(self) -> None:
        """Disconnect, and end what was started here."""
        ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _keep_to_itself(message: dict[str, Any], ignore_prefix: bool) -> None:
    """What Ray would print between the run's own lines, whatever its log level: our errors say it better."""
    logging.getLogger("ray").info("%s", "\n".join(message["lines"]))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """This process' environment with these variables as well, which a node that it starts inherits."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Keep Ray from handling signals: it would end the process before its workers are ended.

    The handler that it sets first can also lose a signal, by raising in a destructor. Those of its C++ part, set when
    it connects, are replaced afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    install = ray._private.utils.set_sigterm_handler
    ray._private.utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = install
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@contextmanager
def _filtered_environment() -> Iterator[None]:
    """Start Ray's processes with the allowed part of this one's environment, which other threads may be reading."""
    services = ray._private.services
    start = services.ConsolePopen
    services.ConsolePopen = lambda *args, env, **options: start(*args, env=allowed(env, LOCAL_NODE), **options)
    try:
        yield
    finally:
        services.ConsolePopen = start


def _start_arguments(node: NodeArguments) -> dict[str, Any]:
    return {
        "num_cpus": node.num_cpus,
        "num_gpus": node.num_gpus,
        "resources": node.resources,
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
