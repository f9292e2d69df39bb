"""Several processes that generate one text."""
