"""What ``deploy/`` says is what ``llorch serve`` has, and its times and users fit each other."""

from __future__ import annotations

import configparser
import functools
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from llorch_serve.calls.front_desk import FAREWELL_S
from llorch_serve.cluster.spec_file import load_spec
from llorch_serve.errors import ArtifactError, ProviderError, UsageError
from llorch_serve.rpc import SERVICE_NAME
from llorch_serve.rpc.server import _LAST_CALLS_S
from llorch_serve.terminal import serve
from support.harness.processes import llorch_here

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CLOSING_S = 5.0  # for the model to be freed and the process to end, on a busy machine
ENDING_S = _LAST_CALLS_S + FAREWELL_S + CLOSING_S
NOT_FLAGS = {"LLORCH_API_TOKEN"}


def dockerfile() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions with what follows them."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines) if name]


def stage(name: str) -> list[tuple[str, str]]:
    """Return the instructions of a stage, behind those of the stage that it is from."""
    found: dict[str, list[tuple[str, str]]] = {}
    for instruction, rest in dockerfile():
        if instruction == "FROM":
            base, _, own = rest.partition(" AS ")
            current = found[own] = list(found.get(base, []))
        current.append((instruction, rest))
    return found[name]


def variables_of(instructions: list[tuple[str, str]]) -> dict[str, str]:
    """Return what ENV sets."""
    pairs = [pair for name, rest in instructions if name == "ENV" for pair in shlex.split(rest)]
    return dict(pair.split("=", 1) for pair in pairs)


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(DEPLOY / "llorch@.service")
    return parser["Service"]


def environment_file() -> dict[str, str]:
    lines = (DEPLOY / "llorch.env").read_text().splitlines()
    # What is commented out is there to be taken.
    found = dict(re.fullmatch(r"(?:# )?(LLORCH_\w+)=(.*)", line).groups() for line in lines if "=" in line)
    assert len(found) >= 6
    return found


DEPLOYMENT, SERVICE = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def pod_variables() -> dict[str, str]:
    return {entry["name"]: entry.get("value", "secret") for entry in CONTAINER["env"]}


WAYS = {
    "unit": (
        shlex.split(unit()["ExecStart"].replace("%i", "smollm2"))[2:],
        environment_file() | {"LLORCH_API_TOKEN": "secret"},
    ),
    "cpu": (["--port", "50051"], variables_of(stage("cpu"))),
    "cuda": (["--port", "50051"], variables_of(stage("cuda"))),
    "pod": (CONTAINER["args"], variables_of(stage("cpu")) | pod_variables()),
}


@pytest.fixture
def got(monkeypatch):
    found = {}

    @functools.wraps(serve.command)
    def command(**arguments):
        found.update(arguments)

    monkeypatch.setattr(serve, "command", command)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_every_flag_and_variable_is_one_that_serve_reads(got, way):
    flags, variables = WAYS[way]
    plain = llorch_here("serve", *flags, **variables)
    assert plain.code == 0, plain
    told = dict(got)
    for name, value in variables.items():
        if name.startswith("LLORCH_") and name not in NOT_FLAGS:
            field = name.removeprefix("LLORCH_").lower()
            assert str(getattr(told[field], "value", told[field])) == value, name


def test_the_unit_gives_the_drain_its_time(got):
    flags, variables = WAYS["unit"]
    llorch_here("serve", *flags, **variables)
    assert float(unit()["TimeoutStopSec"]) >= got["drain_timeout"] + ENDING_S
    assert unit()["KillMode"] == "mixed"
    assert "KillSignal" not in unit()  # SIGTERM is systemd's own


def test_the_unit_tries_again_only_where_that_may_help():
    codes = {kind.exit_code for kind in (UsageError, ArtifactError, ProviderError)}
    assert set(map(int, unit()["RestartPreventExitStatus"].split())) == codes


def test_the_unit_runs_without_rights():
    assert (unit()["DynamicUser"], unit()["NoNewPrivileges"], unit()["CapabilityBoundingSet"]) == (
        "yes",
        "yes",
        "",
    )


