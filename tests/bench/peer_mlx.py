#!/usr/bin/env python3
"""Shoal's all-reduce beside that of MLX's ring, two pinned processes each, in turns.

usage: peer_mlx.py SHOAL [--bytes 2304,10240] [--pairs 5] [--sealed]

Makes a virtual environment in a temporary folder and installs `mlx[cpu]` there, unless this Python has it. MLX's ranks are
started directly (MLX_RANK, MLX_HOSTFILE), each on a core of its own; `mlx.launch` would share them. Prints a line a pair
and a last line for each size, for tests/bench/LEDGER.md.
"""
import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

RANK = """
import json, os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
ours = mx.ones((int(sys.argv[2]) // 4,), dtype=mx.float32)
mx.eval(ours)
def once():
    began = time.perf_counter()
    mx.eval(mx.distributed.all_sum(ours, group=group, stream=mx.cpu))
    return time.perf_counter() - began
[once() for _ in range(200)]
times = sorted(once() for _ in range(2000))
if group.rank() == 0:
    print(json.dumps({"median_us": times[1000] * 1e6, "p99_us": times[1980] * 1e6, "version": mx.__version__}))
"""


def python_with_mlx(folder):
    if subprocess.run([sys.executable, "-c", "import mlx.core"], capture_output=True).returncode == 0:
        return sys.executable
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "mlx[cpu]"], check=True)
    return python


def free_ports(count):
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports


def mlx(python, folder, size, cores):
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    ranks = [
        subprocess.Popen(
            [python, "-c", RANK, str(core), str(size)],
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank, core in enumerate(cores)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads(said[0].strip().splitlines()[-1])


def shoal(binary, size, sealed):
    command = [binary, "bench", "allreduce", "--ranks", "2", "--bytes", str(size), "--runs", "5", "--json"]
    command += ["--sealed"] if sealed else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("shoal")
    args.add_argument("--bytes", default="2304,10240")
    args.add_argument("--pairs", type=int, default=5)
    args.add_argument("--sealed", action="store_true")
    args = args.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("two processes that spin need two cores")
    with tempfile.TemporaryDirectory(prefix="shoal-mlx-") as folder:
        folder = pathlib.Path(folder)
        python = python_with_mlx(folder)
        for size in map(int, args.bytes.split(",")):
            pairs = []
            for _ in range(args.pairs):
                ours, theirs = shoal(args.shoal, size, args.sealed), mlx(python, folder, size, cores)
                pairs.append((ours, theirs))
                print(f"{size} bytes: shoal {ours['median_us']:.2f} us (floor {ours['floor_us']:.2f}, "
                      f"ratio {ours['floor_ratio']:.2f}), mlx {theirs['median_us']:.1f} us", flush=True)
            middle = statistics.median
            print(f"| all-reduce of {size} bytes, 2 ranks | {middle(a['median_us'] for a, _ in pairs):.2f} us "
                  f"| floor {middle(a['floor_us'] for a, _ in pairs):.2f} us "
                  f"| {middle(a['floor_ratio'] for a, _ in pairs):.2f} "
                  f"| MLX {pairs[0][1]['version']} {middle(b['median_us'] for _, b in pairs):.1f} us "
                  f"| {middle(b['median_us'] / a['median_us'] for a, b in pairs):.1f} "
                  f"| load {os.getloadavg()[0]:.1f} |")


if __name__ == "__main__":
    main()
