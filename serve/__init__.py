"""Commands and requests in, token ids to the model, text events out."""
