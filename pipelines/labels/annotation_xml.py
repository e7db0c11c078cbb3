"""Annotations in XML, element by element: nothing of a document is held but what its reader keeps.

Takes a file and a reader for each root element, gives what the reader made. A document type is refused before anything
in it is looked at: without one there are no entities to expand and no other files to be fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol
from xml.parsers import expat

from pipelines.labels.asap import AsapReader
from pipelines.labels.drawing import FILE_BYTES, Drawing
from pipelines.labels.imagescope import ImageScopeReader
from pipelines.slides.slide import SlideError

CHUNK_BYTES, TOKEN_BYTES = 1 << 18, 1 << 20
"""Bytes of a file given to the parser at a time, and of its longest tag or comment."""


class ElementReader(Protocol):
    """Told of the elements of a document in their order."""

    def start(self, element: str, attributes: Mapping[str, str]) -> None: ...
    def end(self, element: str) -> None: ...
    def drawing(self) -> Drawing: ...


READERS: Mapping[str, Callable[[], ElementReader]] = {
    "ASAP_Annotations": AsapReader,
    "Annotations": ImageScopeReader,
}
"""By root element."""


def read_xml(path: Path) -> Drawing:
    """Return the areas of an ASAP or Aperio ImageScope file, told apart by the root element.

    Raises:
        SlideError: the file cannot be read, is no such XML, declares a document type, or an object is malformed (says
            in which line).
    """
    reader: ElementReader | None = None
    parser = expat.ParserCreate()

    def start(element: str, attributes: Mapping[str, str]) -> None:
        nonlocal reader
        if reader is None:
            if element not in READERS:
                raise ValueError(f"the root element is {element!r}, not {' or '.join(READERS)}")
            reader = READERS[element]()
        reader.start(element, attributes)

    def end(element: str) -> None:
        assert reader is not None
        reader.end(element)

    def refuse_document_type(name: str, *rest: object) -> None:
        raise ValueError(f"it declares a document type ({name!r}); remove the DOCTYPE: entities are not read")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse_document_type
    line = ""
    try:
        if path.stat().st_size > FILE_BYTES:
            raise SlideError(f"annotation {path} is larger than {FILE_BYTES >> 30} GiB: leave out what is not drawn")
        with path.open("rb") as file:
            line = "in or before line {}: "
            fed = 0
            while chunk := file.read(CHUNK_BYTES):
                parser.Parse(chunk, False)
                fed += len(chunk)
                # expat reads an unfinished tag or comment again with every chunk: time grows with the square
                if fed - parser.CurrentByteIndex > TOKEN_BYTES + CHUNK_BYTES:
                    raise ValueError(f"a tag, comment or value of more than {TOKEN_BYTES >> 20} MiB")
            parser.Parse(b"", True)
        line = ""
        assert reader is not None, "expat has seen a root element"
        return reader.drawing()
    except OSError as fault:
        raise SlideError(f"annotation {path} cannot be read: {fault.strerror or fault}") from fault
    except expat.ExpatError as fault:
        raise SlideError(f"annotation {path} is damaged: not XML ({fault}). Export it again") from fault
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as fault:
        what = f"{type(fault).__name__}: {fault}" if not isinstance(fault, ValueError) else str(fault)
        raise SlideError(
            f"annotation {path} cannot be used: {line.format(parser.CurrentLineNumber)}{what}. "
            "Export it from ASAP or ImageScope again"
        ) from fault
