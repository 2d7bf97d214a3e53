"""A Kubernetes for tests: an API server that knows secrets and jobs, and runs each job's container as a process of this machine.

A container gets the environment that its specification says and nothing else of ours, and an empty working folder; a claim is
"mounted" by having its own path. What the real API server refuses is refused. The image is this machine, whose `python` is ours.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{{name: test, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
users: [{{name: test, user: {{}}}}]
current-context: test
"""


class Refused(Exception):
    pass


class Cluster:
    def __init__(self, folder: Path):
        self.folder, self.secrets, self.specs, self.processes = folder, {}, {}, {}
        for name, line in {"python": f'exec {sys.executable} "$@"', "pip": "exit 0"}.items():  # the plugin is installed
            (shim := folder / "bin" / name).parent.mkdir(exist_ok=True)
            shim.write_text(f"#!/bin/sh\n{line}\n")
            shim.chmod(0o755)

    def create_job(self, body: dict) -> None:
        pod = body["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        wants, limits = (container["resources"].get(kind, {}) for kind in ("requests", "limits"))
        for name in wants:
            if "/" in name and limits.get(name) != wants[name]:
                raise Refused(f"{name}: Limit must be set for non overcommitable resources")
        volumes = {volume["name"] for volume in pod["volumes"]}
        if unknown := {mount["name"] for mount in container["volumeMounts"]} - volumes:
            raise Refused(f"volumeMounts not found: {unknown}")
        env = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder)}
        for each in container.get("env", []):
            key = each["valueFrom"]["secretKeyRef"]
            env[each["name"]] = base64.b64decode(self.secrets[key["name"]][key["key"]]).decode()
        work = tempfile.mkdtemp(dir=self.folder)
        name = body["metadata"]["name"]
        with (self.folder / f"{name}.log").open("w") as out:
            self.processes[name] = subprocess.Popen(
                [*container["command"], *container["args"]], env=env, cwd=work, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
        self.specs[name] = pod

    def status(self, name: str) -> dict:
        code = self.processes[name].poll()
        return {} if code is None else {"succeeded": 1} if code == 0 else {"failed": 1}

    def delete_job(self, name: str) -> None:
        process = self.processes[name]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def handle(self, method: str, path: str, body: dict) -> dict:
        """The answer to a request."""
        path, _, _ = path.partition("?")
        if path.endswith("/secrets") and method == "POST":
            self.secrets[body["metadata"]["name"]] = body.get("data", {})
            return body
        if path.endswith("/jobs") and method == "POST":
            self.create_job(body)
            return body
        if found := re.search(r"/jobs/([^/]+)(/status)?$", path):
            if method == "DELETE":
                self.delete_job(found[1])
                return {"kind": "Status", "status": "Success"}
            return {"metadata": {"name": found[1]}, "status": self.status(found[1])}
        if path.endswith("/pods"):
            return {"kind": "PodList", "items": []}
        if "/secrets/" in path and method == "DELETE":
            del self.secrets[path.rpartition("/")[2]]
            return {"kind": "Status", "status": "Success"}
        raise Refused(f"{method} {path} is not known here")


@contextmanager
def kubernetes(folder: Path) -> Iterator[tuple[Cluster, Path]]:
    """Run one in an empty folder; gives it, and the file that KUBECONFIG shall name."""
    cluster = Cluster(folder)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or b"{}")
            try:
                code, told = 200, cluster.handle(self.command, self.path, body)
            except Refused as error:
                code, told = 422, {"kind": "Status", "status": "Failure", "message": str(error)}
            data = json.dumps(told).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    (config := folder / "config").write_text(KUBECONFIG.format(port=server.server_port))
    try:
        yield cluster, config
    finally:
        for name in cluster.processes:
            cluster.delete_job(name)
        server.shutdown()
        server.server_close()
