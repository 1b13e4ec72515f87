"""Data and measures for training small looped models: text, exact-match tasks, tokenizer, batches, scores per depth."""
