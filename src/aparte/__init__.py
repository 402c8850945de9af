"""aparte: a language model on two machines that do not trust each other equally.

Importing this package is cheap: torch and transformers are only imported by the modules that compute.
"""

__version__ = "0.1.0"
