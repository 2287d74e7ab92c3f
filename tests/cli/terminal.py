"""What a command said, as its tests read it."""


def words(result):
    """The output without the frame that a terminal gets, on one line."""
    return " ".join(result.output.replace("│", " ").split())


def refusal(result):
    """The words of a command that refuses its arguments: exit status 2, and no traceback."""
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    return words(result)