@pytest.mark.parametrize("variant", ["cpu", "cuda", "ray"])
def test_images_run_the_worker_as_nobody(variant):
    found = dict(stage(variant))  # of several, the last one
    assert found["USER"] == "10001:10001"
    assert json.loads(found["ENTRYPOINT"]) == ["llorch", "serve"]
    assert "CMD" not in found
    [copied] = [rest for name, rest in stage(variant) if name == "COPY"]
    assert copied == f"--from=build-{variant} /opt/llorch /opt/llorch"
    installed = dict(stage(f"build-{variant}"))["RUN"]
    extras = re.search(r"\.\[([a-z,]+)\]", installed).group(1).split(",")
    assert {"cuda": "cuda", "ray": "ray"}.get(variant, "cpu") in extras
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])


def test_what_the_wheel_needs_is_copied_and_not_ignored():
    copied = {
        path.removeprefix("./").rstrip("/")
        for name, rest in stage("build")
        if name == "COPY"
        for path in rest.split()[:-1]
    }
    project = PROJECT["project"]
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {
        project["readme"],
        *project["license-files"],
        "pyproject.toml",
        *(p.split("/")[0] for p in packages),
    }
    assert needed <= copied
    assert all((REPOSITORY / path).exists() for path in copied)
    ignored, *kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored == "*"
    assert {line.removeprefix("!") for line in kept if line.startswith("!")} == copied


def test_probes_ask_the_workers_own_health():
    probes = [CONTAINER[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    port = int(variables_of(stage("cpu"))["LLORCH_PORT"])
    assert [probe["grpc"] for probe in probes] == [{"port": port, "service": SERVICE_NAME}] * 3
    startup = probes[0]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 600
    assert all(probe["timeoutSeconds"] <= probe["periodSeconds"] for probe in probes)


def test_the_grace_period_covers_pre_stop_drain_and_end(got):
    llorch_here("serve", *CONTAINER["args"], **WAYS["pod"][1])
    pause = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] >= pause + got["drain_timeout"] + ENDING_S


def test_the_pod_runs_the_image_as_its_own_user_and_without_rights():
    uid, _, gid = dict(stage("cpu"))["USER"].partition(":")
    context = POD["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"]) == (
        True,
        int(uid),
        int(gid),
    )
    own = CONTAINER["securityContext"]
    assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert CONTAINER["image"] == f"llorch:{PROJECT['project']['version']}"
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounts["model"] == variables_of(stage("cpu"))["MODEL_PATH"]
    assert set(mounts) == {volume["name"] for volume in POD["volumes"]}


def test_the_service_finds_the_pods_and_their_ports():
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == SERVICE["spec"]["selector"] == labels
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert {port["targetPort"]: port["port"] for port in SERVICE["spec"]["ports"]} == ports
    assert ports["http"] == int(CONTAINER["args"][-1].rpartition(":")[2])


[CLUSTER] = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
FRONTS, FRONTS_SERVICE, SCALER = yaml.safe_load_all((DEPLOY / "fronts.yaml").read_text())
FRONT_POD = FRONTS["spec"]["template"]["spec"]
[FRONT] = FRONT_POD["containers"]
[MODEL] = load_spec(DEPLOY / "cluster.toml")
IMAGE = f"llorch:{PROJECT['project']['version']}-ray"


