"""The small trained LLaDA that ships with the package: its tokenizer, its training, its export."""
