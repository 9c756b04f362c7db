"""The tokenizer of a GGUF file as the `tokenizers` package would have it: the second witness beside llama.cpp.

The file names its pre-tokenizer only by a word. Here `smollm` is spelled out as in SmolLM2's own tokenizer.json:
Digits(individual_digits), then ByteLevel without a prefix space. (transformers' reader of GGUF files leaves the
digits out.) No unknown token: the few bytes that the vocabulary lacks give nothing, as in the original.
"""

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3


def metadata(path):
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def tokenizer(meta, specials=True):
    assert meta["tokenizer.ggml.model"] == "gpt2" and meta["tokenizer.ggml.pre"] == "smollm"
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    made.decoder = decoders.ByteLevel()
    if specials:
        types = meta["tokenizer.ggml.token_type"]
        control = [token for token, kind in zip(tokens, types) if kind == CONTROL]
        made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return made
