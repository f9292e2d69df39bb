"""Operators of our own, a folder each: a readable reference beside every kernel."""
