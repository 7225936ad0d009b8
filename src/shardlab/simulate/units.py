"""Bytes for a reader."""

KIB, MIB, GIB = 2**10, 2**20, 2**30


def bytes_text(bytes: float, digits: int = 2) -> str:
    """In the largest unit of which there is one.

    >>> bytes_text(3 * 2**29), bytes_text(5_000_000), bytes_text(80 * 2**30, digits=0)
    ('1.50 GiB', '4.77 MiB', '80 GiB')
    """
    unit, size = next(((name, size) for name, size in _UNITS if bytes >= size), _UNITS[-1])
    return f"{bytes / size:,.{digits}f} {unit}"


_UNITS = (("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
