"""A form with one file, read as it comes: fields are kept, the file's bytes are handed on.

It knows neither HTTP nor where the bytes go.
"""

from collections.abc import Callable, Mapping
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tasc_serve.errors import SHOWN

_LONGEST_VALUE: Final = 1024  # bytes of a field that is no file
_LONGEST_NAME: Final = 512  # characters of a file's name
_MOST_FIELDS: Final = 16
_MOST_HEADER: Final = 4096  # bytes of one header of a part
_DISPOSITION: Final = b"content-disposition"


class FormError(ValueError):
    """A form cannot be read.

    Attributes:
        field: The field at fault, if it is one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class FileForm:
    """What has come of a form so far.

    Attributes:
        fields: Those that are no file.
        filename: The file's name; None until its part begins.
        whole: The form has come to its end.

    Args:
        content_type: The request's, with the boundary.
        sink: Takes the file's bytes.

    Raises:
        FormError: Another content type, or none.
    """

    def __init__(self, content_type: str, sink: Callable[[bytes], object]) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise FormError("send the file as multipart/form-data, with its boundary")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.whole = False
        self._sink = sink
        self._name: str | None = None
        self._value: bytearray | None = None
        self._header, self._headers = bytearray(), dict[bytes, bytes]()
        self._header_value = bytearray()
        try:
            self._parser = self._new_parser(options[b"boundary"])
        except FormParserError as error:
            raise FormError(str(error)) from error

    def feed(self, data: bytes) -> None:
        """Raises FormError: that is no form, or none that fits."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise FormError(f"the form cannot be read: {error}") from error

    def _new_parser(self, boundary: bytes) -> MultipartParser:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_named,
                "on_header_value": self._header_says,
                "on_header_end": self._header_ends,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._all,
            },
            max_header_size=_MOST_HEADER,
        )

    def _begin(self) -> None:
        self._headers = {}
        self._name = self._value = None

    def _header_named(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_says(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(_DISPOSITION, b""))
        name = _text(options.get(b"name", b""))
        if not name:
            raise FormError("a part of the form has no name")
        if name in self.fields or (name == "file" and self.filename is not None):
            raise FormError(f"{name[:SHOWN]} is sent twice", name[:SHOWN])
        if len(self.fields) == _MOST_FIELDS:
            raise FormError(f"the form has more than {_MOST_FIELDS} fields")
        self._name = name
        if name == "file":
            self.filename = _file_name(options)
        else:
            self._value = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._value is None:
            self._sink(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _LONGEST_VALUE:
            name = str(self._name)[:SHOWN]
            raise FormError(f"{name} has more than {_LONGEST_VALUE} bytes", name)

    def _end(self) -> None:
        if self._name is not None and self._value is not None:
            self.fields[self._name] = _text(bytes(self._value))

    def _all(self) -> None:
        self.whole = True


def _file_name(options: Mapping[bytes, bytes]) -> str:
    """Without a name a part is a file too: its name is ours to give."""
    name = _text(options.get(b"filename", b"")).replace("\\", "/").rpartition("/")[2]
    shown = "".join(c if c.isprintable() else "_" for c in name)[:_LONGEST_NAME]
    return shown or "file.jsonl"


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
