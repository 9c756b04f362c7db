"""The fidelity reference: what an f32 implementation that is not ours makes of 1,024 tokens of prose.

    python tests/fidelity/reference.py MODEL.gguf

1. The file's weights are dequantised into an F32 file (gguf-py), which llama.cpp runs with an f32 KV cache and without
   flash attention: the reference. Its 64 best log-probabilities at each position, and the mass of the rest, go
   to model/tests/data/fidelity.bin.
2. llama.cpp on the file itself, as it is used every day, is measured against it: the yardstick. Its figures go to
   model/tests/data/fidelity.json.

The prose is Query 28 of Isaac Newton's Opticks, fourth edition, London 1730 (public domain; the text by way of Go's
test data, src/testdata/Isaac.Newton-Opticks.txt, italics' marks and line breaks taken out).

fidelity.bin, little endian: "SHFR", u32 positions, u32 best, u32 token of each position; then for each position
u16 token x best, f32 log-probability x best (falling), f32 mass of all others.

Divergence: KL(reference || measured) over the 64 best and the rest as one outcome, in nats. Lumping can only lower it, and
does so for everyone.
"""

import argparse
import hashlib
import json
import pathlib
import struct
import tempfile

import gguf
import llama_cpp
import numpy as np

import vocabulary

HERE = pathlib.Path(__file__).parent
DATA = HERE.parents[1] / "model/tests/data"
POSITIONS = 1024
BEST = 64
LEAST_NATS = 2.5


def write_f32(source, target):
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, element)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, weights.reshape(tensor.shape[::-1]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def log_probabilities(path, tokens, **options):
    """f64, positions x vocabulary."""
    llama = llama_cpp.Llama(str(path), n_ctx=POSITIONS, n_batch=512, logits_all=True, n_threads=2, n_threads_batch=2, verbose=False, **options)
    llama.eval(tokens)
    logits = np.array(llama.scores[: len(tokens)], dtype=np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def divergence(best, best_log, rest, measured):
    """Of each position, in nats."""
    theirs = np.take_along_axis(measured, best, axis=1)
    their_rest = np.clip(1 - np.exp(theirs).sum(axis=1), 1e-12, None)
    rest = np.clip(rest, 1e-12, None)
    return (np.exp(best_log) * (best_log - theirs)).sum(axis=1) + rest * (np.log(rest) - np.log(their_rest))


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("model")
    model = arguments.parse_args().model
    prose = (HERE / "prose.txt").read_text()
    tokens = vocabulary.tokenizer(vocabulary.metadata(model)).encode(prose).ids[:POSITIONS]
    assert len(tokens) == POSITIONS

    with tempfile.TemporaryDirectory() as folder:
        f32 = pathlib.Path(folder) / "f32.gguf"
        write_f32(model, f32)
        reference = log_probabilities(f32, tokens, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, flash_attn=False)
    assert reference.shape[1] < 1 << 16
    nats = -reference[np.arange(POSITIONS - 1), tokens[1:]]
    print(f"reference: {nats.mean():.3f} nats a token")
    assert nats.mean() >= LEAST_NATS

    best = np.argsort(-reference, axis=1, kind="stable")[:, :BEST]
    # As they are stored, so that the yardstick is measured against the same numbers as we are.
    best_log = np.take_along_axis(reference, best, axis=1).astype(np.float32)
    rest = (1 - np.exp(np.take_along_axis(reference, best, axis=1)).sum(axis=1)).astype(np.float32)
    with open(DATA / "fidelity.bin", "wb") as file:
        file.write(b"SHFR" + struct.pack("<II", POSITIONS, BEST) + np.array(tokens, "<u4").tobytes())
        for position in range(POSITIONS):
            file.write(best[position].astype("<u2").tobytes() + best_log[position].astype("<f4").tobytes())
            file.write(rest[position].astype("<f4").tobytes())

    measured = log_probabilities(model, tokens)
    kl = divergence(best, best_log.astype(np.float64), rest.astype(np.float64), measured)
    agrees = measured.argmax(axis=1) == best[:, 0]
    figures = {
        "prose": "Isaac Newton, Opticks, 4th edition (1730), Query 28; public domain",
        "model_sha256": hashlib.sha256(pathlib.Path(model).read_bytes()).hexdigest(),
        "positions": POSITIONS,
        "best": BEST,
        "reference": {"by": f"llama-cpp-python {llama_cpp.__version__}, weights and KV cache in f32, no flash attention", "nats_per_token": round(float(nats.mean()), 4), "mean_rest_mass": round(float(rest.mean()), 5)},
        "llama_cpp": {
            "by": f"llama-cpp-python {llama_cpp.__version__}, the file itself, default settings",
            "mean_kl": float(kl.mean()),
            "top1": float(agrees.mean()),
            "kl": [float(f"{value:.6g}") for value in kl],
            "agrees": "".join("1" if agree else "0" for agree in agrees),
        },
    }
    (DATA / "fidelity.json").write_text(json.dumps(figures) + "\n")
    print(f"llama.cpp on the file: mean KL {kl.mean():.6f}, median {np.median(kl):.6f}, top-1 {agrees.mean():.4f}, rest mass {rest.mean():.4f}")


if __name__ == "__main__":
    main()
