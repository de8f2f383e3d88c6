// Package deploy tests the files with which users run outbox: the Helm charts and the manifests in deploy/, and
// the docker-compose.yml of the quickstart. It is a module of its own because Helm needs many modules.
package deploy

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/stretchr/testify/require"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/lint/support"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"helm.sh/helm/v4/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
)

var (
	update = flag.Bool("update", false, "write deploy/kubernetes.yaml")
	out    = flag.String("out", "", "folder for the packages of the charts; empty: a temporary one")
)

const (
	chartDir      = "../../deploy/outbox-relay"
	monitoringDir = "../../deploy/outbox-monitoring"
	manifests     = "../../deploy/kubernetes.yaml"
)

// chartTests are values of users. Each part of the templates is rendered by one of them.
var chartTests = []struct {
	name   string
	values map[string]any
	kinds  string // of what is rendered
}{
	{"defaults", nil, "PodDisruptionBudget Job Deployment"},
	{"no migration", map[string]any{"migrationSecret": ""}, "PodDisruptionBudget Deployment"},
	{"one replica", map[string]any{"replicas": 1}, "Job Deployment"},
	{"everything", map[string]any{
		"replicas": 3, "files": "outbox-files", "memory": "1Gi", "goMemoryLimit": "900MiB", "cpu": 1,
		"image":     map[string]any{"repository": "registry.example.com/outbox", "tag": "v0.1.0-rc.1_x", "pullPolicy": "Always", "pullSecrets": []any{"registry"}},
		"env":       map[string]any{"OUTBOX_HOLD_DEAD": true, "OUTBOX_MAX_RETRIES": 5, "KAFKA_CA": "/etc/outbox/ca.pem"},
		"podLabels": map[string]any{"team": "shop"}, "podAnnotations": map[string]any{},
		"nodeSelector": map[string]any{"pool": "small"}, "tolerations": []any{map[string]any{"key": "pool", "operator": "Exists"}},
	}, "PodDisruptionBudget Job Deployment"},
	{"operators", operators, "PodDisruptionBudget Job Service Deployment Deployment"},
}

// operators are values with a process for the operators' page.
var operators = map[string]any{"files": "outbox-files", "operators": map[string]any{"secret": "outbox-operators", "databases": true}}

// The chart passes Helm's lint without a warning, and what it renders has only fields that Kubernetes knows.
func TestChart(t *testing.T) {
	for _, test := range chartTests {
		t.Run(test.name, func(t *testing.T) {
			requireKinds(t, chartDir, test.values, test.kinds)
		})
	}
}

// requireKinds requires a chart to pass Helm's lint and to render objects of these kinds.
func requireKinds(t *testing.T, dir string, values map[string]any, want string) {
	t.Helper()
	for _, message := range lint.RunAll(dir, values, "shop").Messages {
		if message.Severity > support.InfoSev {
			t.Error(message)
		}
	}
	var kinds []string
	for _, object := range decode(t, render(t, dir, values)) {
		kinds = append(kinds, object.GetObjectKind().GroupVersionKind().Kind)
	}
	require.Equal(t, want, strings.Join(kinds, " "))
}

// Values with other names or types are refused.
func TestChartRefuses(t *testing.T) {
	for _, values := range []map[string]any{{"replica": 3}, {"replicas": "two"}, {"secret": ""}, {"memory": "256"}, {"image": map[string]any{"name": "x"}}} {
		_, err := rendered(chartDir, values)
		require.ErrorContains(t, err, "values don't meet the specifications of the schema", "%v", values)
	}
}

// deploy/kubernetes.yaml is what the chart renders without values.
func TestManifests(t *testing.T) {
	text := "# What the Helm chart beside this file renders (make deploy-check ARGS=-update writes it).\n" +
		"# docs/kubernetes.md says which Secrets it needs.\n" + render(t, chartDir, nil)
	if *update {
		require.NoError(t, os.WriteFile(manifests, []byte(text), 0o644))
	}
	require.Equal(t, text, read(t, manifests), "make deploy-check ARGS=-update writes it")
}

