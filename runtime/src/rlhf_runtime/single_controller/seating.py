"""Which bundles of a placement group a worker holds, and its rank."""

from collections.abc import Sequence

from rlhf_runtime.errors import PlacementError
from rlhf_runtime.single_controller.worker import Seat, assign_seats


def seat_workers(
    group: str, bundle_nodes: Sequence[str], device: str, bundles_per_worker: int
) -> list[tuple[Seat, tuple[int, ...]]]:
    """Ranks for workers that hold several neighbouring bundles each.

    Args:
        group: Name of the group.
        bundle_nodes: Node of each bundle, by bundle index.
        device: `cpu` or `cuda`.
        bundles_per_worker: How many bundles a worker holds, all on one node.

    Returns:
        Seat and bundle indices, in rank order.

    Raises:
        PlacementError: when bundles of a worker are on different nodes, or are not enough for the last one.
    """
    order = [bundle for _, bundle in assign_seats(group, bundle_nodes, device)]
    held = [tuple(order[at : at + bundles_per_worker]) for at in range(0, len(order), bundles_per_worker)]
    for worker, bundles in enumerate(held):
        nodes = {bundle_nodes[bundle] for bundle in bundles}
        if len(bundles) < bundles_per_worker or len(nodes) > 1:
            raise PlacementError(
                f"group `{group}`, worker {worker}: got {len(bundles)} bundles on {len(nodes)} node(s); expected "
                f"{bundles_per_worker} on one. Fix: let each node hold a multiple of {bundles_per_worker} bundles"
            )
    seats = assign_seats(group, [bundle_nodes[bundles[0]] for bundles in held], device)
    return [(seat, held[worker]) for seat, worker in seats]


def join_devices(devices: Sequence[str], bundles_per_worker: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES shows a worker that holds several bundles, given it for each, in rank order.

    Bundles may share a GPU.
    """
    held = (devices[at : at + bundles_per_worker] for at in range(0, len(devices), bundles_per_worker))
    return [",".join(dict.fromkeys(part)) for part in held]
