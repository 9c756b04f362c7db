#!/usr/bin/env python3
"""Shoal beside llama.cpp on one machine: alternating runs, median of the pairs' ratios.

usage: compare.py SHOAL MODEL.gguf decode|prefill|batch [--threads N] [--prompt N] [--tokens N] [--sequences N]
                  [--nodes N] [--pairs 5]

SHOAL is the binary; MODEL.gguf the file both read. Needs llama-cpp-python in this Python.
Prints a line a pair and a last line for tests/bench/LEDGER.md. table.py runs every row of the table.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys

PEER = pathlib.Path(__file__).with_name("peer_llama.py")


def last_json(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command[0]} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def options(shape):
    return [word for name, value in shape.items() for word in (f"--{name}", value)]


def shoal(binary, model, bench, **shape):
    """One run of `shoal bench` after one that does not count."""
    return last_json([binary, "bench", bench, "--model", model, *options(shape), "--runs", 1, "--json"])


def llama(model, bench, **shape):
    return last_json([sys.executable, PEER, model, bench, *options(shape)])


def median_ratio(pairs):
    return statistics.median(a / b for a, b in pairs)


def medians(pairs):
    return [statistics.median(side) for side in zip(*pairs)]


def main():
    args = argparse.ArgumentParser()
    args.add_argument("shoal")
    args.add_argument("model")
    args.add_argument("bench", choices=["decode", "prefill", "batch"])
    args.add_argument("--threads", type=int, default=2)
    args.add_argument("--prompt", type=int, default=32)
    args.add_argument("--tokens", type=int, default=128)
    args.add_argument("--sequences", type=int, default=4)
    args.add_argument("--nodes", type=int, default=1)
    args.add_argument("--pairs", type=int, default=5)
    args = args.parse_args()
    shape = {"threads": args.threads, "prompt": args.prompt, "tokens": args.tokens}
    if args.bench == "batch":
        shape["sequences"] = args.sequences
    pairs = []
    for number in range(args.pairs):
        ours = shoal(args.shoal, args.model, args.bench, **shape, nodes=args.nodes)["tokens_per_s"]
        theirs = llama(args.model, args.bench, **shape)["tokens_per_s"]
        pairs.append((ours, theirs))
        print(f"pair {number + 1}: shoal {ours:.1f} tok/s, llama.cpp {theirs:.1f} tok/s", flush=True)
    ours, theirs = medians(pairs)
    print(f"| {args.bench}, {args.nodes} node(s), {', '.join(f'{name} {value}' for name, value in shape.items())} "
          f"| {ours:.1f} | {theirs:.1f} | {median_ratio(pairs):.2f} |")


if __name__ == "__main__":
    main()
