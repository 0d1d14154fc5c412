"""A whole tree and a mesh in, this rank's tree out; partial sums in, whole tensors out."""
