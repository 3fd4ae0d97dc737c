"""Conditions that a config must meet, and the nearest value that would meet them."""

from tformer.errors import UserError


def require(condition: bool, message: str) -> None:
    """Raises a `UserError` where a condition does not hold."""
    if not condition:
        raise UserError(message)


def require_divisor(name: str, value: int, of_name: str, of: int, more: str = '') -> None:
    """Raises a `UserError` that names the nearest divisor where `value` does not divide `of`."""
    near = min((d for d in range(1, of + 1) if of % d == 0), key=lambda d: abs(d - value))
    require(of % value == 0, f'{name}={value} does not divide {of_name}={of}; nearest that does: {near}{more}')


def require_multiple(name: str, value: int, of: int, words: str) -> None:
    """Raises a `UserError` that names the nearest multiple where `value` is not one of `of`, which is `words`."""
    near = max(1, round(value / of)) * of
    require(value % of == 0, f'{name}={value} is not a multiple of {words}; nearest that is: {near}')
