#!/usr/bin/env bash
# Makes sure of Go and a container engine. As root on Debian without Docker it installs podman and what builds a node image
# where none can be pulled, saying so; elsewhere it tells what to install.
set -euo pipefail

packages=(podman buildah debootstrap runc containernetworking-plugins iptables nftables conntrack netavark aardvark-dns)

fail() { echo "prerequisites: $*" >&2; exit 1; }
there() { command -v "$1" >/dev/null; }

there go || fail "got no Go; expected 1.26 or later on the PATH. Fix: install it (https://go.dev/dl)"
if docker info >/dev/null 2>&1; then exit; fi
if ((EUID == 0)) && [[ -f /etc/debian_version ]]; then
  if there podman && there debootstrap && there runc && there iptables; then exit; fi
  echo "installing Debian packages, as Docker does not run: ${packages[*]}" >&2
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${packages[@]}" >/dev/null
elif ! there podman; then
  fail "got neither a running Docker nor podman; expected one of them. Fix: start Docker, or install podman" \
    "(Debian: sudo apt-get install --no-install-recommends ${packages[*]})"
fi