// The manifests agree with the code: endpoints of the probes, port, user of the image, and the memory that
// TestBounds gives a relay.
func TestManifestsFitTheCommand(t *testing.T) {
	var relay *appsv1.Deployment
	var migration *batchv1.Job
	var budget *policyv1.PodDisruptionBudget
	for _, object := range decode(t, read(t, manifests)) {
		switch o := object.(type) {
		case *appsv1.Deployment:
			relay = o
		case *batchv1.Job:
			migration = o
		case *policyv1.PodDisruptionBudget:
			budget = o
		}
	}
	require.EqualValues(t, 2, *relay.Spec.Replicas)
	require.Subset(t, relay.Spec.Template.Labels, relay.Spec.Selector.MatchLabels)
	require.Equal(t, relay.Spec.Selector, budget.Spec.Selector)
	require.NotSubset(t, migration.Spec.Template.Labels, budget.Spec.Selector.MatchLabels, "the Job is not of the budget")
	require.NotEqual(t, relay.Spec.Template.Spec.Containers[0].EnvFrom, migration.Spec.Template.Spec.Containers[0].EnvFrom, "the owner migrates")

	bounds := read(t, "../../faults/bounds_test.go")
	memory := submatch(t, bounds, `relayMemory = (\d+) << 20\n`)
	heap := submatch(t, bounds, `relayHeap   = "GOMEMLIMIT=(\w+)"`)
	user := submatch(t, read(t, "../../Dockerfile"), `(?m)^USER (\d+):\d+$`)
	main := read(t, "../../cmd/outbox/main.go") + read(t, "../../cmd/outbox/relay.go") + read(t, "../../cmd/outbox/migrate.go")
	for _, pod := range []corev1.PodSpec{relay.Spec.Template.Spec, migration.Spec.Template.Spec} {
		c := pod.Containers[0]
		require.Equal(t, memory+"Mi", c.Resources.Limits.Memory().String())
		require.Contains(t, c.Env, corev1.EnvVar{Name: "GOMEMLIMIT", Value: heap})
		require.True(t, *pod.SecurityContext.RunAsNonRoot)
		require.Equal(t, user, fmt.Sprint(*pod.SecurityContext.RunAsUser))
		require.True(t, *c.SecurityContext.ReadOnlyRootFilesystem)
		require.False(t, *c.SecurityContext.AllowPrivilegeEscalation)
		require.Contains(t, main, fmt.Sprintf("%q", strings.Join(slices.DeleteFunc(slices.Clone(c.Args), isFlag), " ")), "a command")
	}
	c := relay.Spec.Template.Spec.Containers[0]
	require.Equal(t, []string{"relay", "--log", "json"}, c.Args)
	endpoints := read(t, "../../cmd/outbox/relay_http.go")
	for _, probe := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe} {
		require.Contains(t, endpoints, `"GET `+probe.HTTPGet.Path+`"`)
		require.Equal(t, c.Ports[0].Name, probe.HTTPGet.Port.String())
	}
	require.Equal(t, submatch(t, read(t, "../../cmd/outbox/relay.go"), `defaultListen = ":(\d+)"`), fmt.Sprint(c.Ports[0].ContainerPort))
	require.Greater(t, *relay.Spec.Template.Spec.TerminationGracePeriodSeconds, int64(5), "docs: it stops within 5 s")
}

// The process for the operators' page gets no traffic or budget of the relay, and its command exists.
func TestOperatorsFitTheCommand(t *testing.T) {
	deployments := map[string]*appsv1.Deployment{}
	var service *corev1.Service
	for _, object := range decode(t, render(t, chartDir, operators)) {
		switch o := object.(type) {
		case *appsv1.Deployment:
			deployments[o.Name] = o
		case *corev1.Service:
			service = o
		}
	}
	relay, serve := deployments["outbox-relay"], deployments["outbox-relay-operators"]
	require.Equal(t, service.Spec.Selector, serve.Spec.Selector.MatchLabels)
	require.Subset(t, serve.Spec.Template.Labels, serve.Spec.Selector.MatchLabels)
	require.NotSubset(t, serve.Spec.Template.Labels, relay.Spec.Selector.MatchLabels)
	require.NotSubset(t, relay.Spec.Template.Labels, serve.Spec.Selector.MatchLabels)
	require.NotEqual(t, relay.Spec.Template.Spec.Containers[0].EnvFrom, serve.Spec.Template.Spec.Containers[0].EnvFrom)

	c := serve.Spec.Template.Spec.Containers[0]
	source := read(t, "../../cmd/outbox/serve.go")
	require.Contains(t, source, fmt.Sprintf(`name:    %q`, c.Args[0]))
	for _, arg := range c.Args[1:] {
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		require.Contains(t, source, fmt.Sprintf("%q", name), "a flag")
	}
	for _, probe := range []*corev1.Probe{c.LivenessProbe, c.ReadinessProbe} {
		require.Contains(t, source, `"GET `+probe.HTTPGet.Path+`"`)
		require.Equal(t, c.Ports[0].Name, probe.HTTPGet.Port.String())
	}
	require.Equal(t, c.Ports[0].Name, service.Spec.Ports[0].TargetPort.String())
	require.Equal(t, fmt.Sprintf("--listen=:%d", c.Ports[0].ContainerPort), c.Args[1])
}

