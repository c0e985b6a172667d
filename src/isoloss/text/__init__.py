"""Text: documents, tokenizers, packing, masking, and the batches that a model takes."""
