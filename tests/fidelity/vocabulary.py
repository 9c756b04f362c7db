"""The tokenizer of a GGUF file as the `tokenizers` package would have it: the second witness beside llama.cpp.

The file names its pre-tokenizer only by a word. Here the words of the models that are compared are spelled out as in their
own tokenizer.json; `smollm`: Digits(individual_digits), then ByteLevel without a prefix space. (transformers' reader of GGUF
files leaves the digits out.) No unknown token: the few bytes that the vocabulary lacks give nothing, as in the original.

A SentencePiece vocabulary becomes BPE with all pairs of pieces that make a piece as merges, in the order of the scores of
what they make, as transformers converts them.
"""

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def metadata(path):
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def byte_level(meta):
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}, merges=merges))
    match meta["tokenizer.ggml.pre"]:
        case "smollm":
            words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        case "qwen2":
            made.normalizer = normalizers.NFC()
            split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]), behavior="isolated")
            words = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        case other:
            raise ValueError(other)
    made.pre_tokenizer = pre_tokenizers.Sequence(words)
    made.decoder = decoders.ByteLevel()
    return made


def sentence_piece(meta):
    assert meta["tokenizer.ggml.pre"] == "default" and not meta["tokenizer.ggml.add_space_prefix"]
    tokens, types, scores = (meta[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    vocab = {token: i for i, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, types) if kind == NORMAL}
    merges = []
    for token in sorted(pieces, key=lambda token: -scores[vocab[token]]):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += sorted((pair for pair in pairs if pieces.issuperset(pair)), key=lambda pair: [vocab[part] for part in pair])
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


def tokenizer(meta, specials=True):
    made = {"gpt2": byte_level, "llama": sentence_piece}[meta["tokenizer.ggml.model"]](meta)
    of_kind = lambda kinds: [token for token, kind in zip(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]) if kind in kinds]
    made.add_tokens([AddedToken(token, normalized=False) for token in of_kind([USER_DEFINED])])
    if specials:
        made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in of_kind([UNKNOWN, CONTROL])])
    return made