def test_fronts_have_the_flags_of_serve_and_join_the_head_of_the_cluster(got):
    script, _, *flags = FRONT["args"]
    assert FRONT["command"] == ["/bin/sh", "-c"]
    outcome = llorch_here("serve", *flags)
    assert outcome.code == 0, outcome
    head = f"{CLUSTER['metadata']['name']}-head-svc:6379"
    assert (got["cluster"], got["model"]) == (head, MODEL.name)
    # What callers of the front show is no business of Ray's processes.
    assert f"env -u LLORCH_API_TOKEN ray start --address {head} --num-cpus 0 " in script
    assert script.endswith('&& exec llorch serve "$@"')
    pause = FRONT["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert FRONT_POD["terminationGracePeriodSeconds"] >= pause + got["drain_timeout"] + ENDING_S
    ports = {port["name"]: port["containerPort"] for port in FRONT["ports"]}
    assert {port["targetPort"]: port["port"] for port in FRONTS_SERVICE["spec"]["ports"]} == ports
    assert ports["http"] == int(got["http"].rpartition(":")[2])
    assert SCALER["spec"]["scaleTargetRef"]["name"] == FRONTS["metadata"]["name"]
    assert FRONTS_SERVICE["spec"]["selector"] == FRONTS["spec"]["selector"]["matchLabels"]


def test_all_of_a_cluster_have_one_image_release_and_token():
    nodes = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]
    containers = [one for node in nodes for one in node["template"]["spec"]["containers"]]
    assert {one["image"] for one in [*containers, FRONT]} == {IMAGE}
    pins = (REPOSITORY / "ci" / "constraints.txt").read_text().splitlines()
    assert f"ray=={CLUSTER['spec']['rayVersion']}" in pins
    auth = CLUSTER["spec"]["authOptions"]
    assert auth["mode"] == "token"
    variables = {one["name"]: one for one in FRONT["env"]}
    assert variables["RAY_AUTH_MODE"]["value"] == "token"
    assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": auth["secretName"],
        "key": "auth_token",
    }
    assert CLUSTER["spec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}


def test_a_node_has_what_a_replica_of_the_example_takes_and_the_time_to_end_it():
    [group] = CLUSTER["spec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    [container] = pod["containers"]
    assert int(container["resources"]["requests"]["cpu"]) == MODEL.settings.cores
    assert (group["minReplicas"], group["maxReplicas"]) == (MODEL.replicas.least, MODEL.replicas.most)
    assert pod["terminationGracePeriodSeconds"] > MODEL.drain_s
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert MODEL.settings.artifact in mounts
    assert MODEL.settings.artifact in {mount["mountPath"] for mount in FRONT["volumeMounts"]}


def test_no_pod_of_a_cluster_has_more_rights_than_it_needs():
    nodes = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]
    pods = [FRONT_POD, *(node["template"]["spec"] for node in nodes)]
    for pod in pods:
        assert pod["securityContext"] == POD["securityContext"]
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    autoscaler = CLUSTER["spec"]["autoscalerOptions"]["securityContext"]
    assert autoscaler == FRONT["securityContext"]
    # It asks Kubernetes for nodes, from the head's pod.
    assert [pod["automountServiceAccountToken"] for pod in pods] == [False, True, False]


def test_ray_is_reached_by_nodes_of_the_cluster_alone():
    ray, front = yaml.safe_load_all((DEPLOY / "cluster-network.yaml").read_text())
    cluster = {"ray.io/cluster": CLUSTER["metadata"]["name"]}
    fronts = FRONTS["spec"]["selector"]["matchLabels"]
    everybody = {"ray": {"metrics"}, "front": {port["name"] for port in FRONT["ports"]}}
    for name, policy, pods in (("ray", ray, cluster), ("front", front, fronts)):
        assert policy["spec"]["podSelector"] == {"matchLabels": pods}
        inside, outside = policy["spec"]["ingress"]
        assert [one["podSelector"]["matchLabels"] for one in inside["from"]] == [cluster, fronts]
        assert {port["port"] for port in outside["ports"]} == everybody[name]


def test_keda_scales_the_workers_by_metrics_that_they_have():
    [scaled] = yaml.safe_load_all((DEPLOY / "keda.yaml").read_text())
    assert scaled["spec"]["scaleTargetRef"]["name"] == DEPLOYMENT["metadata"]["name"]
    [trigger] = scaled["spec"]["triggers"]
    assert trigger["metadata"]["threshold"] == pod_variables()["LLORCH_SLOTS"]
    meters = (REPOSITORY / "serve/llorch_serve/observe/meters.py").read_text()
    assert re.search(r"llorch:num_requests_\(running\|waiting\)", trigger["metadata"]["query"])
    assert {"num_requests_running", "num_requests_waiting"} <= set(re.findall(r"num_requests_\w+", meters))
