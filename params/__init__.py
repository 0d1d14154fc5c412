"""config.json and safetensors headers in; a tree of records, then of tensors, out."""
