"""Text on the client's side: tokenizer, chat template, incremental detokenizer."""
