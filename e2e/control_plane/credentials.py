"""Who may speak to the API server: static tokens, kubeconfigs, and the key that signs service-account tokens."""

import base64
import json
import secrets
import ssl
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx

Json = dict[str, Any]

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


def write_kubeconfig(file: Path, cluster: Json, token: str) -> Path:
    """Writes a kubeconfig of one cluster and one user; JSON is YAML too.

    Args:
        file: Where to.
        cluster: The cluster, as a kubeconfig describes it: its server, and the authority of its certificate.
        token: The user's bearer token.

    Returns:
        The file.
    """
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    file.write_text(json.dumps(config))
    file.chmod(0o600)
    return file


def client_of(config: Json) -> httpx.Client:
    """An HTTP client of the API server that a kubeconfig names.

    Args:
        config: A kubeconfig of one context, with its files read in (`kubectl config view --minify --raw --flatten`).
    """
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
    context = ssl.create_default_context(cadata=authority)
    if "client-certificate-data" in user:
        # The standard library reads a client's key from a file alone.
        with tempfile.NamedTemporaryFile() as pair:
            pair.write(base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"]))
            pair.flush()
            context.load_cert_chain(pair.name)
    headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
    return httpx.Client(base_url=cluster["server"], headers=headers, verify=context, trust_env=False, timeout=30)
