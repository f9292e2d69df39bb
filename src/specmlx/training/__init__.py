"""Training of tiny targets and of drafters for any target with taps."""
