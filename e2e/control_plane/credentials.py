"""Who may speak to the API server: static tokens, kubeconfigs, and the key that signs service-account tokens."""

import json
import secrets
import subprocess
from pathlib import Path

# The control plane's own users have their roles from Kubernetes; the rest may do everything, each under its own name.
USERS = {
    "admin": "system:masters",
    "kuberay": "system:masters",
    "kwok": "system:masters",
    "rlhf-operator": "system:masters",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
}


def make_tokens(file: Path) -> dict[str, str]:
    """Writes a token file for kube-apiserver.

    Returns:
        The token of each user.
    """
    tokens = {user: secrets.token_hex(16) for user in USERS}
    file.write_text("".join(f'{token},{user},{user},"{USERS[user]}"\n' for user, token in tokens.items()))
    file.chmod(0o600)
    return tokens


def make_signing_key(file: Path) -> None:
    """Writes the private key that signs and checks service-account tokens."""
    subprocess.run(
        ["openssl", "ecparam", "-genkey", "-noout", "-name", "prime256v1", "-out", file],
        check=True,
        capture_output=True,
    )


def write_kubeconfig(file: Path, server: str, authority: Path, token: str) -> Path:
    """Writes a kubeconfig of one cluster and one user; JSON is YAML too.

    Args:
        file: Where to.
        server: Address of the API server.
        authority: Certificate that the server's is checked against.
        token: The user's bearer token.

    Returns:
        The file.
    """
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority": str(authority)}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    file.write_text(json.dumps(config))
    file.chmod(0o600)
    return file
