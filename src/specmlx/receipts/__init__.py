"""What may be claimed of a generation, and how it is measured."""
