{{- define "lamina.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 33 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 33 characters: with "-agent-" and a group it is 52, the most that a StatefulSet can label its pods with. */}}
{{- define "lamina.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 33 | trimSuffix "-" -}}
{{- else if contains (include "lamina.name" .) .Release.Name -}}
{{- .Release.Name | trunc 33 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "lamina.name" .) | trunc 33 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "lamina.selector" -}}
app.kubernetes.io/name: {{ include "lamina.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "lamina.labels" -}}
{{ include "lamina.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "lamina.image" -}}
{{- $image := .Values.image -}}
{{- if not $image.repository }}{{ fail "image.repository: name your image (deploy/docker/Dockerfile is a start)" }}{{ end -}}
{{- if eq $image.tag "latest" }}{{ fail "image.tag: 'latest' names another image tomorrow; give a version or image.digest" }}{{ end -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else if $image.tag -}}
{{ $image.repository }}:{{ $image.tag }}
{{- else -}}
{{ fail "image.tag: give a version, or image.digest" }}
{{- end -}}
{{- end -}}

{{/* Name of the Secret behind a value: (dict "root" $ "field" "store" "value" "url"). Exactly one of value and existingSecret is given. */}}
{{- define "lamina.secret" -}}
{{- $given := index .root.Values .field -}}
{{- $value := index $given .value -}}
{{- if and $value $given.existingSecret }}{{ fail (printf "%s: give %s.%s or %s.existingSecret, not both" .field .field .value .field) }}{{ end -}}
{{- if not (or $value $given.existingSecret) }}{{ fail (printf "%s: give %s.existingSecret, or %s.%s for a Secret made by the chart" .field .field .field .value) }}{{ end -}}
{{- default (printf "%s-%s" (include "lamina.fullname" .root) .field) $given.existingSecret -}}
{{- end -}}

{{- define "lamina.secretKey" -}}
{{- $given := index .root.Values .field -}}
{{- ternary $given.existingSecretKey .value (ne $given.existingSecret "") -}}
{{- end -}}

{{- define "lamina.serviceAccount" -}}
{{- default (ternary (printf "%s-controller" (include "lamina.fullname" .)) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "lamina.scheme" -}}
{{- ternary "https" "http" (ne .Values.tls.existingSecret "") -}}
{{- end -}}

{{/* Names of the controllers' pods: a StatefulSet's, so agents, peers and roles can name them. */}}
{{- define "lamina.controllerPods" -}}
{{- $names := list -}}
{{- range $i := until (int .Values.controller.replicas) -}}
{{- $names = append $names (printf "%s-controller-%d" (include "lamina.fullname" $) $i) -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}

{{- define "lamina.joinAddresses" -}}
{{- $found := list -}}
{{- range splitList "," (include "lamina.controllerPods" .) -}}
{{- $found = append $found (printf "%s.%s-controllers.%s.svc:8710" . (include "lamina.fullname" $) $.Release.Namespace) -}}
{{- end -}}
{{- join "," $found -}}
{{- end -}}

{{/* A group of agents with its defaults filled in, as JSON: (dict "root" $ "name" $name "group" $group). */}}
{{- define "lamina.group" -}}
{{- mustMergeOverwrite (deepCopy .root.Values.agentDefaults) (deepCopy (default (dict) .group)) | toJson -}}
{{- end -}}

{{- define "lamina.needsApi" -}}
{{- $needs := gt (int .Values.controller.replicas) 1 -}}
{{- range $name, $group := .Values.agents -}}
{{- $g := include "lamina.group" (dict "root" $ "name" $name "group" $group) | fromJson -}}
{{- if $g.autoscaling.enabled }}{{ $needs = true }}{{ end -}}
{{- end -}}
{{- ternary "true" "" $needs -}}
{{- end -}}

{{- define "lamina.enabledWhere" -}}
{{- $enabled := .enabled | toString -}}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") (.root.Capabilities.APIVersions.Has .api)) }}true{{ end -}}
{{- end -}}

{{/* Writable places of a container with a read-only root file system: (dict "shm" "1Gi" "tmp" "4Gi"). */}}
{{- define "lamina.writableMounts" -}}
- { name: shm, mountPath: /dev/shm }
- { name: tmp, mountPath: /tmp }
- { name: state, mountPath: /var/lib/lamina }
{{- end -}}

{{- define "lamina.writableVolumes" -}}
- name: shm  # large values pass between processes here; the container's own is 64 MiB
  emptyDir: { medium: Memory, sizeLimit: {{ .shm }} }
- name: tmp
  emptyDir: { sizeLimit: {{ .tmp }} }
- name: state
  emptyDir: {}
{{- end -}}
