"""The demo: a small KDA language model decodes real text speculatively, one recorded step replayed.

`model` and `sequence` are the model and its training form, `draft` proposes and accepts tokens, `step` is the work of
one decode step, `serve` the host's side of the loop, `verdicts` and `run` compare several ways to decode, `show`
prints the report.
"""
