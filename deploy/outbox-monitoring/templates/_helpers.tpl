{{- define "outbox.labels" -}}
app.kubernetes.io/name: outbox-monitoring
app.kubernetes.io/instance: {{ .Release.Name }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}
