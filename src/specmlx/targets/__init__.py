"""Targets: the models whose distribution is never changed."""
