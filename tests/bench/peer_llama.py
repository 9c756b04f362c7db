#!/usr/bin/env python3
"""Times llama.cpp (llama-cpp-python's low-level calls) at one piece of work; prints one JSON line.

usage: peer_llama.py MODEL.gguf decode|prefill|batch|start [--threads N] [--prompt N] [--tokens N] [--sequences N]

batch decodes one token of each sequence in each call. start loads the file and chooses the first token after a prompt:
its seconds begin when Python has started and the library is imported, for neither is llama.cpp's.
"""
import argparse
import ctypes
import json
import time

import llama_cpp as ll
import numpy

BATCH = 512


def memory_bytes(field):
    """A line of proc_pid_status(5): VmHWM is the most that was resident, VmRSS what is."""
    with open("/proc/self/status") as status:
        line, = [line for line in status if line.startswith(field)]
    return int(line.split()[1]) * 1024


class Llama:
    def __init__(self, args, sequences):
        @ll.llama_log_callback
        def quiet(_level, _text, _user):
            pass

        self.quiet = quiet  # llama.cpp keeps only the pointer
        ll.llama_log_set(quiet, ctypes.c_void_p(0))
        ll.llama_backend_init()
        self.model = ll.llama_load_model_from_file(args.model.encode(), ll.llama_model_default_params())
        params = ll.llama_context_default_params()
        params.n_seq_max = sequences
        params.n_ctx = sequences * (args.prompt + args.tokens + 8)
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = args.threads
        self.context = ll.llama_new_context_with_model(self.model, params)
        self.size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(BATCH, 0, 1)

    def run(self, rows):
        """rows: (token, position, sequence) of each; logits of the last of each sequence."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = i + 1 == len(rows) or rows[i + 1][2] != sequence
        if ll.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama_decode failed")

    def prefill(self, prompt, sequence=0):
        for start in range(0, len(prompt), BATCH):
            chunk = enumerate(prompt[start:start + BATCH], start)
            self.run([(token, position, sequence) for position, token in chunk])

    def clear(self):
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)

    def wait(self):
        ll.llama_synchronize(self.context)


def main():
    args = argparse.ArgumentParser()
    args.add_argument("model")
    args.add_argument("bench", choices=["decode", "prefill", "batch", "start"])
    args.add_argument("--threads", type=int, default=2)
    args.add_argument("--prompt", type=int, default=32)
    args.add_argument("--tokens", type=int, default=128)
    args.add_argument("--sequences", type=int, default=4)
    args = args.parse_args()
    sequences = args.sequences if args.bench == "batch" else 1
    imported_bytes = memory_bytes("VmRSS")

    start = time.perf_counter()
    llama = Llama(args, sequences)
    # Ordinary text tokens, the same in every run.
    prompt = [(i * 37) % min(llama.size, 40000) + 100 for i in range(args.prompt)]
    llama.prefill(prompt)
    if args.bench == "start":
        logits = ll.llama_get_logits_ith(llama.context, -1)
        numpy.ctypeslib.as_array(logits, (llama.size,)).argmax()
        seconds, count = time.perf_counter() - start, 1
    else:
        # That was to warm up: weights are in memory, buffers allocated.
        llama.clear()
        if args.bench == "prefill":
            start = time.perf_counter()
            llama.prefill(prompt)
            llama.wait()
            seconds, count = time.perf_counter() - start, args.prompt
        else:
            for sequence in range(sequences):
                llama.prefill(prompt, sequence)
            tokens = [(sequence * 37) % 40000 + 100 for sequence in range(sequences)]
            llama.wait()
            start = time.perf_counter()
            for step in range(args.tokens):
                llama.run([(token, args.prompt + step, sequence) for sequence, token in enumerate(tokens)])
                tokens = [(token * 31 + 7) % 40000 + 100 for token in tokens]
            llama.wait()
            seconds, count = time.perf_counter() - start, args.tokens * sequences
    print(json.dumps({"peer": "llama.cpp", "bench": args.bench, "threads": args.threads, "prompt": args.prompt,
                      "tokens": args.tokens, "sequences": sequences, "seconds": seconds,
                      "tokens_per_s": count / seconds, "peak_rss_bytes": memory_bytes("VmHWM"),
                      "imported_rss_bytes": imported_bytes}))


if __name__ == "__main__":
    main()
