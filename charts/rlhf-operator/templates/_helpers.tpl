{{/* Name of every object of this release. */}}
{{- define "rlhf-operator.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Cluster-scoped objects carry the namespace too, so that two releases of one name don't share them. */}}
{{- define "rlhf-operator.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "rlhf-operator.fullname" .) -}}
{{- end -}}

{{/* What selects the operator's pod. A job's NetworkPolicy lets in pods of this name. */}}
{{- define "rlhf-operator.selector" -}}
app.kubernetes.io/name: rlhf-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "rlhf-operator.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: rlhf-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: rlhf-operator
{{- end -}}

{{- define "rlhf-operator.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "rlhf-operator.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: got nothing; expected the account to use. Fix: name it, or set serviceAccount.create" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "rlhf-operator.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{- if .Values.image.digest -}}
{{- printf "%s:%s@%s" .Values.image.repository $tag .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository $tag -}}
{{- end -}}
{{- end -}}

{{/* Each value of `settings` is the field of that name in rlhf_operator.settings. */}}
{{- define "rlhf-operator.env" -}}
{{- with .Values.watchNamespaces }}
- {name: RLHF_OPERATOR_NAMESPACES, value: {{ join "," . | quote }}}
{{- end }}
{{- range $name, $value := .Values.settings }}
{{- if kindIs "slice" $value }}
{{- $value = join "," $value }}
{{- end }}
{{- if ne (toString $value) "" }}
- {name: RLHF_OPERATOR_{{ snakecase $name | upper }}, value: {{ toString $value | quote }}}
{{- end }}
{{- end }}
{{- end -}}
