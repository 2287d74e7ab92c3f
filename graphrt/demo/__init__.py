"""The demo: a small KDA language model decodes real text speculatively, one recorded step replayed.

`model` and `sequence` are the model and its training form, `draft` proposes and accepts tokens, `step` is the model's
part of a decode step, which `graphrt.capture.DecodeStep` stages, commits and records, `serve` the host's side of the
loop, `verdicts` and `run` compare several ways to decode, `show` prints the report.
"""
