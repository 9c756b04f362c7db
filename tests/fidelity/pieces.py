"""Writes model/tests/data/pieces.gguf and pieces.jsonl: a small SentencePiece vocabulary and tokens by it.

    python tests/fidelity/pieces.py

SentencePiece itself learns 800 pieces from prose.txt, in the form of Llama 2: a space before each text, bytes for what is no
piece. It is the first witness; llama.cpp, which reads the file, the second, and the only one for texts with special
tokens in them. The two must agree.
"""

import io
import json
import pathlib

import gguf
import llama_cpp
import sentencepiece

from strings import STRINGS

HERE = pathlib.Path(__file__).parent
DATA = HERE.parents[1] / "model/tests/data"
SPECIAL = ["<s>", "</s>", "<s> a</s>b", "a<s>the</s> the", "<s><s>", " <s> ", "<unk>the", "\n<s>\n"]


def learn():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((HERE / "prose.txt").read_text().splitlines()),
        model_writer=model,
        model_type="bpe",
        vocab_size=800,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write(pieces, path):
    ids = range(pieces.vocab_size())
    kind = lambda i: 2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([pieces.id_to_piece(i) for i in ids])
    writer.add_token_scores([pieces.get_score(i) for i in ids])
    writer.add_token_types([kind(i) for i in ids])
    writer.add_bos_token_id(pieces.bos_id())
    writer.add_eos_token_id(pieces.eos_id())
    writer.add_unk_token_id(pieces.unk_id())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def main():
    pieces = learn()
    path = DATA / "pieces.gguf"
    write(pieces, path)
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    lines, differences = [], 0
    for text in STRINGS + SPECIAL:
        theirs = llama.tokenize(text.encode(), add_bos=False, special=False)
        original = pieces.encode(text)
        if theirs != original:
            differences += 1
            print("DIFFERENT", repr(text), original, theirs, sep="\n  ")
        line = {"text": text, "ids": llama.tokenize(text.encode(), add_bos=False, special=True)}
        if line["ids"] != original:
            line["plain"] = original
        lines.append(json.dumps(line))
    assert not differences, differences
    (DATA / "pieces.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} strings, {pieces.vocab_size()} pieces -> {DATA}")


main()
