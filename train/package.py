"""Puts trained parameters into the package: the published Quark MXFP4 layout beside the tokenizer and template.

python -m train.package train/out/trained.safetensors
"""

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import muse_fn
from muse_fn.params.config import Config
from train.data import FOLDER
from train.model import NANO, stored
from train.vocabulary import BOS, EOS, PAD


def nano_config(tokenizer: Tokenizer) -> Config:
    """The trained size with the ids of its tokenizer."""
    bos, eos, pad = (tokenizer.token_to_id(name) for name in (BOS, EOS, PAD))
    return replace(NANO, bos_token_id=bos, eos_token_id=(eos,), pad_token_id=pad)


def main() -> None:
    """Writes the checkpoint over the one in the package; tokenizer, template and card stay."""
    values = load_file(Path(sys.argv[1]))
    config = nano_config(Tokenizer.from_file(str(FOLDER / "tokenizer.json")))
    with TemporaryDirectory() as made:  # a folder without a checkpoint is not written to: ours may have none yet
        muse_fn.save(Path(made, "nano"), stored(values, config, torch.float32, packed=False), config, "quark-mxfp4")
        for file in Path(made, "nano").iterdir():
            shutil.copy(file, FOLDER / file.name)
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    print(f"{FOLDER}: {size} bytes")


if __name__ == "__main__":
    main()
