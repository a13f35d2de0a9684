# shellcheck shell=bash disable=SC2154  # part of cluster.sh, which names the engine and the programs
# GPUs of the workers: the machine's own where NVIDIA's container toolkit is set up, else ones that are only advertised.

gpu_mount=/var/run/nvidia-container-devices/all

# The toolkit takes a mount of this name for "all GPUs" (accept-nvidia-visible-devices-as-volume-mounts in its config).
has_toolkit() {
  [[ $engine == docker ]] && command -v nvidia-ctk >/dev/null &&
    grep -qs '^ *accept-nvidia-visible-devices-as-volume-mounts *= *true' /etc/nvidia-container-runtime/config.toml
}

# kind's configuration, with the machine's GPUs in its workers where there are any.
with_gpus() {
  has_toolkit || { cat "$1"; return; }
  sed -E "/^ +extraMounts: \&storage/a\\      - {hostPath: $(command -v nvidia-ctk), containerPath: /usr/bin/nvidia-ctk, readOnly: true}\\n\
      - {hostPath: /dev/null, containerPath: $gpu_mount}" "$1"
}

offer_gpus() {
  local node
  for node in $(kubectl get nodes -l pool=gpu -o name); do
    if has_toolkit; then
      # Devices by CDI: the node tells containerd what a GPU is, the plugin which one a pod gets.
      docker exec "${node#node/}" sh -c 'umount -R /proc/driver/nvidia; nvidia-ctk cdi generate --output /var/run/cdi/nvidia.yaml'
    else
      advertise_gpus "$node"
    fi
  done
  ! has_toolkit || kubectl apply --server-side --force-conflicts -f "$here/gpus"
}

# The worker's kubelet keeps resources that it does not know, over restarts too.
advertise_gpus() {
  local key=nvidia.com~1gpu
  kubectl patch "$1" --subresource=status --type=json -p "[
    {\"op\": \"add\", \"path\": \"/status/capacity/$key\", \"value\": \"$gpus\"},
    {\"op\": \"add\", \"path\": \"/status/allocatable/$key\", \"value\": \"$gpus\"}]"
}
