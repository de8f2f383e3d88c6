{{- define "outbox.labels" -}}
app.kubernetes.io/name: outbox-relay
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "outbox.operators" -}}
app.kubernetes.io/name: outbox-operators
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "outbox.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* What the pods of the relay and of the migration have in common. */}}
{{- define "outbox.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.files }}
volumes:
  - name: files
    secret: {secretName: {{ . }}}
{{- end }}
{{- end }}

{{- /* What their containers have in common. */}}
{{- define "outbox.container" -}}
image: {{ include "outbox.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - {name: GOMEMLIMIT, value: {{ .Values.goMemoryLimit }}}
{{- range $name, $value := .Values.env }}
  - {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
resources:
  requests: {cpu: {{ .Values.cpu }}, memory: 64Mi}
  limits: {memory: {{ .Values.memory }}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- if .Values.files }}
volumeMounts:
  - {name: files, mountPath: /etc/outbox, readOnly: true}
{{- end }}
{{- end }}
