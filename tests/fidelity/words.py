"""Writes model/tests/data/words.jsonl: how each pre-tokenizer cuts the strings of strings.py into words.

    python tests/fidelity/words.py

By `tokenizers`, with the patterns that transformers has for these families. A cut is given as the bytes of each word in
UTF-8; for qwen2 of the text in composed form (NFC), as its tokenizer sees it.
"""

import json
import pathlib
import unicodedata

from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from strings import STRINGS

OUT = pathlib.Path(__file__).parents[2] / "model/tests/data/words.jsonl"


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


# The pattern inside ByteLevel is GPT-2's; it is written out here because ByteLevel also respells the text.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
FAMILIES = {
    "gpt-2": split(GPT2),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split(GPT2)]),
    "llama-bpe": split(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]),
    "qwen2": split(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]),
}

lines = []
for text in STRINGS:
    line = {"text": text}
    for name, family in FAMILIES.items():
        seen = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        line[name] = [len(word.encode()) for word, _ in family.pre_tokenize_str(seen)]
    lines.append(json.dumps(line, separators=(",", ":")))
OUT.write_text("\n".join(lines) + "\n")
print(f"{len(lines)} strings -> {OUT}")
