"""Drafters: small models that guess the tokens after the anchor; the target checks every one of them."""
