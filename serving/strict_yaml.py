"""Reading the YAML files that people write: every mistake is named with its file and line, and none is let through.

A file is read into `Node`s, which know where they stand. What is asked of them is typed, so that a reader of one kind
of file lists its keys once and needs no other check: a misspelt key is refused and never silently ignored.
"""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serving.errors import ConfigError

__all__ = ["MAX_BYTES", "Node", "parse_yaml", "read_yaml"]

MAX_BYTES = 2**20
"""No file of settings is larger."""


@dataclass(frozen=True, slots=True)
class Node:
    """One value of the file. `name` is the path of keys that leads to it, `where` is `file:line`."""

    where: str
    name: str
    _node: yaml.Node
    _file: str

    @property
    def line(self) -> int:
        """Line in the file, from 1."""
        return int(self.where.rpartition(":")[2])

    def error(self, message: str) -> ConfigError:
        """The error to raise for this value: file, line, key and `message`."""
        return ConfigError(f"{self.where}: {self.name}: {message}" if self.name else f"{self.where}: {message}")

    def mapping(self, known: Iterable[str] | None = None, required: Iterable[str] = ()) -> dict[str, "Node"]:
        """The keys of a mapping with their values.

        Args:
            known: the keys that may stand here; None lets any key stand.
            required: the keys that must.

        Raises:
            ConfigError: not a mapping, or a key that is unknown, missing, written twice, or not text.
        """
        if not isinstance(self._node, yaml.MappingNode):
            raise self.error(f"must be a mapping of keys to values, not {self._kind()}")
        allowed = None if known is None else tuple(known)
        found: dict[str, Node] = {}
        for key_node, value_node in self._node.value:
            where = f"{self._file}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                raise ConfigError(f"{where}: a key must be plain text; quote it if it looks like a number or on/off")
            key = key_node.value
            if allowed is not None and key not in allowed:
                near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.7)
                hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(allowed)}"
                under = f" in {self.name!r}" if self.name else ""
                raise ConfigError(f"{where}: unknown key {key!r}{under}; {hint}")
            if key in found:
                raise ConfigError(f"{where}: key {key!r} is written a second time; keep one")
            found[key] = Node(where, f"{self.name}.{key}" if self.name else key, value_node, self._file)
        for key in required:
            if key not in found:
                raise self.error(f"key {key!r} is missing")
        return found

    def items(self) -> list["Node"]:
        """The elements of a list.

        Raises:
            ConfigError: not a list.
        """
        if not isinstance(self._node, yaml.SequenceNode):
            raise self.error(f"must be a list, not {self._kind()}")
        return [
            Node(f"{self._file}:{node.start_mark.line + 1}", f"{self.name}[{turn}]", node, self._file)
            for turn, node in enumerate(self._node.value)
        ]

    def text(self) -> str:
        """Text that is not empty.

        Raises:
            ConfigError: something else stands here.
        """
        value = self._scalar()
        if not isinstance(value, str) or not value.strip():
            hint = "" if self._is_empty() else " (put quotes around it if it looks like a number or a date)"
            raise self.error(f"must be text, not {self._kind()}{hint}")
        return value

    def number(self, minimum: float = -math.inf, maximum: float = math.inf) -> float:
        """A finite number in `minimum..maximum`.

        Raises:
            ConfigError: something else stands here.
        """
        value = self._scalar()
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"must be a number, not {self._kind()}")
        self._refuse_disguise(value)
        if not minimum <= value <= maximum:
            raise self.error(f"is {value}; it must be {_range(minimum, maximum)}")
        return float(value)

    def integer(self, minimum: float = -math.inf, maximum: float = math.inf) -> int:
        """A whole number in `minimum..maximum`.

        Raises:
            ConfigError: something else stands here.
        """
        value = self._scalar()
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"must be a whole number, without quotes or fraction, not {self._kind()}")
        self._refuse_disguise(value)
        if not minimum <= value <= maximum:
            raise self.error(f"is {value}; it must be {_range(minimum, maximum)}")
        return value

    def flag(self) -> bool:
        """True or false.

        Raises:
            ConfigError: something else stands here.
        """
        value = self._scalar()
        if not isinstance(value, bool):
            raise self.error(f"must be true or false, not {self._kind()}")
        return value

    def is_flag(self) -> bool:
        """Whether true or false stands here, where something else is allowed too."""
        return isinstance(self._scalar(), bool)

    def is_text(self) -> bool:
        """Whether text stands here, where something else is allowed too."""
        return isinstance(self._scalar(), str)

    def is_mapping(self) -> bool:
        """Whether keys stand here, where a short form is allowed too."""
        return isinstance(self._node, yaml.MappingNode)

    def is_null(self) -> bool:
        """Whether nothing stands here: the key has no value, or `null`."""
        return self._node.tag == "tag:yaml.org,2002:null"

    def _refuse_disguise(self, value: float) -> None:
        """010 is eight to YAML, and 1:30 is ninety: what people meant by it is not known."""
        if isinstance(value, int) and str(value) != self._node.value.replace("_", "").removeprefix("+"):
            raise self.error(f"{self._node.value[:80]!r} is {value} to YAML; write plain digits")

    def _is_empty(self) -> bool:
        return isinstance(self._node, yaml.ScalarNode) and not self._node.value.strip()

    def _scalar(self) -> Any:
        if not isinstance(self._node, yaml.ScalarNode):
            return None
        try:
            return yaml.constructor.SafeConstructor().construct_object(self._node)
        except (yaml.YAMLError, ValueError, LookupError, AttributeError):
            # An unknown tag, a date that is none, a number of thousands of digits; YAML believes explicit tags.
            return None

    def _kind(self) -> str:
        if isinstance(self._node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self._node, yaml.SequenceNode):
            return "a list"
        return "nothing" if self.is_null() else repr(self._node.value[:80])


def read_yaml(path: Path) -> Node:
    """The root of a file that holds one YAML document.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is empty.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            # A pipe would be waited for without end.
            raise ConfigError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_yaml(raw, str(path))


def parse_yaml(raw: bytes, path: str) -> Node:
    """The root of one YAML document that is, or is to be, the content of `path`.

    Raises:
        ConfigError: too large, not YAML, or empty.
    """
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than 1 MiB; this is no file of settings")
    try:
        root = yaml.compose(raw.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        line_number = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line_number}: not UTF-8 text, so no file of settings") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply for a file of settings") from error
    if root is None:
        raise ConfigError(f"{path}: the file is empty")
    return Node(f"{path}:{root.start_mark.line + 1}", "", root, path)


def _range(minimum: float, maximum: float) -> str:
    if maximum == math.inf:
        return f"{minimum:g} or more"
    return f"{maximum:g} or less" if minimum == -math.inf else f"{minimum:g} to {maximum:g}"
