"""The bridge: a small trained module in place of the middle, so that the device can draft by itself."""
