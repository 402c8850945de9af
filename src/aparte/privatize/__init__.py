"""Private ends: a secret front and back around the public middle, trained on this machine."""
