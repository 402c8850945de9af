"""The WAN emulator and the commands that measure."""
