"""Recording and replay."""
