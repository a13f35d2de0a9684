{{/* What the operator does in a namespace whose jobs it runs: every verb that it uses, and none beyond. */}}
{{- define "rlhf-operator.rules" -}}
- apiGroups: [rlhf-operator.io]
  resources: [rlhfjobs]
  verbs: [get, list, watch, delete]   # delete: ttlSecondsAfterFinished
- apiGroups: [rlhf-operator.io]
  resources: [rlhfjobs/status]
  verbs: [patch]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, delete]
# get: whose it is that has the name, before it is written or deleted
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch, delete]
# The token of a job's Ray cluster. RBAC can tell a Secret by its name alone, and these get theirs with the job.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
# Why a cluster does not start.
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{/*
What has no namespace: nodes, for PlacementFeasible; definitions, to notice KubeRay when it is installed later, and to
refuse what its own would drop.
*/}}
{{- define "rlhf-operator.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list]
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [get, list, watch]
{{- end -}}
