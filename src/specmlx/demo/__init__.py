"""The demo pair that ships inside the package: its text, its tokenizer and its weights."""
