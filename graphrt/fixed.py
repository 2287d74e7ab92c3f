"""Objects that cannot be copied: others hold them by address, and a copy would go on with the original's memory."""

from typing import NoReturn, SupportsIndex


class Fixed:
    """Refuses copy, deepcopy and pickle, which all come through one method.

    A context has tables of its layers' addresses, a recording has the addresses themselves: a copy of either, or of
    the static tensors they read, would mix its own tensors with those of the original.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """TypeError, whoever asks."""
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: recordings and tables of addresses would go on with "
            "the tensors of this one; make another, and move what it holds by save_state and load_state"
        )
