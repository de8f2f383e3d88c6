package deploy

import (
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

func init() {
	if err := monitoringv1.AddToScheme(scheme.Scheme); err != nil {
		panic(err)
	}
}

// off is new for each test: Helm adds the defaults to what it gets.
func off() map[string]any { return map[string]any{"enabled": false} }

// monitoringTests are values of users. Each object can be switched off.
var monitoringTests = []struct {
	name   string
	values map[string]any
	kinds  string
}{
	{"defaults", nil, "ConfigMap PodMonitor PrometheusRule"},
	{"no dashboard", map[string]any{"dashboard": off()}, "PodMonitor PrometheusRule"},
	{"no alerts", map[string]any{"rules": off()}, "ConfigMap PodMonitor"},
	{"no scraping", map[string]any{"pods": []any{}}, "ConfigMap PrometheusRule"},
	{"everything", map[string]any{
		"labels":    map[string]any{"release": "prometheus"},
		"dashboard": map[string]any{"labels": map[string]any{"shown": "yes"}, "annotations": map[string]any{"grafana_folder": "Shop"}},
		"pods": []any{
			map[string]any{"name": "relays", "matchLabels": map[string]any{"app.kubernetes.io/name": "outbox-relay"}, "port": "http", "path": "/metrics"},
			map[string]any{"name": "orders", "matchLabels": map[string]any{"app": "orders"}, "port": "metrics", "path": "/"},
		},
	}, "ConfigMap PodMonitor PodMonitor PrometheusRule"},
}

// The chart passes Helm's lint, and what it renders has only fields that Kubernetes and the Prometheus Operator know.
func TestMonitoring(t *testing.T) {
	for _, test := range monitoringTests {
		t.Run(test.name, func(t *testing.T) {
			requireKinds(t, monitoringDir, test.values, test.kinds)
			for _, object := range decode(t, render(t, monitoringDir, test.values)) {
				labels := object.(interface{ GetLabels() map[string]string }).GetLabels()
				require.Equal(t, "outbox-monitoring", labels["app.kubernetes.io/name"])
				if test.name == "everything" {
					require.Equal(t, "prometheus", labels["release"])
				}
			}
		})
	}
}

// Values with other names or types are refused.
func TestMonitoringRefuses(t *testing.T) {
	for _, values := range []map[string]any{{"alerts": off()}, {"rules": true}, {"labels": map[string]any{"release": 1}}, {"pods": []any{map[string]any{"name": "orders"}}},
		{"pods": []any{map[string]any{"name": "all", "matchLabels": map[string]any{}, "port": "http", "path": "/metrics"}}}} {
		_, err := rendered(monitoringDir, values)
		require.ErrorContains(t, err, "values don't meet the specifications of the schema", "%v", values)
	}
}

// Grafana's sidecar finds the dashboard, unchanged. The alerts are those of the file, each in place.
func TestMonitoringInstallsTheFiles(t *testing.T) {
	objects := decode(t, render(t, monitoringDir, nil))
	dashboard := find[*corev1.ConfigMap](t, objects)
	require.Equal(t, "1", dashboard.Labels["grafana_dashboard"])
	require.Equal(t, map[string]string{"outbox.json": read(t, monitoringDir+"/files/dashboard.json")}, dashboard.Data)
	require.NotContains(t, dashboard.Data["outbox.json"], "__inputs", "the sidecar cannot answer questions of an import")

	var want monitoringv1.PrometheusRuleSpec
	require.NoError(t, yaml.UnmarshalStrict([]byte(read(t, monitoringDir+"/files/alerts.yml")), &want))
	require.Len(t, want.Groups[0].Rules, 17)
	require.Equal(t, want, find[*monitoringv1.PrometheusRule](t, objects).Spec)
}

// The PodMonitor finds the relays of the chart outbox-relay, at an endpoint of the command.
func TestMonitoringFindsRelays(t *testing.T) {
	relay := find[*appsv1.Deployment](t, decode(t, render(t, chartDir, nil)))
	monitor := find[*monitoringv1.PodMonitor](t, decode(t, render(t, monitoringDir, nil)))
	require.Subset(t, relay.Spec.Template.Labels, monitor.Spec.Selector.MatchLabels)
	require.NotEmpty(t, monitor.Spec.Selector.MatchLabels)
	endpoint := monitor.Spec.PodMetricsEndpoints[0]
	require.Equal(t, relay.Spec.Template.Spec.Containers[0].Ports[0].Name, *endpoint.Port)
	require.Contains(t, read(t, "../../cmd/outbox/relay_http.go"), `"GET `+endpoint.Path+`"`)
	require.Contains(t, relay.Spec.Template.Labels, "app.kubernetes.io/instance", "it names the job")
}

// find returns the only object of a type.
func find[T runtime.Object](t *testing.T, objects []runtime.Object) (found T) {
	t.Helper()
	n := 0
	for _, object := range objects {
		if o, ok := object.(T); ok {
			found = o
			n++
		}
	}
	require.Equal(t, 1, n)
	return found
}
