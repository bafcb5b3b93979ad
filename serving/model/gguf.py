"""What a GGUF file says of the model in it: metadata and the list of tensors, never their data.

Only the head of a file is read, in pieces, and long lists (a tokenizer has hundreds of thousands of entries) are
stepped over, so that a file of hundreds of gigabytes costs what its head costs. Nothing that a file says of itself is
believed before it is held against the file's size; a broken file is an error with the byte at which it broke.

Format: the GGUF specification in the `ggml` repository (`docs/gguf.md`), versions 2 and 3. What has to hold for
tensors, and the sizes of types, are those of llama.cpp's `ggml/src/gguf.cpp`, `ggml/src/ggml-common.h` and of the
`gguf` package's `constants.py`; names of files that are split are those of llama.cpp's `gguf-split`.
"""

import math
import os
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

from serving.errors import ConfigError

__all__ = ["GgufFile", "GgufPart", "GgufTensor", "Skipped", "part_names", "read_gguf"]

_CHUNK_BYTES = 2**18
_MAX_TEXT_BYTES = 2**20
_MAX_COUNT = 2**20
_MAX_LIST = 2**24
_KEPT_NUMBERS = 4096
_KEPT_TEXTS = 64

_TYPES: Final[Mapping[int, tuple[str, int, int]]] = MappingProxyType(
    {
        0: ("F32", 1, 4),
        1: ("F16", 1, 2),
        2: ("Q4_0", 32, 18),
        3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24),
        8: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 36),
        10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176),
        14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74),
        18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110),
        22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1),
        25: ("I16", 1, 2),
        26: ("I32", 1, 4),
        27: ("I64", 1, 8),
        28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56),
        30: ("BF16", 1, 2),
        34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17),
        40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
        42: ("Q2_0", 64, 18),
    }
)
"""ggml types by number: name, weights of a block, bytes of a block."""

_FILE_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        0: "F32",
        1: "F16",
        2: "Q4_0",
        3: "Q4_1",
        7: "Q8_0",
        8: "Q5_0",
        9: "Q5_1",
        10: "Q2_K",
        11: "Q3_K_S",
        12: "Q3_K_M",
        13: "Q3_K_L",
        14: "Q4_K_S",
        15: "Q4_K_M",
        16: "Q5_K_S",
        17: "Q5_K_M",
        18: "Q6_K",
        19: "IQ2_XXS",
        20: "IQ2_XS",
        21: "Q2_K_S",
        22: "IQ3_XS",
        23: "IQ3_XXS",
        24: "IQ1_S",
        25: "IQ4_NL",
        26: "IQ3_S",
        27: "IQ3_M",
        28: "IQ2_S",
        29: "IQ2_M",
        30: "IQ4_XS",
        31: "IQ1_M",
        32: "BF16",
        36: "TQ1_0",
        37: "TQ2_0",
        38: "MXFP4",
        39: "NVFP4",
        40: "Q1_0",
        41: "Q2_0",
    }
)
"""What `general.file_type` means: the recipe by which most tensors were quantised."""

