"""`python -m graphrt` is the `graphrt` command."""

from .cli import app

app(prog_name="graphrt")
