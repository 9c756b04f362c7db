#!/usr/bin/env python3
"""Times llama.cpp (llama-cpp-python's low-level calls) at one prefill or decode; prints one JSON line.

usage: peer_llama.py MODEL.gguf decode|prefill --threads N --prompt N --tokens N
"""
import argparse
import ctypes
import json
import time

import llama_cpp as ll


def main():
    args = argparse.ArgumentParser()
    args.add_argument("model")
    args.add_argument("bench", choices=["decode", "prefill"])
    args.add_argument("--threads", type=int, default=2)
    args.add_argument("--prompt", type=int, default=16)
    args.add_argument("--tokens", type=int, default=128)
    args = args.parse_args()

    @ll.llama_log_callback
    def quiet(_level, _text, _user):
        pass

    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    ll.llama_backend_init()
    model = ll.llama_load_model_from_file(args.model.encode(), ll.llama_model_default_params())
    params = ll.llama_context_default_params()
    params.n_ctx = args.prompt + args.tokens + 8
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = args.threads
    context = ll.llama_new_context_with_model(model, params)
    vocab = ll.llama_model_get_vocab(model)
    size = ll.llama_vocab_n_tokens(vocab)

    def run(tokens):
        ids = (ll.llama_token * len(tokens))(*tokens)
        if ll.llama_decode(context, ll.llama_batch_get_one(ids, len(tokens))) != 0:
            raise SystemExit("llama_decode failed")

    # Ordinary text tokens, the same in every run.
    prompt = [(i * 37) % min(size, 40000) + 100 for i in range(args.prompt)]
    run(prompt)  # warm-up: weights into memory, buffers allocated
    memory = ll.llama_get_memory(context)
    ll.llama_memory_clear(memory, True)
    if args.bench == "prefill":
        start = time.perf_counter()
        run(prompt)
        ll.llama_synchronize(context)
        seconds, count = time.perf_counter() - start, args.prompt
    else:
        run(prompt)
        logits = ll.llama_get_logits_ith(context, -1)
        token = max(range(0, size, 97), key=lambda i: logits[i])
        start = time.perf_counter()
        for _ in range(args.tokens):
            run([token])
            token = (token * 31 + 7) % 40000 + 100
        ll.llama_synchronize(context)
        seconds, count = time.perf_counter() - start, args.tokens
    print(json.dumps({"peer": "llama.cpp", "bench": args.bench, "threads": args.threads, "prompt": args.prompt,
                      "tokens": args.tokens, "tokens_per_s": count / seconds}))


if __name__ == "__main__":
    main()
