"""What a command said, as its tests read it."""


def words(result):
    """The output without the frame that a terminal gets, on one line."""
    return " ".join(result.output.replace("│", " ").split())
