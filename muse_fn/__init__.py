"""The model as equations: (params, state, tokens) in, (state, logits or tokens) out."""
