{{- define "baton.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Labels of a selector, which never change. Arguments: root, component. */ -}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "baton.metadata" -}}
name: {{ include "baton.fullname" .root }}-{{ .name | default .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end -}}

{{- define "baton.secretName" -}}
{{- .Values.auth.existingSecret | default (printf "%s-auth" (include "baton.fullname" .)) -}}
{{- end -}}

{{- define "baton.tlsSecretName" -}}
{{- if .Values.tls.existingSecret -}}
{{- .Values.tls.existingSecret -}}
{{- else if .Values.tls.certManager.enabled -}}
{{- include "baton.fullname" . }}-tls
{{- else -}}
{{- fail "tls.enabled needs tls.existingSecret or tls.certManager.enabled" -}}
{{- end -}}
{{- end -}}

{{- /* The name that the certificate of every process has, whatever its address. */ -}}
{{- define "baton.serverName" -}}
{{- include "baton.fullname" . }}-cluster
{{- end -}}

{{- define "baton.routerAccount" -}}
{{- .Values.serviceAccount.routerName | default (printf "%s-router" (include "baton.fullname" .)) -}}
{{- end -}}

{{- define "baton.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* The connector's URL. The password is in a file, as others see command lines. */ -}}
{{- define "baton.kvConnector" -}}
{{- if .Values.kvConnector -}}
{{- .Values.kvConnector -}}
{{- else if and .Values.redis.enabled .Values.tls.enabled -}}
{{- fail "tls.enabled: the chart's Redis does not encrypt; set kvConnector, such as grpc://0.0.0.0:7100, and redis.enabled to false" -}}
{{- else if .Values.redis.enabled -}}
redis://{{ include "baton.fullname" . }}-redis:6379/0?password_file=/run/baton/redis-password
{{- else -}}
{{- fail "kvConnector is empty and redis.enabled is false: set one of them" -}}
{{- end -}}
{{- end -}}

{{- /* Flags of every process. */ -}}
{{- define "baton.commonArgs" -}}
- --model={{ .Values.model.name }}
{{- with .Values.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
- --host=0.0.0.0
- --cluster-token-file=/run/baton/token
- --metrics-token-file=/run/baton/metrics-token
{{- if .Values.tls.enabled }}
- --ssl-certfile=/run/baton-tls/tls.crt
- --ssl-keyfile=/run/baton-tls/tls.key
- --ssl-ca-certs=/run/baton-tls/ca.crt
- --cluster-server-name={{ include "baton.serverName" . }}
{{- end }}
{{- end -}}

{{- define "baton.commonEnv" -}}
- {name: HF_HOME, value: /hub}
{{- with .Values.model.hub.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.commonMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/baton}
- {name: hub, mountPath: /hub}
- {name: credentials, mountPath: /run/baton, readOnly: true}
{{- if .Values.tls.enabled }}
- {name: certificates, mountPath: /run/baton-tls, readOnly: true}
{{- end }}
{{- if .Values.model.claimName }}
- name: model
  mountPath: {{ .Values.model.mountPath }}
  readOnly: true
  {{- with .Values.model.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- /* Arguments: root, keys of the Secret. */ -}}
{{- define "baton.commonVolumes" -}}
- {name: tmp, emptyDir: {}}
- {name: home, emptyDir: {}}
{{- with .root.Values.model.hub.cacheClaimName }}
- {name: hub, persistentVolumeClaim: {claimName: {{ . }}}}
{{- else }}
- {name: hub, emptyDir: {}}
{{- end }}
- name: credentials
  secret:
    secretName: {{ include "baton.secretName" .root }}
    defaultMode: 0444 # any user of the pod, whoever that is
    items:
      {{- range .keys }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- if .root.Values.tls.enabled }}
- name: certificates
  secret: {secretName: {{ include "baton.tlsSecretName" .root }}, defaultMode: 0444}
{{- end }}
{{- with .root.Values.model.claimName }}
- {name: model, persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}}
{{- end }}
{{- end -}}

{{- /* Arguments: component, values. */ -}}
{{- define "baton.rollingUpdate" -}}
{{- $update := .values.rollingUpdate -}}
{{- if and (has (toString $update.maxSurge) (list "0" "0%")) (has (toString $update.maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "%s.rollingUpdate: maxSurge and maxUnavailable are both 0, so no pod could be replaced" .component) -}}
{{- end -}}
{{- toJson $update -}}
{{- end -}}

{{- /* Where routers keep the files and batches of clients. */ -}}
{{- define "baton.batchVolume" -}}
{{- with .Values.router.batches -}}
{{- if .claimName -}}
- {name: batches, persistentVolumeClaim: {claimName: {{ .claimName }}}}
{{- else if or (gt (int $.Values.router.replicas) 1) $.Values.endpointPicker.enabled -}}
{{- fail "router.batches.claimName is empty, and there are several routers: each would have batches of its own" -}}
{{- else -}}
- {name: batches, emptyDir: {{ ternary (dict "sizeLimit" .sizeLimit) dict (ne .sizeLimit "") | toJson }}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* What the platform does before SIGTERM, and how long the process has in all. */ -}}
{{- define "baton.grace" -}}
{{- add .preStopSeconds .shutdownDelaySeconds .drainTimeoutSeconds 15 -}}
{{- end -}}

{{- define "baton.lifecycle" -}}
{{- if .preStopSeconds }}
lifecycle:
  preStop:
    sleep: {seconds: {{ .preStopSeconds }}}
{{- end }}
{{- end -}}

{{- define "baton.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- /* Where pods run. Argument: the tier's values. */ -}}
{{- define "baton.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{ toJson . }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- /* Flags by which a router finds a tier. Arguments: root, tier. */ -}}
{{- define "baton.target" -}}
{{- $service := printf "%s-%s" (include "baton.fullname" .root) .tier -}}
{{- if eq .root.Values.discovery "kubernetes" -}}
k8s:///{{ .root.Release.Namespace }}/{{ $service }}:grpc
{{- else if eq .root.Values.discovery "dns" -}}
{{ include "baton.dnsTarget" . }}
{{- else -}}
register:///
{{- end -}}
{{- end -}}

{{- define "baton.dnsTarget" -}}
dns:///{{ include "baton.fullname" .root }}-{{ .tier }}.{{ .root.Release.Namespace }}.svc:50051
{{- end -}}

{{- define "baton.podMetadata" -}}
labels:
  {{- include "baton.labels" . | nindent 2 }}
  {{- if ne .component "router" }}
  llm-d.ai/role: {{ .component }}
  {{- end }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .values.podAnnotations }}
annotations: {{ toJson . }}
{{- end }}
{{- end -}}

{{- /* The query of one tier's prompt work, in seconds; each router reports every replica. */ -}}
{{- define "baton.backlogQuery" -}}
{{- $series := include "baton.seriesSelector" .root -}}
sum(max by (replica) (baton_router_replica_backlog_seconds{ {{- $series }},tier="{{ .tier }}"}))
{{- end -}}

{{- /* The query of the requests that a tier's replicas have. */ -}}
{{- define "baton.requestsQuery" -}}
{{- $series := include "baton.seriesSelector" .root -}}
sum(max by (replica) (baton_router_replica_requests{ {{- $series }},tier="{{ .tier }}"}))
{{- end -}}

{{- define "baton.waitingQuery" -}}
sum(baton_router_waiting_requests{ {{- include "baton.seriesSelector" .root -}} })
{{- end -}}

{{- define "baton.seriesSelector" -}}
{{- $matchers := list -}}
{{- range $label, $value := .Values.autoscaling.seriesSelector | default (dict "namespace" .Release.Namespace) -}}
{{- $matchers = append $matchers (printf "%s=%q" $label $value) -}}
{{- end -}}
{{- join "," $matchers -}}
{{- end -}}

{{- /* The same labels for a HorizontalPodAutoscaler, whose metrics are those of its namespace already. */ -}}
{{- define "baton.metricLabels" -}}
{{- range $label, $value := .Values.autoscaling.seriesSelector -}}
{{- if not (regexMatch "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$" $value) -}}
{{- fail (printf "autoscaling.seriesSelector.%s is %q, which is no label value of Kubernetes; only type keda can select it" $label $value) -}}
{{- end -}}
{{- end -}}
{{- .Values.autoscaling.seriesSelector | default dict | toJson -}}
{{- end -}}

{{- /* "true" if the tier's replicas are groups of pods. Arguments: root, values. */ -}}
{{- define "baton.isGroup" -}}
{{- if or .root.Values.disaggregatedSet.enabled (gt (int .values.groupSize) 1) -}}true{{- end -}}
{{- end -}}

{{- /* The object whose replicas a scaler sets; that of a role is made by the controller of its set.
Arguments: root, component, values. */ -}}
{{- define "baton.scaleTarget" -}}
{{- $target := dict "apiVersion" "apps/v1" "kind" "Deployment" -}}
{{- if .root.Values.disaggregatedSet.enabled -}}
{{- $target = dict "apiVersion" "disaggregatedset.x-k8s.io/v1" "kind" "DisaggregatedSetRoleScaler" -}}
{{- else if include "baton.isGroup" . -}}
{{- $target = dict "apiVersion" "leaderworkerset.x-k8s.io/v1" "kind" "LeaderWorkerSet" -}}
{{- end -}}
{{- toJson (set $target "name" (printf "%s-%s" (include "baton.fullname" .root) .component)) -}}
{{- end -}}
