"""(Cache, new keys and values) in, (cache, context for attention) out."""
