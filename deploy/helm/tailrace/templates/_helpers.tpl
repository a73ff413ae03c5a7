{{- define "tailrace.name" -}}
{{- if contains "tailrace" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-tailrace" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "tailrace.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "tailrace.selector" . }}
{{- end }}

{{- define "tailrace.selector" -}}
app.kubernetes.io/name: tailrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tailrace.account" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "tailrace.name" .) .Values.serviceAccount.name }}{{ else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "tailrace.adminSecret" -}}
{{- default (printf "%s-admin" (include "tailrace.name" .)) .Values.admin.existingSecret }}
{{- end }}

{{/* Settings as TOML; . is a list: root, port of the listener, processes. */}}
{{- define "tailrace.settings" -}}
{{- $root := index . 0 }}
{{- $own := dict "listen" (printf "%s:%d" $root.Values.address (index . 1)) "processes" (int (index . 2))
    "admin" (dict "listen" (printf "%s:8081" $root.Values.address) "token_env" "TAILRACE_ADMIN_TOKEN") }}
{{- with $root.Values.tls }}
{{- if .secretName }}
{{- $tls := dict "certificate" "/run/tls/tls.crt" "key" "/run/tls/tls.key" }}
{{- if .clientCertificates }}{{ $_ := set $tls "client_ca" "/run/tls/ca.crt" }}{{ end }}
{{- $_ := set $own "tls" $tls }}
{{- end }}
{{- end }}
{{- $given := deepCopy $root.Values.settings }}
{{- with $given.discovery }}{{ with .kubernetes }}
{{- if not .service }}{{ $_ := unset . "service" }}{{ end }}
{{- if not .port }}{{ $_ := unset . "port" }}{{ end }}
{{- end }}{{ end }}
{{- if $root.Values.autoscaling.enabled }}
{{- /* What the router wants is found by its autopilot, from the decision log. */}}
{{- $given = merge $given (dict "autopilot" (dict "mode" "suggest") "decisions" (dict "folder" "/tmp/decisions")) }}
{{- end }}
{{- mergeOverwrite $given $own | toToml }}
{{- end }}

{{/* The pod of a command; . is a list: root, command, port, settings of the part. */}}
{{- define "tailrace.pod" -}}
{{- $root := index . 0 }}{{ $command := index . 1 }}{{ $port := index . 2 }}{{ $part := index . 3 }}
metadata:
  labels:
    {{- include "tailrace.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $command }}
  annotations:
    # Other settings mean other pods: some of them need a restart.
    checksum/settings: {{ include "tailrace.settings" (list $root $port (default 1 $part.processes)) | sha256sum }}
    {{- with $root.Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "tailrace.account" $root }}
  # lame_duck_s and drain_s, and a little more.
  terminationGracePeriodSeconds: {{ add (default 5 $root.Values.settings.lame_duck_s) (default 30 $root.Values.settings.drain_s) 10 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    fsGroup: 65532
    seccompProfile: {type: RuntimeDefault}
  containers:
    - name: {{ $command }}
      image: "{{ required "image.repository is needed: build the image with deploy/Containerfile" $root.Values.image.repository }}:{{ default $root.Chart.AppVersion $root.Values.image.tag }}"
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [venv/bin/tailrace, {{ $command }}, --config, /etc/tailrace/{{ $command }}.toml]
      env:
        - name: TAILRACE_ADMIN_TOKEN
          valueFrom:
            secretKeyRef: {name: {{ include "tailrace.adminSecret" $root }}, key: {{ $root.Values.admin.key }}}
      {{- with $root.Values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - {name: requests, containerPort: {{ $port }}}
        - {name: admin, containerPort: 8081}
      # The first start may have to compile.
      startupProbe:
        httpGet: {path: /live, port: admin}
        periodSeconds: 2
        failureThreshold: 150
      livenessProbe:
        httpGet: {path: /live, port: admin}
        periodSeconds: 10
        timeoutSeconds: 5
      # Not ready while no model server is.
      readinessProbe:
        httpGet: {path: /ready, port: admin}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      resources:
        {{- toYaml $part.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        - {name: settings, mountPath: /etc/tailrace, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if $root.Values.tls.secretName }}
        - {name: tls, mountPath: /run/tls, readOnly: true}
        {{- end }}
  volumes:
    - name: settings
      configMap: {name: {{ include "tailrace.name" $root }}}
    - name: tmp
      emptyDir: {}
    {{- with $root.Values.tls.secretName }}
    - name: tls
      secret: {secretName: {{ . }}}
    {{- end }}
  {{- with $root.Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $root.Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
