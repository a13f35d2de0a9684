"""Several roles in one process: one copy of the libraries, one GPU, one process group."""

from collections.abc import Mapping
from typing import ClassVar

from rlhf_runtime.single_controller.worker import RayClassWithInitArgs, Worker


class ColocatedWorker(Worker):
    """A worker that holds one worker a role, made in the order given."""

    role_classes: ClassVar[Mapping[str, type[Worker]]] = {}
    """The class of each role."""

    def __init__(self, roles: Mapping[str, RayClassWithInitArgs]):
        self._workers: dict[str, Worker] = {}
        for role, spec in roles.items():
            worker = spec.cls.__new__(spec.cls)
            worker.seat = self.seat
            worker.__init__(*spec.args, **spec.kwargs)  # type: ignore[misc]
            self._workers[role] = worker

    def worker_of(self, role: str) -> Worker:
        """The role's worker."""
        return self._workers[role]


def create_colocated_worker_cls(roles: Mapping[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """One class that runs all these roles in a process; `RayWorkerGroup.spawn` gives a view a role."""
    attributes = {
        "role_classes": {role: spec.cls for role, spec in roles.items()},
        "needs_process_group": any(spec.cls.needs_process_group for spec in roles.values()),
        "env_allow_list": tuple(dict.fromkeys(name for spec in roles.values() for name in spec.cls.env_allow_list)),
    }
    name = "".join(role.capitalize() for role in roles) + "Worker"
    return RayClassWithInitArgs(type(name, (ColocatedWorker,), attributes), dict(roles))
