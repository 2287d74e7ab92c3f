"""The demo: a small KDA language model decodes speculatively."""
