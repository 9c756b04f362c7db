"""The yardstick for models of which no reference is kept: how far llama.cpp on the file itself is from f32.

    python tests/fidelity/yardstick.py NAME MODEL.gguf

Writes model/tests/data/yardstick-NAME.json. The reference is made as in reference.py: the weights dequantised, run by
llama.cpp in f32. Of it only the log-probability of each next token is kept. The test computes the reference again, by
`model/src/reference.rs`, compares it with these numbers, and measures against it what llama.cpp was measured against here.

Divergence: KL(reference || measured) over the whole vocabulary, in nats.
"""

import hashlib
import json
import pathlib
import sys
import tempfile

import llama_cpp
import numpy as np

import vocabulary
from reference import DATA, HERE, LEAST_NATS, POSITIONS, log_probabilities, write_f32


def main(name, model):
    meta = vocabulary.metadata(model)
    tokens = vocabulary.tokenizer(meta).encode((HERE / "prose.txt").read_text(), add_special_tokens=False).ids
    if meta["tokenizer.ggml.add_bos_token"]:
        tokens.insert(0, meta["tokenizer.ggml.bos_token_id"])
    tokens = tokens[:POSITIONS]
    assert len(tokens) == POSITIONS

    with tempfile.TemporaryDirectory() as folder:
        f32 = pathlib.Path(folder) / "f32.gguf"
        write_f32(model, f32)
        reference = log_probabilities(f32, tokens, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, flash_attn=False)
    following = reference[np.arange(POSITIONS - 1), tokens[1:]]
    print(f"reference: {-following.mean():.3f} nats a token")
    assert -following.mean() >= LEAST_NATS

    measured = log_probabilities(model, tokens)
    kl = np.array([(np.exp(ours) * (ours - theirs)).sum() for ours, theirs in zip(reference, measured)])
    agrees = measured.argmax(axis=1) == reference.argmax(axis=1)
    figures = {
        "model_sha256": hashlib.sha256(pathlib.Path(model).read_bytes()).hexdigest(),
        "tokens": tokens,
        "reference": {
            "by": f"llama-cpp-python {llama_cpp.__version__}, weights and KV cache in f32, no flash attention",
            "next": [float(f"{value:.6g}") for value in following],
            "first": [int(token) for token in reference.argmax(axis=1)],
        },
        "llama_cpp": {
            "by": f"llama-cpp-python {llama_cpp.__version__}, the file itself, default settings",
            "mean_kl": float(kl.mean()),
            "top1": float(agrees.mean()),
            "kl": [float(f"{value:.6g}") for value in kl],
            "agrees": "".join("1" if agree else "0" for agree in agrees),
        },
    }
    out = DATA / f"yardstick-{name}.json"
    out.write_text(json.dumps(figures, separators=(",", ":")) + "\n")
    print(f"llama.cpp on the file: mean KL {kl.mean():.6f}, median {np.median(kl):.6f}, top-1 {agrees.mean():.4f} -> {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
