# shellcheck shell=bash disable=SC2154  # part of cluster.sh, which names the engine and the programs
# A registry beside the nodes. What is published there moves to a node by layers, when a pod needs it: of a change of
# our code only the layer that has it.

registry=$name-registry
registry_image=localhost/rlhf-registry:v3.1.2

# An image that holds one static program. $1: program, $2: name in the image, $3: image.
build_program_image() {
  local folder
  folder=$(mktemp -d)
  cp "${path_of[$1]}" "$folder/$2"
  printf 'FROM scratch\nCOPY %s /%s\nUSER 65532\nENTRYPOINT ["/%s"]\n' "$2" "$2" "$2" >"$folder/Dockerfile"
  "$engine" build --quiet --tag "$3" "$folder"
  rm -rf "$folder"
}

start_registry() {
  local node hosts=/etc/containerd/certs.d/_default
  if [[ $("$engine" container inspect --format '{{.State.Running}}' "$registry" 2>/dev/null) != true ]]; then
    stop_registry
    build_program_image registry registry "$registry_image"
    "$engine" run --detach --name "$registry" --network kind --publish 127.0.0.1::5000 --user 0 \
      --env OTEL_TRACES_EXPORTER=none --volume "$registry:/data" --volume "$here/registry.yaml:/registry.yaml:ro" \
      "$registry_image" serve /registry.yaml
  fi
  # Whatever the name of an image says: it is asked for here first, then where the name says.
  for node in $(kind get nodes --name "$name"); do
    "$engine" exec --interactive "$node" sh -c "mkdir -p $hosts && cat >$hosts/hosts.toml" <<EOF
[host."http://$registry:5000"]
  capabilities = ["pull", "resolve"]
EOF
  done
}

stop_registry() {
  "$engine" rm --force --volumes "$registry" >/dev/null 2>&1 || true
  "$engine" volume rm "$registry" >/dev/null 2>&1 || true
  rm -f "$images"
}

# Pushes an image and prints its name with its digest: who runs that gets what was pushed, never an older one.
publish() {
  local image=$1 port repository=${1#*/} target digest file=$state/digest
  port=$("$engine" port "$registry" 5000/tcp | head -n 1)
  target=localhost:${port##*:}/$repository
  if [[ $engine == docker ]]; then
    docker tag "$image" "$target"
    docker push --quiet "$target" >/dev/null
    digest=$(docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$target" |
      sed -n "s#^${target%:*}@##p")
    docker rmi --no-prune "$target" >/dev/null
  else
    # gzip, the default, would take most of the time of a publication, and of a pull.
    podman push --quiet --tls-verify=false --format oci --compression-format zstd --digestfile "$file" \
      "$image" "docker://$target"
    digest=$(cat "$file")
    rm "$file"
  fi
  [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || fail "$image: got the digest '$digest' when it was pushed; expected one sha256:..."
  echo "$image@$digest"
}
