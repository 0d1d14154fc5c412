"""How the embedded checkpoint was made: synthetic data, tokenizer, training, evaluation. Not part of the wheel."""
