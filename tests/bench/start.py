#!/usr/bin/env python3
"""How long after its start a program gives the first token, with the file in the page cache; and what memory it takes.

usage: start.py SHOAL SPEED MODEL.gguf [--threads 2] [--rounds 9] [--before SHOAL]

In each round all of them: `shoal up` and `shoal run` from nothing, the engine alone (SPEED is model/examples/speed.rs), and
llama.cpp once Python has imported it, where this Python has llama-cpp-python. --before: an older binary beside them. The
last lines are medians.
"""
import argparse
import importlib.util
import os
import pathlib
import signal
import statistics
import subprocess
import tempfile
import time

import compare

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


def main():
    args = argparse.ArgumentParser()
    args.add_argument("shoal")
    args.add_argument("speed")
    args.add_argument("model")
    args.add_argument("--threads", type=int, default=2)
    args.add_argument("--rounds", type=int, default=9)
    args.add_argument("--before")
    args = args.parse_args()
    product = Product(args.shoal, args.model)
    sides = {"shoal up, shoal run": lambda: product.first_token(args.threads)[0],
             "the engine alone": lambda: engine(args.speed, args.model, args.threads, 32, 1)[0]}
    if args.before:
        before = Product(args.before, args.model)
        sides["the same before"] = lambda: before.first_token(args.threads)[0]
    if importlib.util.find_spec("llama_cpp"):
        sides["llama.cpp"] = lambda: compare.llama(args.model, "start", threads=args.threads, prompt=32)["seconds"]
    rounds = []
    for number in range(args.rounds):
        rounds.append({name: run() for name, run in sides.items()})
        print(f"{number + 1}: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in rounds[-1].items()), flush=True)
    for name in sides:
        print(f"{name}: {statistics.median(each[name] for each in rounds):.3f} s")


if __name__ == "__main__":
    main()
