#!/usr/bin/env bash
# Makes sure of a container engine and what builds a node image where none can be pulled. As root on Debian it installs
# what is missing, saying so; elsewhere it tells what to install.
set -euo pipefail

packages=(podman buildah debootstrap runc containernetworking-plugins iptables nftables conntrack netavark aardvark-dns)
commands=(podman buildah debootstrap runc iptables nft conntrack)

fail() { echo "prerequisites: $*" >&2; exit 1; }

command -v go >/dev/null || fail "got no Go; expected 1.26 or later on the PATH. Fix: install it (https://go.dev/dl)"
if docker info >/dev/null 2>&1; then exit; fi
missing=()
for command in "${commands[@]}"; do command -v "$command" >/dev/null || missing+=("$command"); done
[[ -x /usr/lib/podman/netavark || -x /usr/libexec/podman/netavark ]] || missing+=(netavark)
((${#missing[@]})) || exit 0

if ((EUID == 0)) && [[ -f /etc/debian_version ]]; then
  echo "installing Debian packages, as there is no Docker and no ${missing[*]}: ${packages[*]}" >&2
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${packages[@]}" >/dev/null
else
  fail "got no running Docker, nor ${missing[*]}; expected either. Fix: start Docker, or install podman" \
    "(Debian: sudo apt-get install --no-install-recommends ${packages[*]})"
fi
