"""Writes model/tests/data/golden.json: logits of made-up models of all architectures by llama.cpp.

    cargo run --release -p shoal-model --example synthetic -- FOLDER
    python tests/fidelity/golden.py FOLDER

The models follow from a seed, so only their digests and some rows of logits are kept. Weights and KV cache are f32, without
flash attention; positions go beyond the windows of the layers that have one.
"""

import hashlib
import json
import pathlib
import sys

import llama_cpp
import numpy as np

OUT = pathlib.Path(__file__).parents[2] / "model/tests/data/golden.json"
TOKENS = [(i * 37 + 11) % 320 for i in range(40)]
ROWS = [0, 1, 6, 23, 39]


def main(folder):
    made = {}
    for path in sorted(pathlib.Path(folder).glob("*.gguf")):
        f32 = llama_cpp.GGML_TYPE_F32
        llama = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, n_threads=1, n_threads_batch=1, type_k=f32, type_v=f32, flash_attn=False, verbose=False)
        llama.eval(TOKENS)
        logits = np.array(llama.scores[: len(TOKENS)])
        made[path.stem] = {
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "rows": {row: [float(f"{value:.7g}") for value in logits[row]] for row in ROWS},
        }
        print(f"{path.stem}: logits within {abs(logits).max():.3f}")
    by = f"llama-cpp-python {llama_cpp.__version__}"
    OUT.write_text(json.dumps({"by": by, "tokens": TOKENS, "models": made}, separators=(",", ":")) + "\n")


main(sys.argv[1])
