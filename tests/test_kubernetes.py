"""Studies through the Kubernetes profile: an API server of ours takes Snakemake's jobs and runs what their containers would."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import yaml

import kubernetes_api
from helpers import project, runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("rsync"), reason="not installed: rsync"),
    pytest.mark.skipif(
        not find_spec("snakemake_executor_plugin_kubernetes"), reason="not installed: Kubernetes' plugin (make cluster)"
    ),
]
STUDY = """
name: far
pages: []
runs:
  - {name: base-xs, stage: base}
  - {name: broken, stage: base, params: {fault: user}}
  - {name: "eval-{parent}", stage: eval, parent: ["base-*", broken]}
  - {name: pareto, stage: pareto, parents: ["eval-base-*"]}
"""


def test_a_study_runs_in_pods_which_get_gpus_memory_and_the_volume(home, tmp_path):
    (home / "notebooks" / "studies" / "far.yml").write_text(STUDY)
    folder = home / "notebooks" / "workflow" / "profiles" / "kubernetes"
    said = yaml.safe_load((folder / "config.yaml").read_text())
    said["kubernetes-persistent-volumes"] = [f"lowbit-runs:{home / 'runs'}"]
    said |= {"seconds-between-status-checks": 1, "latency-wait": 5}
    (folder / "config.yaml").write_text(yaml.safe_dump(said))
    (there := tmp_path / "kubernetes").mkdir()
    with kubernetes_api.kubernetes(there) as (cluster, config):
        command = [sys.executable, "-m", "helpers.cli", "study", "far", "--jobs", "3", "--profile", "kubernetes"]
        env = {**os.environ, "KUBECONFIG": str(config)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        logs = [(home / "runs" / "far" / "logs" / "snakemake.log"), *there.glob("*.log")]
        assert "far: 3 ran, 0 were done, 1 failed, 1 not run" in done.stdout, "\n".join(
            [done.stdout, done.stderr, *(log.read_text()[-3000:] for log in logs if log.exists())]
        )
        assert "broken failed: The task is not there." in done.stdout
        assert not cluster.secrets  # removed at the end
        plan = json.loads((home / "runs" / "far" / "plan.json").read_text())["jobs"]
        asked = [pod["containers"][0]["resources"]["limits"] for pod in cluster.specs.values()]
        planned = [job for job in plan if job["name"] != "eval-broken"]
        assert sorted((each["nvidia.com/gpu"], each["memory"], each["cpu"]) for each in asked) == sorted(
            (str(job["gpus"]), f"{job['mem_mb']}M", "4000m") for job in planned
        )
        assert {each["ephemeral-storage"] for each in asked} == {"2000M"}
        (pareto,) = (job for job in plan if job["name"] == "pareto")
        assert runs.read(runs.done(pareto["run_id"])).metrics[0].value == 1
        made = len(cluster.specs)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
        assert "far: 0 ran, 3 were done, 1 failed, 1 not run" in done.stdout
        assert len(cluster.specs) == made + 1  # only the broken one is tried again


def test_the_pod_that_starts_a_study_has_the_profiles_image_claim_and_namespace():
    folder = project.PACKAGE.parents[1] / "notebooks" / "workflow" / "profiles" / "kubernetes"
    profile = yaml.safe_load((folder / "config.yaml").read_text())
    documents = list(yaml.safe_load_all((folder / "study.yaml").read_text()))
    from kubernetes.client import ApiClient

    client = ApiClient()
    for each in documents:  # a field that Kubernetes does not know is gone afterwards, and one that it wants is missed
        read = client.deserialize(SimpleNamespace(data=json.dumps(each)), f"V1{each['kind']}")
        assert client.sanitize_for_serialization(read) == each
    found = {each["kind"]: each for each in documents}
    assert {each["metadata"].get("namespace") for kind, each in found.items() if kind != "Namespace"} == {
        profile["kubernetes-namespace"]
    }
    pod = found["Job"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == profile["container-image"]
    claim = pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
    assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]
    assert profile["kubernetes-persistent-volumes"] == [f"{claim}:{container['volumeMounts'][0]['mountPath']}"]
    assert pod["serviceAccountName"] == found["RoleBinding"]["subjects"][0]["name"]
    allowed = {
        (resource, verb) for rule in found["Role"]["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }
    assert allowed >= {  # what the plugin calls
        *(("jobs", "create"), ("jobs", "delete"), ("jobs/status", "get"), ("pods", "list"), ("pods", "delete")),
        *(("pods/log", "get"), ("secrets", "create"), ("secrets", "delete")),
    }
    assert container["args"][:2] == ["lowbit", "study"]
    assert "--profile" in container["args"]
