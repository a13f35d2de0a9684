#!/usr/bin/env bash
# The network of this node's pods: a point-to-point link for each, and a route to the pods of every other node.
# A unit of systemd rather than a pod: it needs nothing that the node has not.
set -euo pipefail
export KUBECONFIG=/etc/kubernetes/kubelet.conf
conf=/etc/cni/net.d/10-pods.conflist
pods=10.244.0.0/16

iptables -w -t nat -C POSTROUTING -s $pods ! -d $pods -j MASQUERADE 2>/dev/null ||
  iptables -w -t nat -A POSTROUTING -s $pods ! -d $pods -j MASQUERADE
until [[ -s $KUBECONFIG ]]; do sleep 1; done

write_conf() {
  jq -n --arg subnet "$1" '{cniVersion: "0.3.1", name: "pods", plugins: [
    {type: "ptp", mtu: 1500, ipam: {type: "host-local", dataDir: "/run/cni-ipam", routes: [{dst: "0.0.0.0/0"}],
      ranges: [[{subnet: $subnet}]]}},
    {type: "portmap", capabilities: {portMappings: true}}]}' >$conf.new
  mv $conf.new $conf
}

while :; do
  nodes=$(kubectl get nodes -o json || echo '{"items": []}')
  while IFS=$'\t' read -r name subnet address; do
    if [[ $name != "$HOSTNAME" ]]; then
      ip route replace "$subnet" via "$address"
    elif [[ ! -s $conf ]]; then
      write_conf "$subnet"
    fi
  done < <(jq -r '.items[] | select(.spec.podCIDR) | [.metadata.name, .spec.podCIDR,
    (.status.addresses[]? | select(.type == "InternalIP") | .address)] | select(length == 3) | @tsv' <<<"$nodes")
  if [[ -s $conf ]]; then sleep 10; else sleep 1; fi
done
