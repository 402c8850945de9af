"""What the cloud can learn from what it receives, measured: attacks, defences, and their report."""
