"""Tensors in, tensors out: the meaning of each operation, and one file per device form."""
