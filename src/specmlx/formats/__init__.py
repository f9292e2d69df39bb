"""How weights are stored."""
