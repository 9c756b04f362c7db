"""Emulated machines for agents: each node a guest of its own, each cable between two of them a network of its own with a
Soft-RoCE device at both ends. Everything here is the host's side; tests/rdma/obey.sh is a guest's.
"""

import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time

HERE = pathlib.Path(__file__).parent


def within(what, seconds, look):
    """Waits until `look` raises no AssertionError (or OSError); prints what it took. `seconds` is no promise: it ends a run
    that hangs."""
    start = time.monotonic()
    while True:
        try:
            result = look()
            print(f"{what}: {time.monotonic() - start:.1f} s", flush=True)
            return result
        except (AssertionError, OSError) as error:
            if time.monotonic() - start > seconds:
                raise AssertionError(f"{what}: not after {seconds} s: {error}") from error
        time.sleep(0.2)


class Guests:
    """Guests joined by cables, for a `with`. `topology` is that of `testbed run`. What they print and what they share with
    the host stays under `folder`: in a guest it is /share."""

    def __init__(self, nodes, topology, folder, files=(), memory_mib=384, kept_s=1200):
        self.count = nodes
        self.share = pathlib.Path(folder).absolute()
        self.said = 0
        self.lines = []
        self.arguments = [
            HERE / "testbed", "run", "--nodes", str(nodes), "--topology", topology, "--mem", str(memory_mib),
            "--timeout", str(kept_s), "--out", self.share / "guests", "--share", self.share, "--quiet",
            *(argument for file in files for argument in ("--file", file)),
        ]

    def __enter__(self):
        shutil.rmtree(self.share, ignore_errors=True)
        self.share.mkdir(parents=True)
        self.sockets = tempfile.TemporaryDirectory(prefix="guests-")
        arguments = [*self.arguments, "--control", self.sockets.name, "--", HERE / "obey.sh"]
        with open(self.share / "testbed.log", "w") as log:
            self.testbed = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            for node in range(self.count):
                self.lines.append(within(f"guest {node} begins", 30, lambda node=node: self._connect(node)))
            for node in range(self.count):
                assert self._hear(node, 120) == "0 0"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for line, _ in self.lines:
            line.close()
        # The test bed ends its guests when it is told to end.
        self.testbed.terminate()
        self.testbed.wait()
        self.sockets.cleanup()

    def _connect(self, node):
        if self.testbed.poll() is not None:
            raise RuntimeError(f"the test bed has ended; see {self.share}/testbed.log")
        line = socket.socket(socket.AF_UNIX)
        line.connect(f"{self.sockets.name}/node{node}")
        return line, line.makefile("r")

    def _hear(self, node, seconds):
        line, reader = self.lines[node]
        line.settimeout(seconds)
        return reader.readline().strip()

    def do(self, node, command, seconds=120):
        """Runs a command in a guest and waits for its end; its output. Fails if the command does."""
        self.said += 1
        number = self.said
        self.lines[node][0].sendall(f"{number} {command}\n".encode())
        status = self._hear(node, seconds)
        output = (self.share / f"{node}.{number}").read_text(errors="replace")
        assert status == f"{number} 0", f"guest {node}: {command}: {status}: {output[-2000:]}"
        return output
