"""What KWOK does with pods, and where they seem to be."""

import re
import socket
from pathlib import Path

PODS_THAT_WAIT = Path(__file__).parent / "pod-waiting.yaml"


def own_address() -> str:
    """This machine's address, which other machines would use; the loopback's where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it chooses a route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def write_stages(kwok: Path, target: Path, address: str) -> list[Path]:
    """Writes KWOK's own stages of a pod and ours, with one address for all pods.

    With addresses of KWOK's choice, requests for a pod would leave this machine. With its own they are refused, or
    answered by a server that a test has started in the pod's place.

    Args:
        kwok: The program, beside which its stages are.
        target: Folder that takes the files.
        address: Address of all pods.

    Returns:
        The files, as `kwok --config` takes them.
    """
    target.mkdir()
    files = []
    for source in (PODS_THAT_WAIT, *sorted((kwok.parent / "pod-stages").glob("pod-*.yaml"))):
        files.append(target / source.name)
        files[-1].write_text(re.sub(r"podIP: \{\{.*\}\}", f"podIP: {address}", source.read_text()))
    return files