// isFlag reports whether a word is of "--log json".
func isFlag(word string) bool { return word == "--log" || word == "json" }

// The charts can be packaged, under the version that is released next.
func TestPackage(t *testing.T) {
	version := submatch(t, read(t, "../../Makefile"), `(?m)^RELEASE := (v\S+)$`)
	for _, dir := range []string{chartDir, monitoringDir} {
		chart, err := loader.LoadDir(dir)
		require.NoError(t, err)
		require.Equal(t, version, chart.Metadata.AppVersion)
		require.Equal(t, version, "v"+chart.Metadata.Version)
		name, err := chartutil.Save(chart, cmp.Or(*out, t.TempDir()))
		require.NoError(t, err)
		packaged, err := loader.LoadFile(name)
		require.NoError(t, err)
		require.Len(t, packaged.Templates, len(chart.Templates))
		require.Len(t, packaged.Files, len(chart.Files))
		t.Log("packaged ", filepath.Base(name))
	}
}

// The quickstart's docker-compose.yml follows the specification, with the images that the tests use.
func TestCompose(t *testing.T) {
	options, err := cli.NewProjectOptions([]string{"../../examples/quickstart/docker-compose.yml"}, cli.WithName("quickstart"))
	require.NoError(t, err)
	project, err := options.LoadProject(t.Context())
	require.NoError(t, err)
	docker := read(t, "../services/docker.go")
	require.Equal(t, submatch(t, docker, `postgresImage = "(\S+)"`), project.Services["postgres"].Image)
	require.Equal(t, submatch(t, docker, `kafkaImages   = "(\S+)"`)+submatch(t, read(t, "../kafkaserver/libraries.go"), `const Version = "(\S+)"`),
		project.Services["kafka"].Image)
}

func render(t *testing.T, dir string, values map[string]any) string {
	t.Helper()
	text, err := rendered(dir, values)
	require.NoError(t, err)
	return text
}

// rendered returns what Helm would apply, in the order of the names of the templates.
func rendered(dir string, values map[string]any) (string, error) {
	chart, err := loader.LoadDir(dir)
	if err != nil {
		return "", err
	}
	release := common.ReleaseOptions{Name: "outbox-relay", Namespace: "shop", IsInstall: true}
	all, err := util.ToRenderValues(chart, values, release, common.DefaultCapabilities)
	if err != nil {
		return "", err
	}
	files, err := engine.Render(chart, all)
	if err != nil {
		return "", err
	}
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if content := strings.TrimSpace(files[name]); content != "" {
			fmt.Fprintf(&text, "---\n%s\n", content)
		}
	}
	return text.String(), nil
}

// decode reads manifests, and fails at fields that their kind does not have.
func decode(t *testing.T, text string) (objects []runtime.Object) {
	t.Helper()
	decoder := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	for _, document := range regexp.MustCompile(`(?m)^---\n`).Split(text, -1) {
		if bytes.Contains([]byte(document), []byte("kind:")) {
			object, _, err := decoder.Decode([]byte(document), nil, nil)
			require.NoError(t, err, document)
			objects = append(objects, object)
		}
	}
	return objects
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(text)
}

// submatch returns what the parentheses of the pattern match.
func submatch(t *testing.T, text, pattern string) string {
	t.Helper()
	found := regexp.MustCompile(pattern).FindStringSubmatch(text)
	require.NotNil(t, found, pattern)
	return found[1]
}
