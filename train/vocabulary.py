"""The tokenizer of the embedded checkpoint: byte-level BPE in which the same word is the same tokens everywhere.

    python -m train.vocabulary

A space is a token of its own and never part of a word, and each digit is a token, so copying is copying of tokens.
"""

import json
from collections.abc import Iterator
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from train.data import FOLDER, codec, conversation, messages
from train.turns import Json

VOCABULARY = 1024
NAMED = (
    *(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eom|>",
        "<|eot|>",
        "<|finetune_right_pad|>",
        "<|start|>",
        "<|message|>",
    ),
    *("<|image_start|>", "<|image_end|>", "<|vid_start|>", "<|vid_end|>", "<|vid_frame_separator|>"),
    *("<|image|>", "<|video|>", "<|patch|>", "<|audio|>", "<|soft_audio_start|>", "<|soft_audio_end|>"),
)
SPECIAL = (*NAMED, *(f"<|reserved_special_token_{n}|>" for n in range(24 - len(NAMED))))
BOS, EOS, EOT, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|eot|>", "<|finetune_right_pad|>"
PIECES = r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+\n?|\s"


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Byte-level BPE over these texts, special tokens last; any text survives a round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


def corpus(template: str, seed: int, count: int) -> Iterator[str]:
    """Rendered conversations without their control tokens."""
    code = codec(template, Tokenizer(models.BPE()))
    rng = Random(f"vocabulary/{seed}")
    for _ in range(count):
        talked = conversation(rng)
        text = code.text(talked, messages(talked))
        for name in SPECIAL:
            text = text.replace(name, "\n")
        yield text


def side_files(tokenizer: Tokenizer) -> dict[str, Json]:
    """The JSON files that go with tokenizer.json."""
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "added_tokens_decoder": {
            str(i): {"content": name, "special": True, "normalized": False} for name, i in ids.items()
        },
    }
    generation: Json = {
        "bos_token_id": ids[BOS],
        "eos_token_id": [ids[EOS], ids[EOT]],
        "pad_token_id": ids[PAD],
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 1.0,
    }
    return {
        "tokenizer_config.json": config,
        "special_tokens_map.json": {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD},
        "generation_config.json": generation,
    }


def main() -> None:
    """Trains the tokenizer and writes its files beside the chat template."""
    template = (FOLDER / "chat_template.jinja").read_text()
    tokenizer = train_tokenizer(corpus(template, 0, 20_000))
    tokenizer.save(str(FOLDER / "tokenizer.json"))
    for name, content in side_files(tokenizer).items():
        (FOLDER / name).write_text(json.dumps(content, indent=2) + "\n")
    print(f"{tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
