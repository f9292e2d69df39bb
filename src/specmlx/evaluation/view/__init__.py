"""A generation's trace as one self-contained page."""
