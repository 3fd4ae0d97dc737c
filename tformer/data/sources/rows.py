"""What the formats of binary files with rows share."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tformer.data.sources.records import BadRecord
from tformer.data.sources.text_reader import Numbered, unchanged
from tformer.errors import UserError

AT_ONCE = 256  # rows that are read together

Values = dict[str, Any]
Names = Mapping[str, bool]  # the columns that are wanted: whether every row needs them


class Rows(Numbered):
    """The rows of a binary file."""

    between = ' row '
    groups: range | None = None  # those of a table to read; None: all

    def unchanged(self) -> contextlib.AbstractContextManager[None]:
        """Guards a block that reads the file in any order against changes of it."""
        return unchanged(self.file)


@contextlib.contextmanager
def one_line(path: Path) -> Iterator[None]:
    """Turns what the libraries raise of a damaged file into a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # pyarrow has some that are of no common kind
        why = getattr(error, 'strerror', None) or ' '.join(str(error).split()) or type(error).__name__
        raise UserError(f'{path} cannot be read: {why}') from None


def plain(value: Any, classes: list[str] | None) -> Any:
    """Returns a value as JSON has it: bytes become text, and numbers of classes become names."""
    if isinstance(value, list):
        return [plain(item, classes) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise BadRecord(f'not UTF-8: byte 0x{value[error.start]:02x}') from None
    if classes is None or value is None:
        return value
    if type(value) is not int or not 0 <= value < len(classes):  # often -1
        raise BadRecord(f'class {value!r} is not among the {len(classes)} of the file: is it a split without labels?')
    return classes[value]
