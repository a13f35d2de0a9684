"""A Kubernetes control plane as plain processes: the real one, without a container or a machine of its own.

etcd, kube-apiserver, kube-controller-manager, kube-scheduler and the KubeRay operator run as they do in a cluster; the
nodes are KWOK's: pods that the scheduler puts there turn Ready with no process behind them.

    with ControlPlane.start(folder) as cluster:
        cluster.start_controllers()
        with cluster.nodes(GpuNodes("train", count=2, labels={"gpu": "h100"})):
            cluster.kubectl("apply", "-f", "job.yaml")
"""

from control_plane.audit import Request
from control_plane.cluster import Cluster
from control_plane.nodes import GpuNodes
from control_plane.plane import ControlPlane
from control_plane.programs import API_SERVER, CONTROLLERS, BuildError, build

__all__ = ["API_SERVER", "CONTROLLERS", "BuildError", "Cluster", "ControlPlane", "GpuNodes", "Request", "build"]
