#!/usr/bin/env bash
# Builds the images, as far as something of them changed: docker/build.sh [runtime|operator...]
# BUILD=cpu|gpu: vLLM's build in the runtime. IMAGE_PREFIX: what goes before the names. BASE_IMAGE: another base.
# Each image's bill of materials and the log of its build go to build/images.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${BUILD:-cpu}
prefix=${IMAGE_PREFIX:-localhost/}
published=docker.io/library/python:3.11-slim-bookworm
packages=python3,python3-venv,ca-certificates,wget
out=build/images
version=$(sed -n 's/^version = "\(.*\)"/\1/p' runtime/pyproject.toml)

fail() { echo "images: $*" >&2; exit 1; }
say() { echo "$(date +%T) images: $*" >&2; }

# The container engine that runs: Docker if its daemon answers, else podman, else buildah.
find_engine() {
  network=(--network host)
  if docker info >/dev/null 2>&1; then
    engine=docker network=()
    export DOCKER_BUILDKIT=1
  elif podman info >/dev/null 2>&1; then
    engine=podman
  elif buildah info >/dev/null 2>&1; then
    engine=buildah
  else
    fail "no container engine that runs. Fix: start Docker, or install podman (Debian: apt-get install podman)"
  fi
  say "building with $engine"
}

have() {
  if [[ $engine == buildah ]]; then buildah inspect --type image "$1"; else "$engine" image inspect "$1"; fi >/dev/null 2>&1
}

# $1: log, then the arguments of a build.
run_build() {
  local log=$1
  shift
  [[ $engine != buildah ]] || set -- --layers "$@"
  "$engine" build "${network[@]}" "$@" >"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "not built; the whole log: $log"; }
}

# Sets base. Where no registry answers, it is made of Debian's packages, once.
find_base() {
  local built
  base=${BASE_IMAGE:-}
  [[ -z $base ]] || return 0
  built=localhost/rlhf-base:bookworm-$({ echo "$packages"; declare -f make_base; } | sha256sum | head -c 12)
  if have "$built"; then base=$built; return; fi
  base=$published
  if have "$base" || timeout 300 "$engine" pull "$base" >"$out/base.log" 2>&1; then return; fi
  say "$published cannot be pulled: making a base of Debian's packages (about a minute; log: $out/base.log)"
  command -v debootstrap >/dev/null || fail "no debootstrap. Fix: apt-get install debootstrap, or set BASE_IMAGE"
  ((EUID == 0)) || fail "debootstrap needs root. Fix: run it once as root, or set BASE_IMAGE"
  make_base "$built"
  base=$built
}

make_base() { # image
  debootstrap --variant=minbase --include="$packages" bookworm "$work/rootfs" \
    "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >>"$out/base.log" 2>&1 ||
    { tail -n 20 "$out/base.log" >&2; fail "debootstrap failed; the whole log: $out/base.log"; }
  mkdir "$work/base"
  tar -C "$work/rootfs" --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' --exclude='./var/log/*' \
    --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' \
    -cf "$work/base/rootfs.tar" .
  rm -rf "$work/rootfs"
  printf 'FROM scratch\nADD rootfs.tar /\nCMD ["bash"]\n' >"$work/base/Dockerfile"
  run_build "$out/base-image.log" --tag "$1" "$work/base"
}

# What builds read, with the times and rights of files made alike: podman and buildah take others for a change.
make_context() {
  context=$work/context
  mkdir "$context"
  tar --mtime=@0 --mode=u=rwX,go=rX --exclude=__pycache__ --exclude='*.egg-info' -c LICENSE operator requirements runtime |
    tar -x -C "$context"
}

# $1: runtime or operator.
build_image() {
  local name=rlhf-$1 tag=$version started=$SECONDS revision ca=${PIP_CERT:-${SSL_CERT_FILE:-}} arguments
  [[ $1 == operator || $build == cpu ]] || tag+=-$build
  local image=$prefix$name:$tag log=$out/$name-$tag.log sbom=$out/$name-$tag.cdx.json
  revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
  [[ -z $(git status --porcelain 2>/dev/null) ]] || revision+=-dirty
  arguments=(--build-arg "BASE_IMAGE=$base" --build-arg "VERSION=$version" --build-arg "REVISION=$revision")
  [[ $1 == operator ]] || arguments+=(--build-arg "BUILD=$build")
  # A certificate authority of this machine is seen by the build's downloads alone.
  [[ -z $ca ]] ||
    arguments+=(--secret "id=ca,src=$ca" --build-arg PIP_CERT=/run/ca.crt --build-arg SSL_CERT_FILE=/run/ca.crt)
  say "$image (minutes the first time; log: $log)"
  run_build "$log" "${arguments[@]}" --file "docker/$1.Dockerfile" --tag "$image" "$context"
  copy_sbom "$image" "$sbom"
  say "$image is there after $((SECONDS - started)) s; its bill of materials: $sbom"
}

copy_sbom() { # image, target
  local container
  if [[ $engine == buildah ]]; then
    container=$(buildah from "$1")
    cp "$(buildah mount "$container")/opt/rlhf/sbom.cdx.json" "$2"
  else
    container=$("$engine" create "$1")
    "$engine" cp "$container:/opt/rlhf/sbom.cdx.json" "$2"
  fi
  "$engine" rm "$container" >/dev/null
}

(($#)) || set -- runtime operator
for name; do
  [[ $name == runtime || $name == operator ]] || fail "got '$name'; expected runtime or operator"
done
[[ $build == cpu || $build == gpu ]] || fail "BUILD: got '$build'; expected cpu or gpu"
# A machine without systemd, or with fewer capabilities than podman expects, needs other defaults.
[[ -n ${CONTAINERS_CONF:-} || -d /run/systemd/system ]] || export CONTAINERS_CONF=$PWD/e2e/kind/containers.conf
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
find_engine
find_base
make_context
for name; do build_image "$name"; done
