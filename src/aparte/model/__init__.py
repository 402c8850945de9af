"""Checkpoints in parts, and stages that run decoder layers over a token tree."""
