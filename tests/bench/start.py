"""How long after its start a program gives the first token, with the file in the page cache; and what memory it takes."""
import os
import pathlib
import signal
import subprocess
import tempfile
import time

WITHIN_S = 60
LOOK_EVERY_S = 0.002
NAME = "measured"


def finish(child):
    """Waits for a child; the most memory that it held, in bytes."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * 1024


def engine(speed, model, threads, prompt, tokens):
    """The engine alone (model/examples/speed.rs), from its start to its end: seconds, and the most bytes it held."""
    start = time.perf_counter()
    child = subprocess.Popen([speed, model, str(threads), str(prompt), str(tokens)], stdout=subprocess.DEVNULL)
    peak = finish(child)
    if child.returncode != 0:
        raise SystemExit(f"{speed} failed ({child.returncode})")
    return time.perf_counter() - start, peak


class Product:
    """The way of a person who has one machine: `shoal up`, then `shoal run` in a second terminal."""

    def __init__(self, binary, model):
        self.binary = binary
        self.folder = tempfile.TemporaryDirectory(prefix="shoal-start-")
        self.models = pathlib.Path(self.folder.name, "models")
        add = [binary, "models", "add", model, "--name", NAME, "--model-dir", str(self.models)]
        subprocess.run(add, check=True, capture_output=True)

    def first_token(self, threads):
        """Seconds from the start of the agent's process to the first text, and the most memory the agent held."""
        with tempfile.TemporaryDirectory(prefix="shoal-start-") as data:
            environment = {**os.environ, "XDG_RUNTIME_DIR": data, "SHOAL_DATA_DIR": data,
                           "SHOAL_MODEL_DIR": str(self.models)}
            loopback = ["--no-mdns", "--http", "127.0.0.1:0", "--listen", "/ip4/127.0.0.1/tcp/0",
                        "--data-listen", "127.0.0.1:0"]
            start = time.perf_counter()
            agent = subprocess.Popen([self.binary, "up", *loopback, "--threads", str(threads)], env=environment,
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                while not pathlib.Path(data, "agent.json").exists():
                    if agent.poll() is not None or time.perf_counter() - start > WITHIN_S:
                        raise SystemExit("shoal up does not come up")
                    time.sleep(LOOK_EVERY_S)
                run = [self.binary, "run", NAME, "The capital of France is", "--max-tokens", "8", "--temperature", "0"]
                client = subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                first = client.stdout.read(1)
                seconds = time.perf_counter() - start
                _, errors = client.communicate(timeout=WITHIN_S)
                if client.returncode != 0 or not first:
                    raise SystemExit(f"shoal run failed ({client.returncode}):\n{errors.decode()}")
            finally:
                agent.send_signal(signal.SIGTERM)
                peak = finish(agent)
            return seconds, peak
