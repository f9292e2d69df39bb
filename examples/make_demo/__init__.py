"""How the demo pair is made: its questions, its tokenizer and its training. None of this is installed."""
