#!/usr/bin/env python3
"""The whole table of speed beside llama.cpp, as Markdown rows for tests/bench/LEDGER.md.

usage: table.py SHOAL SPEED SMOLLM2.gguf [--gemma3 GEMMA3.gguf] [--qwen QWEN.gguf] [--pairs 5] [--rows REGEX]

SHOAL is target/release/shoal, SPEED target/release/examples/speed (the engine alone). Needs llama-cpp-python in this
Python. In each pair both are run one after the other; a row is the medians of both sides and the median of the pairs'
ratios. The last column is the load average at the row's end: on a machine that does nothing else it is about the threads.
"""
import argparse
import contextlib
import ctypes
import os
import re
import subprocess
import sys

import compare
import start

MB = 1e6
# linux/prctl.h
PR_SET_THP_DISABLE = 41


@contextlib.contextmanager
def spinner():
    """A process of equal priority that takes all it can of the last core."""
    core = max(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def small_pages():
    """Whoever is started meanwhile is refused huge pages."""
    libc = ctypes.CDLL(None, use_errno=True)

    def refuse(whether):
        if libc.prctl(PR_SET_THP_DISABLE, whether, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_THP_DISABLE)")
    refuse(1)
    try:
        yield
    finally:
        refuse(0)


class Table:
    def __init__(self, args):
        self.args = args
        print("| work | Shoal | llama.cpp | ratio | wanted | load |\n|---|---|---|---|---|---|", flush=True)

    def rounds(self, work, once):
        """What `once` gives, again and again; nothing where these rows are not asked for."""
        return [once() for _ in range(self.args.pairs)] if re.search(self.args.rows, work) else []

    def row(self, work, wanted, pairs, unit="", digits=1):
        """`pairs`: ours and theirs of each round."""
        if pairs:
            ours, theirs = compare.medians(pairs)
            print(f"| {work} | {ours:.{digits}f}{unit} | {theirs:.{digits}f}{unit} | {compare.median_ratio(pairs):.2f} "
                  f"| {wanted} | {os.getloadavg()[0]:.1f} |", flush=True)

    def shoal(self, model, bench, **shape):
        return compare.shoal(self.args.shoal, model, bench, **shape)

    def speed(self, work, wanted, model, bench, **shape):
        def once():
            ours, theirs = self.shoal(model, bench, **shape), compare.llama(model, bench, **shape)
            return ours["tokens_per_s"], theirs["tokens_per_s"]
        self.row(work, wanted, self.rounds(work, once))

    def speeds(self, model):
        for threads in (1, 2):
            of = f"SmolLM2, {threads} thread(s)"
            self.speed(f"decode 128 after a short prompt, {of}", "1.9", model, "decode", threads=threads, prompt=32)
            self.speed(f"decode at 1,024 of context, {of}", "2.8", model, "decode", threads=threads, prompt=1024, tokens=64)
            self.speed(f"prefill 512, {of}", "3.5", model, "prefill", threads=threads, prompt=512, tokens=1)

    def refused(self, model):
        with small_pages():
            for threads in (1, 2):
                self.speed(f"decode 128 after a short prompt, huge pages refused, {threads} thread(s)", "1.5", model, "decode",
                           threads=threads, prompt=32)

    def other(self, name, model):
        for threads in (1, 2):
            of = f"{name}, {threads} thread(s)"
            self.speed(f"decode 128, {of}", "1.2", model, "decode", threads=threads, prompt=32)
            self.speed(f"prefill 512, {of}", "1.5", model, "prefill", threads=threads, prompt=512, tokens=1)

    def batches(self, model):
        for sequences in (4, 8):
            self.speed(f"{sequences} sequences at once, 2 threads, total", "2.5", model, "batch", threads=2,
                       prompt=32, sequences=sequences)

    def disturbed(self, model):
        """In each round all four: one thread alone, then two beside a spinning process; ours and theirs."""
        def tokens_per_s(threads):
            shape = {"threads": threads, "prompt": 32}
            return [run["tokens_per_s"] for run in (self.shoal(model, "decode", **shape),
                                                    compare.llama(model, "decode", **shape))]

        def once():
            alone = tokens_per_s(1)
            with spinner():
                return alone, tokens_per_s(2)

        work = "decode, 2 threads beside a process that spins on one core"
        rounds = self.rounds(work, once)
        self.row(work, "", [beside for _, beside in rounds])
        for side, (name, wanted) in enumerate((("Shoal", "0.8"), ("llama.cpp", ""))):
            pairs = [(beside[side], alone[side]) for alone, beside in rounds]
            self.row(f"the same of {name} (left) against its one thread alone (right)", wanted, pairs)

    def memory(self, model):
        for prompt in (32, 1024):
            shape = {"threads": 2, "prompt": prompt, "tokens": 64}

            def once():
                agent = self.shoal(model, "decode", **shape)["peak_rss_bytes"]
                _, engine = start.engine(self.args.speed, model, *shape.values())
                llama = compare.llama(model, "decode", **shape)
                python = llama["peak_rss_bytes"]
                return [bytes / MB for bytes in (agent, engine, python, python - llama["imported_rss_bytes"])]

            work = f"peak memory, decode at {prompt:,} of context"
            rounds = self.rounds(work, once)
            self.row(f"{work}: the agent, llama.cpp in Python", "at most 1.15", [r[0:3:2] for r in rounds], " MB")
            self.row("the same: the agent, llama.cpp without what Python held before", "", [r[0:4:3] for r in rounds], " MB")
            self.row("the same: the engine alone, llama.cpp without what Python held before", "at most 1.15",
                     [r[1:4:2] for r in rounds], " MB")

    def first_token(self, model):
        product = start.Product(self.args.shoal, model)

        def once():
            agent, _ = product.first_token(threads=2)
            engine, _ = start.engine(self.args.speed, model, 2, 32, 1)
            return agent, engine, compare.llama(model, "start", threads=2, prompt=32)["seconds"]

        work = "start to first token, file in the page cache"
        rounds = self.rounds(work, once)
        self.row(f"{work}: `shoal up` and `shoal run`, llama.cpp once Python has imported it", "at most 1.0",
                 [r[0:3:2] for r in rounds], " s", 2)
        self.row("the same: the engine alone, llama.cpp as before", "at most 1.0", [r[1:3] for r in rounds], " s", 2)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("shoal")
    args.add_argument("speed")
    args.add_argument("smollm2")
    args.add_argument("--gemma3")
    args.add_argument("--qwen")
    args.add_argument("--pairs", type=int, default=5)
    args.add_argument("--rows", default="")
    args = args.parse_args()
    table = Table(args)
    table.speeds(args.smollm2)
    table.refused(args.smollm2)
    table.batches(args.smollm2)
    table.disturbed(args.smollm2)
    table.memory(args.smollm2)
    table.first_token(args.smollm2)
    for name, model in (("Gemma 3 270M", args.gemma3), ("Qwen2.5 0.5B", args.qwen)):
        if model:
            table.other(name, model)


if __name__ == "__main__":
    main()
