#!/usr/bin/env python3
"""Shoal beside llama.cpp on one machine: alternating runs, ratio of medians.

usage: compare.py SHOAL MODEL.gguf decode|prefill [--threads N] [--prompt N] [--tokens N] [--nodes N] [--pairs 5]

SHOAL is the binary; MODEL.gguf the file both read. Needs llama-cpp-python in this Python.
Prints a line a pair and a last line for tests/bench/LEDGER.md.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys


def last_json(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    args = argparse.ArgumentParser()
    args.add_argument("shoal")
    args.add_argument("model")
    args.add_argument("bench", choices=["decode", "prefill"])
    args.add_argument("--threads", default="2")
    args.add_argument("--prompt", default="16")
    args.add_argument("--tokens", default="128")
    args.add_argument("--nodes", default="1")
    args.add_argument("--pairs", type=int, default=5)
    args = args.parse_args()
    peer = pathlib.Path(__file__).with_name("peer_llama.py")
    shape = ["--threads", args.threads, "--prompt", args.prompt, "--tokens", args.tokens]
    ours, theirs = [], []
    for pair in range(args.pairs):
        shoal = last_json([args.shoal, "bench", args.bench, "--model", args.model, *shape, "--nodes", args.nodes,
                           "--runs", "1", "--json"])
        llama = last_json([sys.executable, str(peer), args.model, args.bench, *shape])
        ours.append(shoal["tokens_per_s"])
        theirs.append(llama["tokens_per_s"])
        print(f"pair {pair + 1}: shoal {ours[-1]:.1f} tok/s, llama.cpp {theirs[-1]:.1f} tok/s", flush=True)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs))
    print(f"| {args.bench}, {args.nodes} node(s) x {args.threads} thread(s), prompt {args.prompt}, tokens {args.tokens} "
          f"| {statistics.median(ours):.1f} | {statistics.median(theirs):.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
