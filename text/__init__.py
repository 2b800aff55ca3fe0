"""Text at the edge: tokenizer, chat template, incremental detokenizer."""
