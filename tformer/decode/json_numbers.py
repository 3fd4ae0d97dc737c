"""Numbers of JSON within bounds, as regular expressions."""

import math
from decimal import Decimal
from fractions import Fraction

DIGITS = 15  # of a number: with as many, two that differ are two doubles, in their order (IEEE 754: DBL_DIG)
FRACTION = 6  # digits after the point, fewer beside a large bound, or as many as a bound has

_ANY = r'-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?'


def _digits(low: str, high: str) -> str:
    """Returns what matches the numbers from low to high, of equally many digits."""
    if not low or low == high:
        return low
    if low[0] == high[0]:
        return low[0] + _digits(low[1:], high[1:])
    rest, first, last, parts = len(low) - 1, int(low[0]), int(high[0]), []
    if low[1:] != '0' * rest:
        parts.append(low[0] + _digits(low[1:], '9' * rest))
        first += 1
    if high[1:] != '9' * rest:
        parts.append(high[0] + _digits('0' * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f'[{first}-{last}]' + (f'[0-9]{{{rest}}}' if rest else ''))
    return f'({"|".join(parts)})'


def natural(low: int, high: int | None, most_digits: int | None = None) -> list[str]:
    """Returns patterns of the numbers from low, at least 0, to high; None: all that have at most so many digits."""
    if high is not None and high < low:
        return []
    sizes = range(len(str(low)), len(str(low if high is None else high)) + 1)
    parts = []
    for size in sizes:
        least, most = max(low, 10 ** (size - 1)) if size > 1 else low, 10**size - 1
        parts.append(_digits(str(least), str(most if high is None else min(most, high))))
    if high is None and (most_digits is None or sizes[-1] < most_digits):
        parts.append(f'[1-9][0-9]{{{sizes[-1]},{"" if most_digits is None else most_digits - 1}}}')
    return parts


def integers(low: int | None, high: int | None) -> list[str]:
    """Returns patterns of the integers from low to high, none if there is no such integer; None: without an end."""
    parts = natural(max(low or 0, 0), high)
    if low is None or low < 0:
        below = natural(1 if high is None else max(1, -high), None if low is None else -low)
        parts += [f'-{part}' for part in below]
    return parts


def reals(low: float | None, high: float | None, *, above: bool, below: bool) -> list[str]:
    """Returns patterns of the numbers from low to high, none if there is no such number; None: without an end.

    `above` leaves low itself out, and `below` leaves out high. Numbers within bounds have no exponent and at most
    `DIGITS` digits, so what reads them as doubles sees them within the bounds.

    Raises:
      ValueError: a bound has more digits.
    """
    if low is None and high is None:
        return [_ANY]
    a, b = _exact(low), _exact(high)
    whole = max(len(str(int(abs(bound)))) for bound in (a, b) if bound is not None)
    size = max(min(FRACTION, DIGITS - whole), *(_places(bound) for bound in (a, b)))
    if whole + size > DIGITS:
        raise ValueError(f'bounds may have {DIGITS} digits')
    found = []
    if b is None or b >= 0:
        start = (a, above) if a is not None and a >= 0 else (Fraction(0), False)
        found += _decimals(*start, b, below, size)
    if a is None or a < 0:
        start = (-b, below) if b is not None and b < 0 else (Fraction(0), True)
        found += [f'-{part}' for part in _decimals(*start, None if a is None else -a, above, size)]
    return found


def _exact(bound: float | None) -> Fraction | None:
    """Returns a bound as it is written."""
    return None if bound is None else Fraction(Decimal(repr(bound)))


def _places(bound: Fraction | None) -> int:
    """Returns the digits after the point."""
    return 0 if bound is None else next(n for n in range(400) if (bound * 10**n).denominator == 1)


def _decimals(low: Fraction, above: bool, high: Fraction | None, below: bool, size: int) -> list[str]:
    """Returns patterns of the decimals from low, at least 0, to high, with up to `size` digits after the point."""
    first, least = _split(low, size)
    last, most = (None, None) if high is None else _split(high, size)
    if high is not None and low > high:
        return []
    if first == last:
        return _ending(first, _fractions(least, most, above, below, size))
    between = '|'.join(natural(first + 1, None if last is None else last - 1, DIGITS - size))
    return [
        *_ending(first, _fractions(least, None, above, False, size)),
        *([f'({between})(\\.[0-9]{{1,{size}}})?'] if between else []),
        *([] if last is None else _ending(last, _fractions(None, most, False, below, size))),
    ]


def _split(number: Fraction, size: int) -> tuple[int, str]:
    """Returns (the integer part, the digits after the point without zeros at their end)."""
    whole = math.floor(number)
    return whole, f'{int((number - whole) * 10**size):0{size}}'.rstrip('0')


def _ending(whole: int, fractions: list[str]) -> list[str]:
    """Returns the patterns of an integer part with digits after it; no digits are no point."""
    return [str(whole) if part == '' else rf'{whole}\.{part}' for part in fractions]


def _fractions(low: str | None, high: str | None, above: bool, below: bool, size: int) -> list[str]:
    """Returns patterns of up to `size` digits after the point, from low to high; '' is of none."""
    if low == '' and not above:
        low = None
    if low is None and high is None:
        return ['', f'[0-9]{{1,{size}}}'] if size else ['']
    if high == '' and (low is not None or below):
        return []
    found = [''] if low is None and (high != '' or not below) else []
    if not size:
        return found
    states: dict[tuple[str | None, str | None], list[int]] = {}
    for digit in range(10):
        lower, upper = (low or '0')[:1] if low is not None else None, (high or '0')[:1] if high is not None else None
        if (lower is not None and digit < int(lower)) or (upper is not None and digit > int(upper)):
            continue
        state = (
            low[1:] if low is not None and digit == int(lower or 0) else None,
            high[1:] if high is not None and digit == int(upper or 0) else None,
        )
        states.setdefault(state, []).append(digit)
    for (lower, upper), digits in states.items():
        rest = _fractions(lower, upper, above, below, size - 1)
        if rest:
            together = rest[0] if len(rest) == 1 else f'({"|".join(rest)})'
            found.append(f'[{digits[0]}-{digits[-1]}]{together}')
    return found
