"""One `shoal up` on 127.0.0.1 for the Python tests, with one instance of the test model served."""

import json
import os
import pathlib
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

MODEL = "smollm2-135m"

# A promise in seconds is printed; a test fails only at ten times it.
READY_PROMISE_S = 8
GRACE = 10


class Agent:
    """Starts in `with`, is gone after it, whatever ended the block: its end of the pipe closes with this process."""

    def __init__(self, context=1024, slots=4):
        self.serve = {"model": MODEL, "context": context, "slots": slots}
        self.instance = None

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="shoal-test-")
        data = pathlib.Path(self.folder.name) / "data"
        runtime = pathlib.Path(self.folder.name) / "run"
        runtime.mkdir(mode=0o700)
        logs = pathlib.Path(os.environ.get("SHOAL_TEST_LOGS", self.folder.name))
        logs.mkdir(parents=True, exist_ok=True)
        self.log = open(logs / f"agent-{os.getpid()}.log", "ab")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SHOAL_")}
        environment["XDG_RUNTIME_DIR"] = str(runtime)
        self.process = subprocess.Popen(
            [
                os.environ["SHOAL_BIN"], "up", "--parent-pipe", "--no-mdns",
                "--name", "python", "--swarm", f"test-py-{os.getpid()}",
                "--data-dir", str(data), "--model-dir", os.environ["SHOAL_TEST_MODEL_DIR"],
                "--http", "127.0.0.1:0", "--listen", "/ip4/127.0.0.1/tcp/0", "--data-listen", "127.0.0.1:0",
            ],
            stdin=subprocess.PIPE, stdout=self.log, stderr=self.log, env=environment,
        )
        try:
            wait_for("the agent answers", lambda: self._find(data))
            self.instance = self.call("POST", "/api/v1/instances", self.serve)["instance"]
            wait_for("the instance is ready", self._is_ready)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.folder.cleanup()

    def _find(self, data):
        assert self.process.poll() is None, f"the agent ended with {self.process.returncode}; see {self.log.name}"
        file = json.loads((data / "agent.json").read_text())
        assert file["pid"] == self.process.pid
        self.url = f"http://{file['http']}"
        assert self.call("GET", "/health")["status"]

    def _is_ready(self):
        instances = {i["id"]: i for i in self.call("GET", "/api/v1/swarm")["instances"]}
        instance = instances[self.instance]
        assert instance["state"] == "ready", f"{instance['state']}: {instance['reason']}"

    def call(self, method, path, body=None):
        """A request with JSON in and out."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def active(self):
        """Requests in slots, over all instances."""
        return sum(i["active"] or 0 for i in self.call("GET", "/api/v1/swarm")["instances"])


def wait_for(what, look, promise_s=READY_PROMISE_S):
    """Waits until `look` raises no more; prints what it took."""
    start = time.monotonic()
    while True:
        try:
            result = look()
            print(f"{what}: {time.monotonic() - start:.2f} s (promised {promise_s} s)")
            return result
        except (AssertionError, OSError, KeyError, ValueError, urllib.error.URLError) as error:
            if time.monotonic() - start > GRACE * promise_s:
                raise AssertionError(f"{what}: not after {GRACE * promise_s} s") from error
        time.sleep(0.05)
