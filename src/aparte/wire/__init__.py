"""The wire protocol: frames (sans-IO), tensor bytes, and the links that carry them."""
