"""The control plane as a whole: started, paused, listened to, ended."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from control_plane import audit
from control_plane.cluster import Cluster
from control_plane.credentials import make_signing_key, make_tokens, write_kubeconfig
from control_plane.nodes import ANNOTATION
from control_plane.processes import Process, StartError, reserve_port
from control_plane.programs import API_SERVER, CONTROLLERS, build
from control_plane.stages import own_address, write_stages

ISSUER = "https://kubernetes.default.svc"
QUICK = ("--kube-api-qps=500", "--kube-api-burst=1000", "--leader-elect=false", "--secure-port=0")


class ControlPlane(Cluster):
    """A running control plane.

    Attributes:
        folder: State and logs.
        server: Address of the API server.
        processes: The programs by name.
        pod_address: Where all simulated pods are: a server that listens there answers for each of them, through the
            API server's service proxy too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, Process] = {}
        self.pod_address = own_address()
        self._programs = build(*API_SERVER)
        self._port = reserve_port()
        self.server = f"https://127.0.0.1:{self._port.getsockname()[1]}"
        self._tokens = make_tokens(folder / "tokens.csv")
        make_signing_key(folder / "service-accounts.key")
        (folder / "audit-policy.json").write_text(json.dumps(audit.POLICY))
        super().__init__(self.kubeconfig_of("admin"), folder, self._programs["kubectl"])

    @classmethod
    @contextmanager
    def start(cls, folder: Path) -> Iterator["ControlPlane"]:
        """Starts the API server in an empty folder, and ends every process when the context does.

        For what only the API server does this is enough; `start_controllers` makes it a cluster.

        Raises:
            BuildError: When a program cannot be built.
            StartError: When one does not come up; its log is in the folder.
        """
        cluster = cls(folder)
        try:
            cluster._start_api_server()
            yield cluster
        finally:
            # Nothing here outlives the run, so nobody is asked to end in good order.
            for process in reversed(cluster.processes.values()):
                process.stop()
            cluster._port.close()

    def start_controllers(self) -> None:
        """Starts everything else: the controllers, the scheduler, KubeRay, and KWOK for the nodes.

        Raises:
            BuildError: When a program cannot be built.
            StartError: When one does not come up.
        """
        self._programs |= build(*CONTROLLERS)
        self._run(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig_of('system:kube-controller-manager')}",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={self.folder}/service-accounts.key",
            f"--root-ca-file={self._authority}",
            *QUICK,
        )
        self._run("kube-scheduler", f"--kubeconfig={self.kubeconfig_of('system:kube-scheduler')}", *QUICK)
        stages = write_stages(self._programs["kwok"], self.folder / "stages", self.pod_address)
        self._run(
            "kwok",
            f"--kubeconfig={self.kubeconfig_of('kwok')}",
            "--manage-all-nodes=false",
            f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
            # Else nodes count as lost for a moment each minute, and their pods for good.
            "--node-lease-duration-seconds=40",
            "--server-address=",
            *(f"--config={file}" for file in stages),
        )
        self.apply(self._programs["kuberay"].parent / "config" / "crd" / "bases")
        self._run(
            "kuberay",
            "--metrics-addr=0",
            "--health-probe-bind-address=0",
            "--enable-leader-election=false",
            "--qps=500",
            "--burst=1000",
            KUBECONFIG=str(self.kubeconfig_of("kuberay")),
        )
        # A pod needs its namespace's service account, which the controller manager makes.
        self.processes["kube-controller-manager"].wait_until(
            "service account", lambda: self.api.get("/api/v1/namespaces/default/serviceaccounts/default").is_success
        )

    def kubeconfig_of(self, user: str) -> Path:
        """A kubeconfig of one of the users in `credentials.USERS`, whose name the audit log shows."""
        file = self.folder / f"{user.replace(':', '-')}.kubeconfig"
        cluster = {"server": self.server, "certificate-authority": str(self._authority)}
        return write_kubeconfig(file, cluster, self._tokens[user])

    def requests(self, user: str, offset: int = 0) -> list[audit.Request]:
        """What a user has asked the API server for.

        Args:
            user: Name of the user; a service account is `system:serviceaccount:NAMESPACE:NAME`.
            offset: An earlier `audit_size`, to look at what came after it.
        """
        return [request for request in audit.read(self._audit_log, offset) if request.user == user]

    @property
    def audit_size(self) -> int:
        """Bytes of the audit log by now."""
        return self._audit_log.stat().st_size

    @contextmanager
    def paused(self, program: str) -> Iterator[None]:
        """Stops a program from answering while the context lasts; connections stay open and silent."""
        self.processes[program].pause()
        try:
            yield
        finally:
            self.processes[program].go_on()

    def restart(self, program: str) -> None:
        """Kills a program and starts it again; the API server is waited for."""
        self.processes[program].stop()
        self.processes[program].start()
        if program == "kube-apiserver":
            self._wait_for_api_server()

    @property
    def _authority(self) -> Path:
        return self.folder / "certificates" / "apiserver.crt"

    @property
    def _audit_log(self) -> Path:
        return self.folder / "audit.log"

    def _run(self, name: str, *flags: str, **env: str) -> Process:
        process = Process(name, [str(self._programs[name]), *flags], self.folder / f"{name}.log", env)
        process.start()
        self.processes[name] = process
        return process

    def _start_api_server(self) -> None:
        socket = f"unix://{self.folder}/etcd.sock"
        self._run(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={socket}",
            "--advertise-client-urls=http://localhost:2379",  # asked for, and used by nobody
            f"--listen-peer-urls=unix://{self.folder}/etcd-peer.sock",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        self._run(
            "kube-apiserver",
            f"--etcd-servers={socket}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.server.rsplit(':', 1)[1]}",
            "--permit-port-sharing",
            f"--cert-dir={self.folder}/certificates",
            # No pod ever calls: the `kubernetes` service needs no endpoint, and the address is never used.
            "--endpoint-reconciler-type=none",
            f"--advertise-address={self.pod_address}",
            "--service-cluster-ip-range=10.96.0.0/12",
            "--authorization-mode=Node,RBAC",
            f"--token-auth-file={self.folder}/tokens.csv",
            f"--service-account-issuer={ISSUER}",
            f"--service-account-key-file={self.folder}/service-accounts.key",
            f"--service-account-signing-key-file={self.folder}/service-accounts.key",
            f"--audit-policy-file={self.folder}/audit-policy.json",
            f"--audit-log-path={self._audit_log}",
            "--audit-log-maxsize=10000",
            "--allow-privileged",
            "--profiling=false",
        )
        self._wait_for_api_server()

    def _wait_for_api_server(self) -> None:
        def ready() -> bool:
            if self.processes["etcd"].ended:
                raise StartError(f"etcd ended:\n{self.processes['etcd'].tail()}")
            # The certificate is the server's own, made on its start.
            with suppress(httpx.TransportError):
                return self._authority.exists() and self.api.get("/readyz", timeout=5).status_code == 200
            return False

        self.processes["kube-apiserver"].wait_until("answer of /readyz", ready)