_VALUES: Final[Mapping[int, str]] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_TEXT, _LIST = 8, 9
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A list or a text that was stepped over because of its length; `length` is elements, or bytes of a text."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor.

    Attributes:
        name: as the file has it, such as `blk.0.attn_q.weight`.
        shape: sizes from the outermost to the innermost, as frameworks write them; the file has them the other way.
        type: name of its ggml type, such as Q4_K.
        size_bytes: bytes of its data without padding.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    size_bytes: int

    @property
    def elements(self) -> int:
        """Weights in it."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufPart:
    """One file of the model.

    Attributes:
        path: the file.
        file_bytes: its size.
        needed_bytes: size that it must have at least for the data of its tensors to be there.
    """

    path: Path
    file_bytes: int
    needed_bytes: int

    @property
    def missing_bytes(self) -> int:
        """Bytes of tensor data that are not there: the file was cut."""
        return max(0, self.needed_bytes - self.file_bytes)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A model in GGUF, of one file or of several.

    Attributes:
        path: the file that was asked for.
        version: of the format.
        metadata: values by key. Lists are tuples; those of more than 4,096 numbers or 64 texts, and texts of more than
            a MiB, are `Skipped`.
        tensors: in the order of the files.
        parts: the files that were read.
        missing_parts: names of files that belong to the model and are not there.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]
    parts: tuple[GgufPart, ...]
    missing_parts: tuple[str, ...] = ()

    @property
    def architecture(self) -> str | None:
        """llama.cpp's name for the kind of model; the prefix of the keys that describe it. None if it has none."""
        found = self.metadata.get("general.architecture")
        return found if isinstance(found, str) else None

    @property
    def parameters(self) -> int:
        """Weights of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def bytes_by_type(self) -> dict[str, int]:
        """Bytes of tensor data by ggml type, most first."""
        found: Counter[str] = Counter()
        for tensor in self.tensors:
            found[tensor.type] += tensor.size_bytes
        return dict(found.most_common())

    @property
    def quantisation(self) -> str:
        """What to call it: the recipe that the file names, else the type that most bytes have."""
        kind = self.metadata.get("general.file_type")
        # 1,024 marks a recipe that was guessed from the tensors.
        named = _FILE_TYPES.get(kind & ~1024) if isinstance(kind, int) and not isinstance(kind, bool) else None
        return named or next(iter(self.bytes_by_type), "unknown")


def read_gguf(path: Path, *, whole: bool = True) -> GgufFile:
    """Read what a GGUF file says of its model; of a model in several files, all of them.

    Args:
        path: the file, or any one of the files of a model that is split.
        whole: refuse a model of which a file is missing. If not, what is there is read, and `missing_parts` names the
            rest.

    Raises:
        ConfigError: it cannot be read, is no GGUF file of a known version, or breaks the format's rules. The message
            has the file and the byte.
    """
    names = part_names(path)
    there = [name for name in names if (path.parent / name).is_file()] if len(names) > 1 else names
    missing = tuple(name for name in names if name not in there)
    if missing and (whole or not there):
        raise ConfigError(
            f"{path}: {len(missing)} of the model's {len(names)} files are missing: {', '.join(missing[:5])}"
            f"{' and more' if len(missing) > 5 else ''}; put all of them in one folder"
        )
    metadata: dict[str, Any] = {}
    tensors: list[GgufTensor] = []
    parts = []
    version = 0
    for name in there:
        head = _read_part(path.parent / name)
        version = version or head.version
        count = head.metadata.get("split.count", 1)
        if count not in (0, len(names)):
            raise ConfigError(
                f"{head.part.path}: is one of {count} files, but its name says {len(names)}; "
                "llama.cpp finds the others by names like model-00001-of-00003.gguf"
            )
        metadata = {**head.metadata, **metadata}
        tensors += head.tensors
        parts.append(head.part)
    twice = [name for name, times in Counter(tensor.name for tensor in tensors).items() if times > 1]
    if twice:
        raise ConfigError(f"{path}: tensor {twice[0][:80]!r} is in two files; they are not of one model")
    announced = metadata.get("split.tensors.count")
    if not missing and isinstance(announced, int) and len(names) > 1 and announced != len(tensors):
        raise ConfigError(
            f"{path}: {len(names)} files have {len(tensors)} tensors, not {announced}; they are not of one model"
        )
    return GgufFile(path, version, MappingProxyType(metadata), tuple(tensors), tuple(parts), missing)


def part_names(path: Path) -> list[str]:
    """Names of all files of the model that this one belongs to, by the pattern that llama.cpp splits files with."""
    match = _PART.fullmatch(path.name)
    count = int(match["count"]) if match else 1
    if match is None or count < 2 or not 1 <= int(match["number"]) <= count:
        return [path.name]
    return [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class _Head:
    version: int
    metadata: dict[str, Any]
    tensors: list[GgufTensor]
    part: GgufPart


def _read_part(path: Path) -> _Head:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is not a file")
        with path.open("rb") as file:
            return _head(_Reader(path, file, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL byte in the name
        raise ConfigError(f"{str(path)!r}: cannot be read: {error}") from error


def _head(reader: "_Reader") -> _Head:
    if reader.size < 4 or reader.take(4, "magic") != b"GGUF":
        raise reader.error("does not begin with GGUF, so it is no GGUF file", at=0)
    version = reader.number("I", "version")
    if version and version & 0xFFFF == 0:
        raise reader.error("is big-endian, which llama.cpp loads on such machines only; convert it anew", at=4)
    if version not in (2, 3):
        raise reader.error(f"is of GGUF version {version}; known: 2, 3", at=4)
    tensor_count = reader.count("number of tensors", least_bytes=24)
    pair_count = reader.count("number of metadata keys", least_bytes=13)
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        start = reader.offset
        key = reader.name("key")
        if key in metadata:
            raise reader.error(f"metadata key {key[:80]!r} stands twice", at=start)
        metadata[key] = reader.value(reader.number("I", f"type of {key[:80]!r}"), key)
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise reader.error(f"general.alignment is {str(alignment)[:40]}; it must be a power of two")
    tensors: list[GgufTensor] = []
    names: set[str] = set()
    end = needed = 0
    for _ in range(tensor_count):
        start = reader.offset
        tensor, offset = _tensor(reader)
        if tensor.name in names:
            raise reader.error(f"tensor {tensor.name[:80]!r} stands twice", at=start)
        # llama.cpp wants data without gaps, which also shows a type that a fork of it stores in other sizes.
        if offset != end:
            before = f"{tensors[-1].name[:80]!r} of type {tensors[-1].type}" if tensors else "the head"
            raise reader.error(
                f"data of tensor {tensor.name[:80]!r} is said to begin at {offset}, but {before} ends at {end}; "
                "the file is damaged, or from a fork of llama.cpp with types of its own",
                at=start,
            )
        names.add(tensor.name)
        tensors.append(tensor)
        needed = end + tensor.size_bytes
        end += -(-tensor.size_bytes // alignment) * alignment
    data_start = -(-reader.offset // alignment) * alignment
    part = GgufPart(reader.path, reader.size, data_start + needed if tensors else reader.offset)
    return _Head(version, metadata, tensors, part)


def _tensor(reader: "_Reader") -> tuple[GgufTensor, int]:
    """(one tensor, where its data begins in the part of the file that holds data)."""
    start = reader.offset
    name = reader.name("name of a tensor")
    dimensions = reader.number("I", "number of dimensions")
    if dimensions > 4:
        raise reader.error(f"tensor {name[:80]!r} has {dimensions} dimensions; at most 4 are known", at=start)
    sizes = [reader.number("Q", "size of a dimension") for _ in range(dimensions)]
    number = reader.number("I", "type of a tensor")
    offset = reader.number("Q", "offset of a tensor")
    if number not in _TYPES:
        raise reader.error(
            f"tensor {name[:80]!r} has ggml type {number}, which is not known (removed from llama.cpp, from a fork, "
            "or newer than this program)",
            at=start,
        )
    kind, block, block_bytes = _TYPES[number]
    elements = math.prod(sizes)
    if elements >= 2**63:
        raise reader.error(f"tensor {name[:80]!r} has an absurd shape: {' x '.join(map(str, sizes))}", at=start)
    if elements and (sizes[0] if sizes else 1) % block:
        raise reader.error(f"tensor {name[:80]!r}: rows of {sizes[0]} are no whole blocks of {kind}", at=start)
    return GgufTensor(name, tuple(reversed(sizes)), kind, elements // block * block_bytes), offset


class _Reader:
    """A file read forward in pieces; every step is held against the file's size before anything is allocated."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.size = size
        self._file = file
        self._buffer = b""
        self._start = 0  # where the buffer begins in the file
        self._at = 0  # where the next byte is in the buffer

    @property
    def offset(self) -> int:
        return self._start + self._at

    def error(self, message: str, at: int | None = None) -> ConfigError:
        return ConfigError(f"{self.path}: at byte {self.offset if at is None else at}: {message}")

    def take(self, count: int, what: str) -> bytes:
        self._need(count, what)
        if self._at + count > len(self._buffer):
            self._fill(max(count, _CHUNK_BYTES), count, what)
        found = self._buffer[self._at : self._at + count]
        self._at += count
        return found

    def skip(self, count: int, what: str) -> None:
        self._need(count, what)
        if self._at + count <= len(self._buffer):
            self._at += count
        else:
            self._start, self._at, self._buffer = self.offset + count, 0, b""
            self._file.seek(self._start)

    def number(self, letter: str, what: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}"), what))[0]

    def count(self, what: str, *, least_bytes: int) -> int:
        """A number of things that take at least so many bytes each."""
        start = self.offset
        found = int(self.number("Q", what))
        if found > _MAX_COUNT or found * least_bytes > self.size:
            raise self.error(f"{what} is {found}, more than a file of {self.size} bytes can have", at=start)
        return found

    def name(self, what: str) -> str:
        start = self.offset
        length = self.number("Q", f"length of a {what}")
        if not 0 < length <= 2**16:
            raise self.error(f"a {what} of {length} bytes is none", at=start)
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"a {what} is not UTF-8", at=start) from error

    def value(self, kind: int, key: str) -> Any:
        what = f"value of {key[:80]!r}"
        if kind == _TEXT:
            return self._text(what)
        if kind == _LIST:
            return self._list(what)
        if kind not in _VALUES:
            raise self.error(f"{what} has type {kind}, which is not known")
        return self.number(_VALUES[kind], what)

    def _text(self, what: str) -> str | Skipped:
        length = int(self.number("Q", f"length of the {what}"))
        if length > _MAX_TEXT_BYTES:
            self.skip(length, what)
            return Skipped(length)
        return str(self.take(length, what), "utf-8", "replace")

    def _list(self, what: str) -> tuple[Any, ...] | Skipped:
        kind = self.number("I", f"type of the elements of the {what}")
        start = self.offset
        length = int(self.number("Q", f"length of the {what}"))
        if length > _MAX_LIST:
            raise self.error(f"{what} has {length} elements, which no model has", at=start)
        if kind == _TEXT:
            self._need(8 * length, what)
            if length <= _KEPT_TEXTS:
                return tuple(self._text(what) for _ in range(length))
            self._skip_texts(length, what)
            return Skipped(length)
        if kind not in _VALUES:
            raise self.error(f"{what} is a list of type {kind}, which is not known", at=start)
        size = struct.calcsize(f"<{_VALUES[kind]}")
        if length > _KEPT_NUMBERS:
            self.skip(length * size, what)
            return Skipped(length)
        return struct.unpack(f"<{length}{_VALUES[kind]}", self.take(length * size, what))

    def _skip_texts(self, count: int, what: str) -> None:
        # Hundreds of thousands of them: the loop keeps what it needs in local names.
        buffer, at = self._buffer, self._at
        for _ in range(count):
            end = at + 8
            if end <= len(buffer):
                at = end + int.from_bytes(buffer[at:end], "little")
                if at <= len(buffer):
                    continue
                self._at = end
                self.skip(at - end, what)
            else:
                self._at = at
                self.skip(int(self.number("Q", f"length of an element of the {what}")), what)
            buffer, at = self._buffer, self._at
        self._at = at

    def _need(self, count: int, what: str) -> None:
        if count > self.size - self.offset:
            raise self.error(f"the file ends before the {what} does ({self.size} bytes)")

    def _fill(self, wanted: int, least: int, what: str) -> None:
        rest = self._buffer[self._at :]
        self._start, self._at = self.offset, 0
        self._buffer = rest + self._file.read(wanted)
        if len(self._buffer) < least:
            raise self.error(f"the file ends before the {what} does; it shrank while it was read")
