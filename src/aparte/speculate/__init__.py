"""Drafters, which propose token trees, and acceptance, which decides what is kept."""
