"""Writes model/tests/data/tokens.jsonl: tokens of the strings of strings.py by `tokenizers` and by llama.cpp.

    python tests/fidelity/tokens.py MODEL.gguf

Each line: the text, its tokens with special tokens read (`ids`), and with their spellings taken as text (`plain`, where
that differs). The two witnesses must agree; where they do not, the string is named and nothing is written.
"""

import json
import pathlib
import sys

import llama_cpp

import vocabulary
from strings import STRINGS

OUT = pathlib.Path(__file__).parents[2] / "model/tests/data/tokens.jsonl"


def main(path):
    meta = vocabulary.metadata(path)
    with_specials, without = vocabulary.tokenizer(meta), vocabulary.tokenizer(meta, specials=False)
    llama = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    lines, failures = [], []
    for text in STRINGS:
        witnesses = [
            (with_specials.encode(text).ids, llama.tokenize(text.encode(), add_bos=False, special=True), "specials read"),
            (without.encode(text).ids, llama.tokenize(text.encode(), add_bos=False, special=False), "specials as text"),
        ]
        for ours, theirs, how in witnesses:
            if ours != theirs:
                failures.append((text, how, with_specials.decode(ours, False), ours, theirs))
        line = {"text": text, "ids": witnesses[0][0]}
        if witnesses[1][0] != line["ids"]:
            line["plain"] = witnesses[1][0]
        lines.append(json.dumps(line, ensure_ascii=True))
    for failure in failures:
        print("DIFFERENT", *map(repr, failure), sep="\n  ")
    if failures:
        sys.exit(f"{len(failures)} differences")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} strings, {sum(len(json.loads(l)['ids']) for l in lines)} tokens -> {OUT}")


main(sys.argv[1])
