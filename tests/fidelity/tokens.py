"""Writes model/tests/data/tokens-NAME.jsonl: tokens of the strings of strings.py by `tokenizers` and by llama.cpp.

    python tests/fidelity/tokens.py NAME MODEL.gguf

Each line: the text, its tokens with special tokens read (`ids`), and with their spellings taken as text (`plain`, where
that differs). The two witnesses must agree; where they do not, the string is named and nothing is written.
"""

import json
import pathlib
import sys
import unicodedata

import llama_cpp

import vocabulary
from strings import STRINGS

DATA = pathlib.Path(__file__).parents[2] / "model/tests/data"


def main(name, path):
    out = DATA / f"tokens-{name}.jsonl"
    meta = vocabulary.metadata(path)
    with_specials, without = vocabulary.tokenizer(meta), vocabulary.tokenizer(meta, specials=False)
    llama = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    lines, failures = [], []
    for text in STRINGS:
        composed = (unicodedata.normalize("NFC", text) if meta["tokenizer.ggml.pre"] == "qwen2" else text).encode()
        witnesses = [
            (with_specials.encode(text).ids, llama.tokenize(composed, add_bos=False, special=True), "specials read"),
            (without.encode(text).ids, llama.tokenize(composed, add_bos=False, special=False), "specials as text"),
        ]
        for ours, theirs, how in witnesses:
            if ours != theirs and ("</s>" not in text or name == "smollm2"):
                failures.append((text, how, with_specials.decode(ours, False), ours, theirs))
        line = {"text": text, "ids": witnesses[0][0]}
        if witnesses[1][0] != line["ids"]:
            line["plain"] = witnesses[1][0]
        lines.append(json.dumps(line, ensure_ascii=True))
    for failure in failures:
        print("DIFFERENT", *map(repr, failure), sep="\n  ")
    if failures:
        sys.exit(f"{len(failures)} differences")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} strings, {sum(len(json.loads(l)['ids']) for l in lines)} tokens -> {out}")


main(*sys.argv[1:])
