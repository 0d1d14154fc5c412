"""A small byte-level BPE tokenizer folder for tests, with the control tokens of the published one at its end."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CONTROLS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom|>",
    "<|eot|>",
    "<|finetune_right_pad|>",
    "<|start|>",
    "<|message|>",
    "<|audio|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|vid_start|>",
    "<|vid_end|>",
    "<|vid_frame_separator|>",
    "<|image|>",
    "<|video|>",
    "<|patch|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
)
CORPUS = (
    "The quick brown fox asks for the weather in Paris, and the assistant answers: 3 + 4 = 7.",
    '<|eot|> <|start|>assistant to=user<|message|> <|eom|> <atem:invoke name="lookup"> </atem:invoke>',
    'Was ist 97? Eine Primzahl. \u4e2d\u6587 \u0639\u0631\u0628\u064a {"name": [1, 2.5, null]}\n\n\ttabs',
)


def build(folder: Path, vocabulary: int = 420, template: str | None = None, more: tuple[str, ...] = ()) -> Path:
    """Write a tokenizer folder: tokenizer.json and the small files around it; `more` are further control tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*CORPUS] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROLS + more])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    stops = [tokenizer.token_to_id(name) for name in ("<|end_of_text|>", "<|eot|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
