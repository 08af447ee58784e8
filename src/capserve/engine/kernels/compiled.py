"""How are the CPU loops of a decode step compiled?"""

from numba import njit


def compiled(**options):
    """A decorator: compile at the first call, and keep the machine code beside the source or in the
    user's cache folder, where one of them can be written."""

    def decorate(loop):
        try:
            return njit(cache=True, nogil=True, **options)(loop)
        except RuntimeError:  # no place to keep it: a read-only installation without a home
            return njit(nogil=True, **options)(loop)

    return decorate
